"""The one place that chooses who does the work: compiled kernels, or the plain torch reference."""

from __future__ import annotations

import torch
from torch import Tensor

from brevact.quantizers import reference
from brevact.quantizers.geometry import DEFAULT_BLOCK, Geometry
from brevact.quantizers.layout import Layout


def quantize_uniform(
    x: Tensor,
    layout: Layout,
    geometry: Geometry,
    seed: Tensor | None,
    scale_dtype: torch.dtype,
    minimum_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a tensor; see `reference.quantize_uniform`.

    Args:
        x: Tensor of the layout.
        layout: Its layout.
        geometry: Its blocks and groups.
        seed: 0-d int64 tensor, or None to round to nearest.
        scale_dtype: Stored type of the scale.
        minimum_dtype: Stored type of the minimum.

    Returns:
        `(codes, scale, minimum)`.
    """
    with torch.no_grad():
        return reference.quantize_uniform(layout.flatten(x), geometry, seed, scale_dtype, minimum_dtype)


def dequantize_uniform(tensors: tuple[Tensor, ...], geometry: Geometry, target: Tensor) -> None:
    """Decode; see `reference.dequantize_uniform`.

    Args:
        tensors: `(codes, scale, minimum)`.
        geometry: Blocks and groups.
        target: Tensor whose memory holds the elements densely in memory order.
    """
    with torch.no_grad():
        reference.dequantize_uniform(*tensors, geometry, _flat(target, geometry.numel))


def dequantize_multiply_uniform(tensors: tuple[Tensor, ...], geometry: Geometry, other: Tensor, target: Tensor) -> None:
    """Decode and multiply by a tensor of the same dtype and memory order.

    Args:
        tensors: `(codes, scale, minimum)`.
        geometry: Blocks and groups.
        other: Dense factor.
        target: Dense result; may be `other`.
    """
    with torch.no_grad():
        decoded = torch.empty_like(_flat(target, geometry.numel))
        reference.dequantize_uniform(*tensors, geometry, decoded)
        torch.mul(decoded, _flat(other, geometry.numel), out=_flat(target, geometry.numel))


def pack(codes: Tensor, bit_width: int, block_size: int) -> Tensor:
    """Pack contiguous integer codes; see `reference.pack`.

    Args:
        codes: (n,) integer tensor.
        bit_width: Bits a code.
        block_size: Codes in a block.

    Returns:
        uint8 tensor.
    """
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
    flat = _flat(grad, numel)
    other = flat * negative_slope if negative_slope else torch.zeros_like(flat)
    torch.where(unpack_mask(packed, numel), flat, other, out=_flat(target, numel))


def _flat(x: Tensor, numel: int) -> Tensor:
    """Dense memory as a 1-D tensor."""
    return x.as_strided((numel,), (1,)) if numel else x.reshape(-1)
