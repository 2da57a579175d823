"""CUDA and ROCm tensors handed to the Triton kernels: results allocated, launches started, nothing synchronised.

The functions have the names and arguments of `dispatch`, which imports this module only where Triton is installed and a
tensor on such a device comes.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from brevact import triton_kernels
from brevact.quantizers.geometry import DEFAULT_BLOCK, LARGEST_BLOCK, packed_bytes

if TYPE_CHECKING:
    from brevact.quantizers.packed import PackedSpec
    from brevact.quantizers.uniform import UniformQuantizer

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def takes(x: Tensor) -> bool:
    """Whether the kernels read and write this tensor; float64 has no hardware worth a kernel.

    Args:
        x: Any tensor.

    Returns:
        True for plain tensors on a CUDA or ROCm device, but for float64.
    """
    return x.is_cuda and type(x) in _PLAIN_TYPES and x.dtype != torch.float64


def quantize_uniform(x: Tensor, spec: PackedSpec[UniformQuantizer], seed: int | Tensor) -> Tensor:
    """See `dispatch.quantize_uniform`. The kernel reads the seed from device memory.

    Args:
        x: Tensor of the spec's layout.
        spec: Spec of a `UniformQuantizer`.
        seed: Signed 64-bit int or 0-d int64 tensor.

    Returns:
        The bytes.
    """
    x = x.detach()
    if not spec.layout.is_dense or x.is_neg():
        x = spec.layout.flatten(x)
    buffer, plan = spec.empty(x), plan_of(spec)
    codes, minimum, scale = spec.split(buffer)
    key = None
    if plan.stochastic:
        key = seed.to(x.device) if isinstance(seed, Tensor) else x.new_full((), seed, dtype=torch.int64)
    for launch in triton_kernels.quantize_uniform(x, codes, scale, minimum, key, plan):
        launch.run()
    return buffer


def dequantize_uniform(
    buffer: Tensor, spec: PackedSpec[UniformQuantizer], other: Tensor | None, target: Tensor
) -> None:
    """See `dispatch.dequantize_uniform` and `dispatch.dequantize_multiply_uniform`.

    Args:
        buffer: Bytes of the spec.
        spec: Spec of a `UniformQuantizer`.
        other: Dense factor, or None.
        target: Dense result; may be `other`.
    """
    codes, minimum, scale = spec.split(buffer)
    triton_kernels.dequantize_uniform(codes, scale, minimum, other, target, plan_of(spec)).run()


def can_pack(codes: Tensor, bit_width: int, block_size: int) -> bool:
    """Whether the kernel packs these codes: its tiles are limited, and it does not extend signs.

    Args:
        codes: Integer tensor.
        bit_width: Bits a code.
        block_size: Codes in a block.

    Returns:
        True if `pack` takes them.
    """
    fits = codes.dtype == torch.uint8 or bit_width <= 8 * codes.itemsize
    return takes(codes) and fits and block_size <= LARGEST_BLOCK


def pack(codes: Tensor, bit_width: int, block_size: int) -> Tensor:
    """See `dispatch.pack`.

    Args:
        codes: (n,) contiguous integer tensor.
        bit_width: Bits a code.
        block_size: Codes in a block.

    Returns:
        uint8 tensor.
    """
    packed = codes.new_empty(packed_bytes(codes.numel(), bit_width, block_size), dtype=torch.uint8)
    triton_kernels.pack_codes(codes, packed, bit_width, block_size).run()
    return packed


def can_unpack(packed: Tensor, block_size: int) -> bool:
    """Whether the kernel unpacks codes in blocks of this size.

    Args:
        packed: uint8 tensor.
        block_size: Codes in a block.

    Returns:
        True if `unpack` takes them.
    """
    return takes(packed) and block_size <= LARGEST_BLOCK


def unpack(packed: Tensor, bit_width: int, numel: int, block_size: int) -> Tensor:
    """See `dispatch.unpack`.

    Args:
        packed: uint8 tensor.
        bit_width: Bits a code.
        numel: Number of codes.
        block_size: Codes in a block.

    Returns:
        (numel,) int32 tensor, int64 at 32 bits.
    """
    codes = packed.new_empty(numel, dtype=torch.int32 if bit_width < 32 else torch.int64)
    triton_kernels.unpack_codes(packed, codes, bit_width, block_size).run()
    return codes


def takes_float(x: Tensor) -> bool:
    """Whether the kernels of masks read this tensor's type.

    Args:
        x: Any tensor.

    Returns:
        True for tensors that `takes` takes, of a floating-point type or bool.
    """
    return takes(x) and (x.dtype in _FLOATS or x.dtype == torch.bool)


def pack_mask(flat: Tensor) -> Tensor:
    """See `dispatch.pack_mask`.

    Args:
        flat: (n,) contiguous tensor, bool or floating point.

    Returns:
        uint8 tensor.
    """
    packed = flat.new_empty(packed_bytes(flat.numel(), 1, DEFAULT_BLOCK), dtype=torch.uint8)
    source = flat.detach()
    triton_kernels.pack_mask(source.view(torch.uint8) if flat.dtype == torch.bool else source, packed).run()
    return packed


def unpack_mask(packed: Tensor, numel: int) -> Tensor:
    """See `dispatch.unpack_mask`.

    Args:
        packed: uint8 tensor.
        numel: Number of elements.

    Returns:
        (numel,) bool tensor.
    """
    mask = packed.new_empty(numel, dtype=torch.bool)
    triton_kernels.unpack_mask(packed, mask.view(torch.uint8)).run()
    return mask


def mask_multiply(packed: Tensor, numel: int, grad: Tensor, target: Tensor, negative_slope: float) -> None:
    """See `dispatch.mask_multiply`.

    Args:
        packed: uint8 mask.
        numel: Number of elements.
        grad: Dense gradient.
        target: Dense result of its dtype; may be `grad`.
        negative_slope: Factor where the mask is unset; 0 gives +0.
    """
    triton_kernels.mask_multiply(packed, grad, target, negative_slope, numel).run()


@functools.lru_cache(maxsize=4096)
def plan_of(spec: PackedSpec[UniformQuantizer]) -> triton_kernels.UniformPlan:
    """What the kernels need to know of a tensor.

    Args:
        spec: Spec of a `UniformQuantizer`.

    Returns:
        Its plan.
    """
    geometry = spec.quantizer.geometry(spec.layout)
    return triton_kernels.UniformPlan(
        numel=geometry.numel,
        bit_width=geometry.bit_width,
        block_size=geometry.block_size,
        inner=geometry.inner,
        groups=geometry.groups,
        one_run=geometry.one_run,
        stochastic=spec.quantizer.is_stochastic,
    )
