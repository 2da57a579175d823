"""Lossless packing: integer codes of any width, and one-bit masks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from brevact.geometry import DEFAULT_BLOCK, packed_bytes
from brevact.quantizers import kernel_ops
from brevact.quantizers.brief import brief
from brevact.quantizers.checks import check_int
from brevact.quantizers.layout import Layout

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def pack_codes(codes: Tensor, bit_width: int, block_size: int = DEFAULT_BLOCK) -> Tensor:
    """Pack integer codes at exactly bit_width bits each, in the block format of `PackedActivation`.

    >>> pack_codes(torch.tensor([3, 0, 1, 2, 3, 3, 0, 1]), bit_width=2)
    tensor([147,  79], dtype=torch.uint8)

    Args:
        codes: (n,) tensor of uint8, int8, int16, int32 or int64. Bits above bit_width are dropped.
        bit_width: Bits a code, 1 to 32.
        block_size: Codes in a packing block, a multiple of 8.

    Returns:
        uint8 tensor of n * bit_width / 8 bytes, the tail rounded up to eight codes.

    Raises:
        ValueError: If bit_width, block_size or the shape is not accepted.
        TypeError: If codes or bit_width are not integers.
    """
    if codes.dtype not in _INTEGERS:
        raise TypeError(f"codes: got {codes.dtype}; accepted are {', '.join(map(str, _INTEGERS))}; convert them")
    if codes.dim() != 1:
        raise ValueError(f"codes: got shape {tuple(codes.shape)}; accepted is a 1-D tensor; flatten it")
    _check_widths(bit_width, block_size)
    packed = codes.new_empty(packed_bytes(codes.numel(), bit_width, block_size), dtype=torch.uint8)
    kernel_ops.pack_codes(codes.contiguous(), bit_width, block_size, packed)
    return packed


def unpack_codes(packed: Tensor, bit_width: int, numel: int, block_size: int = DEFAULT_BLOCK) -> Tensor:
    """The inverse of `pack_codes`: (numel,) codes in [0, 2^bit_width), int32, or int64 at 32 bits.

    Raises:
        ValueError: If bit_width or block_size is not accepted, or packed has another length.
    """
    _check_widths(bit_width, block_size)
    _check_packed(packed, packed_bytes(numel, bit_width, block_size))
    codes = packed.new_empty(numel, dtype=torch.int32 if bit_width < 32 else torch.int64)
    kernel_ops.unpack_codes(packed.contiguous(), bit_width, block_size, codes)
    return codes


def pack_mask(mask: Tensor) -> Tensor:
    """Pack a mask at one bit per element, in memory order: ceil(n / 8) bytes for n distinct elements.

    A bool mask has any shape and strides; a floating-point tensor is read as `~(mask <= 0)`: where a ReLU of it passes
    the gradient (NaN included, as in torch).

    Raises: TypeError: If mask is neither bool nor floating point.
    """
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise TypeError(f"mask: got {mask.dtype}; accepted are torch.bool and floating-point types; compare it first")
    layout = Layout.of(mask)
    is_flat = layout.is_dense and layout.numel == mask.numel() and not mask.is_neg()  # nothing to repeat or to turn
    packed = mask.new_empty(packed_bytes(layout.numel, 1, DEFAULT_BLOCK), dtype=torch.uint8)
    kernel_ops.pack_mask(mask if is_flat else layout.flatten(mask.detach()), packed)
    return packed


def unpack_mask(packed: Tensor, layout: Layout) -> Tensor:
    """The inverse of `pack_mask`: a bool tensor with the layout's shape and strides, whatever its dtype.

    Raises:
        ValueError: If packed has another length.
    """
    _check_packed(packed, packed_bytes(layout.numel, 1, DEFAULT_BLOCK))
    mask = packed.new_empty(layout.numel, dtype=torch.bool)
    kernel_ops.unpack_mask(packed.contiguous(), mask)
    return layout.restore(mask)


def mask_multiply(
    packed: Tensor, layout: Layout, grad: Tensor, negative_slope: float = 0.0, *, overwrites: bool = False
) -> Tensor:
    """Backward pass of ReLU and leaky ReLU from the packed mask: where(mask, grad, negative_slope * grad).

    A slope of 0 gives +0 where the mask is unset, whatever the gradient, as in torch. The layout is that of the packed
    tensor, of any dtype. The result is `grad` if it `overwrites`, or a new tensor with the dtype of grad and, where
    those are dense, its strides.

    Raises: ValueError: If grad has another shape, or packed another length.
    """
    _check_packed(packed, packed_bytes(layout.numel, 1, DEFAULT_BLOCK))
    if grad.shape != layout.shape:
        raise ValueError(f"grad: got shape {tuple(grad.shape)}; the mask has {tuple(layout.shape)}")
    g = grad.detach()
    if layout.matches(g):
        out = grad if overwrites else Layout.of(g).empty(g.device)
        kernel_ops.mask_multiply(packed.contiguous(), layout.numel, g, negative_slope, out)
        if overwrites and not out.is_inference():
            increment_version(out)
        return out
    masked = torch.where(unpack_mask(packed, layout), g, g * negative_slope if negative_slope else 0.0)
    return grad.copy_(masked) if overwrites else masked


def _check_widths(bit_width: int, block_size: int) -> None:
    check_int("bit_width", bit_width, 1, 32)
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 8 or block_size % 8:
        raise ValueError(f"block_size: got {brief(block_size)}; accepted is a positive multiple of 8")


def _check_packed(packed: Tensor, expected: int) -> None:
    if packed.dtype != torch.uint8 or packed.dim() != 1 or packed.numel() != expected:
        raise ValueError(
            f"packed: got a {packed.dtype} tensor of shape {tuple(packed.shape)}; expected is a torch.uint8 tensor of "
            f"shape ({expected},) for this number of elements"
        )
