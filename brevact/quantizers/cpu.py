"""CPU tensors handed to the compiled kernels: results allocated, tensors turned into addresses.

Results are made by `new_empty` of a tensor at hand: torch's default device may be another one than the CPU.

The functions have the names and arguments of `dispatch`, which imports this module only where Numba is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from brevact import cpu_kernels
from brevact.quantizers.geometry import DEFAULT_BLOCK, packed_bytes

if TYPE_CHECKING:
    from brevact.quantizers.packed import PackedSpec
    from brevact.quantizers.uniform import UniformQuantizer

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_KINDS = {
    torch.float32: cpu_kernels.FLOAT32,
    torch.bfloat16: cpu_kernels.BFLOAT16,
    torch.float16: cpu_kernels.FLOAT16,
    torch.float64: cpu_kernels.FLOAT64,
    torch.bool: cpu_kernels.BOOL,
}


def takes(x: Tensor) -> bool:
    """Whether the kernels can read this tensor; subclasses may have no memory of their own.

    Args:
        x: Any tensor.

    Returns:
        True for plain CPU tensors.
    """
    return x.is_cpu and type(x) in _PLAIN_TYPES


def quantize_uniform(x: Tensor, spec: PackedSpec[UniformQuantizer], seed: int | Tensor) -> Tensor:
    """See `dispatch.quantize_uniform`.

    Args:
        x: Tensor of the spec's layout.
        spec: Spec of a `UniformQuantizer`.
        seed: Signed 64-bit int or 0-d int64 tensor.

    Returns:
        The bytes.
    """
    if not spec.layout.is_dense or x.is_neg():
        x = spec.layout.flatten(x.detach())
    buffer = spec.empty(x)
    codes = buffer.data_ptr()
    _, minimum, scale = spec.offsets
    plan = spec.cpu_plan or _plan(spec)
    threads = torch.get_num_threads()
    cpu_kernels.quantize_uniform(x.data_ptr(), codes, codes + scale, codes + minimum, int(seed), plan, threads)
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
    codes = buffer.data_ptr()
    _, minimum, scale = spec.offsets
    factor = 0 if other is None else other.data_ptr()
    plan = spec.cpu_plan or _plan(spec)
    threads = torch.get_num_threads()
    cpu_kernels.dequantize_uniform(codes, codes + scale, codes + minimum, factor, target.data_ptr(), plan, threads)


def can_pack(codes: Tensor, bit_width: int, block_size: int) -> bool:
    """Whether the kernel packs these codes: its scratch is limited, and it does not extend signs.

    Args:
        codes: Integer tensor.
        bit_width: Bits a code.
        block_size: Codes in a block.

    Returns:
        True if `pack` takes them.
    """
    fits = codes.dtype == torch.uint8 or bit_width <= 8 * codes.itemsize
    return takes(codes) and fits and block_size <= cpu_kernels.LARGEST_BLOCK


def pack(codes: Tensor, bit_width: int, block_size: int) -> Tensor:
    """See `dispatch.pack`.

    Args:
        codes: (n,) contiguous integer tensor.
        bit_width: Bits a code.
        block_size: Codes in a block.

    Returns:
        uint8 tensor.
    """
    n = codes.numel()
    packed = codes.new_empty(packed_bytes(n, bit_width, block_size), dtype=torch.uint8)
    pointers = codes.data_ptr(), codes.itemsize, packed.data_ptr()
    cpu_kernels.pack_codes(*pointers, bit_width, block_size, n, torch.get_num_threads())
    return packed


def can_unpack(packed: Tensor, block_size: int) -> bool:
    """Whether the kernel unpacks codes in blocks of this size.

    Args:
        packed: uint8 tensor.
        block_size: Codes in a block.

    Returns:
        True if `unpack` takes them.
    """
    return takes(packed) and block_size <= cpu_kernels.LARGEST_BLOCK


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
    pointers = packed.data_ptr(), codes.data_ptr(), codes.itemsize
    cpu_kernels.unpack_codes(*pointers, bit_width, block_size, numel, torch.get_num_threads())
    return codes


def takes_float(x: Tensor) -> bool:
    """Whether the kernels of masks read this tensor's type.

    Args:
        x: Any tensor.

    Returns:
        True for plain CPU tensors of the four floating-point types, and bool.
    """
    return takes(x) and x.dtype in _KINDS


def pack_mask(flat: Tensor) -> Tensor:
    """See `dispatch.pack_mask`.

    Args:
        flat: (n,) contiguous tensor, bool or floating point.

    Returns:
        uint8 tensor.
    """
    packed = flat.new_empty(packed_bytes(flat.numel(), 1, DEFAULT_BLOCK), dtype=torch.uint8)
    pointers = flat.data_ptr(), _KINDS[flat.dtype], packed.data_ptr()
    cpu_kernels.pack_mask(*pointers, flat.numel(), torch.get_num_threads())
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
    cpu_kernels.unpack_mask(packed.data_ptr(), mask.data_ptr(), numel, torch.get_num_threads())
    return mask


def mask_multiply(packed: Tensor, numel: int, grad: Tensor, target: Tensor, negative_slope: float) -> None:
    """See `dispatch.mask_multiply`.

    Args:
        packed: uint8 mask.
        numel: Number of elements.
        grad: Dense gradient.
        target: Dense result of its dtype; may be `grad`.
        negative_slope: Factor where the mask is unset.
    """
    pointers = packed.data_ptr(), grad.data_ptr(), target.data_ptr(), _KINDS[grad.dtype]
    cpu_kernels.mask_multiply(*pointers, negative_slope, numel, torch.get_num_threads())


def _plan(spec: PackedSpec[UniformQuantizer]) -> cpu_kernels.UniformPlan:
    """What the kernels need to know of a tensor, kept with the spec."""
    quantizer = spec.quantizer
    geometry = quantizer.geometry(spec.layout)
    plan = spec.cpu_plan = cpu_kernels.UniformPlan(
        numel=geometry.numel,
        bit_width=geometry.bit_width,
        block_size=geometry.block_size,
        inner=geometry.inner,
        groups=geometry.groups,
        one_run=geometry.one_run,
        stochastic=quantizer.is_stochastic,
        scale_kind=_KINDS[quantizer.scale_dtype],
        minimum_kind=_KINDS[quantizer.minimum_dtype],
        kind=_KINDS[spec.layout.dtype],
    )
    return plan
