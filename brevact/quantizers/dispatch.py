"""The one place that chooses who does the work: compiled kernels, or the plain torch reference."""

from __future__ import annotations

import functools
import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from brevact.quantizers import reference
from brevact.quantizers.geometry import DEFAULT_BLOCK, packed_bytes
from brevact.quantizers.layout import Layout
from brevact.quantizers.philox import seed_value

if TYPE_CHECKING:
    from brevact.cpu_kernels import UniformPlan
    from brevact.quantizers.uniform import UniformQuantizer


@functools.cache
def cpu_kernels() -> ModuleType | None:
    """The compiled CPU kernels, or None where Numba is missing."""
    if importlib.util.find_spec("numba") is None:
        return None
    return importlib.import_module("brevact.cpu_kernels")


def quantize_uniform(
    x: Tensor, quantizer: UniformQuantizer, layout: Layout, seed: int | Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a tensor; see `reference.quantize_uniform`.

    Args:
        x: Tensor of the layout.
        quantizer: Its settings.
        layout: The tensor's layout.
        seed: Seed of stochastic rounding, None to draw one; ignored for nearest.

    Returns:
        `(codes, scale, minimum)`.
    """
    stochastic = quantizer.is_stochastic
    seed = seed_value(seed, x.device) if stochastic else 0
    if _has_kernel(x):
        if not layout.is_dense or x.is_neg():
            x = layout.flatten(x.detach())
        plan, code_bytes = _plan(quantizer, layout)
        codes = torch.empty(code_bytes, dtype=torch.uint8)
        scale = torch.empty(plan.groups, dtype=quantizer.scale_dtype)
        minimum = torch.empty(plan.groups, dtype=quantizer.minimum_dtype)
        seed = seed if isinstance(seed, int) else seed.item()
        pointers = x.data_ptr(), codes.data_ptr(), scale.data_ptr(), minimum.data_ptr()
        cpu_kernels().quantize_uniform(*pointers, seed, plan, torch.get_num_threads())
        return codes, scale, minimum
    if isinstance(seed, int):
        seed = torch.tensor(seed, dtype=torch.int64, device=x.device)
    with torch.no_grad():
        return reference.quantize_uniform(
            layout.flatten(x),
            quantizer.geometry(layout),
            seed.to(x.device) if stochastic else None,
            quantizer.scale_dtype,
            quantizer.minimum_dtype,
        )


def dequantize_uniform(
    tensors: tuple[Tensor, ...], quantizer: UniformQuantizer, layout: Layout, target: Tensor
) -> None:
    """Decode; see `reference.dequantize_uniform`.

    Args:
        tensors: `(codes, scale, minimum)`.
        quantizer: Settings that made them.
        layout: Layout of the quantized tensor.
        target: Tensor whose memory holds the elements densely in memory order.
    """
    if _has_kernel(target):
        _run_dequantize(tensors, quantizer, layout, 0, target)
        return
    with torch.no_grad():
        reference.dequantize_uniform(*tensors, quantizer.geometry(layout), _flat(target, layout.numel))


def dequantize_multiply_uniform(
    tensors: tuple[Tensor, ...], quantizer: UniformQuantizer, layout: Layout, other: Tensor, target: Tensor
) -> None:
    """Decode and multiply by a tensor of the same dtype and memory order.

    Args:
        tensors: `(codes, scale, minimum)`.
        quantizer: Settings that made them.
        layout: Layout of the quantized tensor.
        other: Dense factor.
        target: Dense result; may be `other`.
    """
    if _has_kernel(target) and _has_kernel(other):
        _run_dequantize(tensors, quantizer, layout, other.data_ptr(), target)
        return
    with torch.no_grad():
        target, other = _flat(target, layout.numel), _flat(other, layout.numel)
        decoded = torch.empty_like(target)
        reference.dequantize_uniform(*tensors, quantizer.geometry(layout), decoded)
        torch.mul(decoded, other, out=target)


def _has_kernel(x: Tensor) -> bool:
    """Whether compiled kernels can read the memory of this tensor; subclasses may not have any."""
    return x.is_cpu and type(x) in _PLAIN_TYPES and cpu_kernels() is not None


_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def _run_dequantize(
    tensors: tuple[Tensor, ...], quantizer: UniformQuantizer, layout: Layout, other: int, target: Tensor
) -> None:
    codes, scale, minimum = (tensor.data_ptr() for tensor in tensors)
    plan, _ = _plan(quantizer, layout)
    cpu_kernels().dequantize_uniform(codes, scale, minimum, other, target.data_ptr(), plan, torch.get_num_threads())


@functools.lru_cache(maxsize=4096)
def _plan(quantizer: UniformQuantizer, layout: Layout) -> tuple[UniformPlan, int]:
    """What the CPU kernels need to know of a tensor, and the bytes of its codes."""
    geometry = quantizer.geometry(layout)
    plan = cpu_kernels().UniformPlan(
        numel=geometry.numel,
        bit_width=geometry.bit_width,
        block_size=geometry.block_size,
        inner=geometry.inner,
        groups=geometry.groups,
        one_run=geometry.one_run,
        stochastic=quantizer.is_stochastic,
        scale_kind=_kind(quantizer.scale_dtype),
        minimum_kind=_kind(quantizer.minimum_dtype),
        kind=_kind(layout.dtype),
    )
    return plan, geometry.code_bytes


@functools.cache
def _kind(dtype: torch.dtype) -> int | None:
    """The CPU kernels' code of a type, or None where they do not read it."""
    kernels = cpu_kernels()
    return {
        torch.float32: kernels.FLOAT32,
        torch.bfloat16: kernels.BFLOAT16,
        torch.float16: kernels.FLOAT16,
        torch.float64: kernels.FLOAT64,
        torch.bool: kernels.BOOL,
    }.get(dtype)


def pack(codes: Tensor, bit_width: int, block_size: int) -> Tensor:
    """Pack contiguous integer codes; see `reference.pack`.

    Args:
        codes: (n,) integer tensor.
        bit_width: Bits a code.
        block_size: Codes in a block.

    Returns:
        uint8 tensor.
    """
    fits = codes.dtype == torch.uint8 or bit_width <= 8 * codes.itemsize  # a narrower integer's sign would be lost
    if _has_kernel(codes) and fits and block_size <= cpu_kernels().LARGEST_BLOCK:
        n = codes.numel()
        packed = torch.empty(packed_bytes(n, bit_width, block_size), dtype=torch.uint8)
        pointers = codes.data_ptr(), codes.itemsize, packed.data_ptr()
        cpu_kernels().pack_codes(*pointers, bit_width, block_size, n, torch.get_num_threads())
        return packed
    return reference.pack(codes, bit_width, block_size)


def unpack(packed: Tensor, bit_width: int, numel: int, block_size: int) -> Tensor:
    """Unpack codes; see `reference.unpack`.

    Args:
        packed: uint8 tensor.
        bit_width: Bits a code.
        numel: Number of codes.
        block_size: Codes in a block.

    Returns:
        (numel,) int32 tensor, int64 at 32 bits.
    """
    if _has_kernel(packed) and block_size <= cpu_kernels().LARGEST_BLOCK:
        codes = torch.empty(numel, dtype=torch.int32 if bit_width < 32 else torch.int64)
        pointers = packed.data_ptr(), codes.data_ptr(), codes.itemsize
        cpu_kernels().unpack_codes(*pointers, bit_width, block_size, numel, torch.get_num_threads())
        return codes
    return reference.unpack(packed, bit_width, numel, block_size)


def pack_mask(mask: Tensor, layout: Layout) -> Tensor:
    """Pack a bool mask, or the mask `~(x <= 0)` of a floating-point tensor.

    Args:
        mask: Tensor of the layout.
        layout: Its layout.

    Returns:
        uint8 tensor.
    """
    flat = layout.flatten(mask)
    if _has_kernel(flat) and _kind(flat.dtype) is not None:
        packed = torch.empty(packed_bytes(layout.numel, 1, DEFAULT_BLOCK), dtype=torch.uint8)
        pointers = flat.data_ptr(), _kind(flat.dtype), packed.data_ptr()
        cpu_kernels().pack_mask(*pointers, layout.numel, torch.get_num_threads())
        return packed
    flat = flat if flat.dtype == torch.bool else ~(flat <= 0)
    return reference.pack(flat.to(torch.uint8), 1, DEFAULT_BLOCK)


def unpack_mask(packed: Tensor, numel: int) -> Tensor:
    """Unpack a mask.

    Args:
        packed: uint8 tensor.
        numel: Number of elements.

    Returns:
        (numel,) bool tensor.
    """
    if _has_kernel(packed):
        mask = torch.empty(numel, dtype=torch.bool)
        cpu_kernels().unpack_mask(packed.data_ptr(), mask.data_ptr(), numel, torch.get_num_threads())
        return mask
    return reference.unpack(packed, 1, numel, DEFAULT_BLOCK).to(torch.bool)


def mask_multiply(packed: Tensor, numel: int, grad: Tensor, target: Tensor, negative_slope: float) -> None:
    """where(mask, grad, negative_slope * grad), all dense in the mask's memory order.

    Args:
        packed: uint8 mask.
        numel: Number of elements.
        grad: Dense gradient.
        target: Dense result of its dtype; may be `grad`.
        negative_slope: Factor where the mask is unset; 0 gives +0.
    """
    if _has_kernel(grad) and _has_kernel(packed) and grad.dtype != torch.bool and _kind(grad.dtype) is not None:
        pointers = packed.data_ptr(), grad.data_ptr(), target.data_ptr(), _kind(grad.dtype)
        cpu_kernels().mask_multiply(*pointers, negative_slope, numel, torch.get_num_threads())
        return
    flat = _flat(grad, numel)
    other = flat * negative_slope if negative_slope else torch.zeros_like(flat)
    torch.where(unpack_mask(packed, numel), flat, other, out=_flat(target, numel))


def _flat(x: Tensor, numel: int) -> Tensor:
    """Dense memory as a 1-D tensor."""
    return x.as_strided((numel,), (1,)) if numel else x.reshape(-1)
