"""Kernels of one-bit masks, in blocks of 512 elements."""

import triton
import triton.language as tl

from brevact.triton_kernels.floats import cast, widen
from brevact.triton_kernels.tiles import (
    element_mask,
    load_bytes,
    load_planes,
    single_block,
    store_codes,
    unpack_code,
    whole_blocks,
)

BLOCK = tl.constexpr(512)


@triton.jit
def pack_mask_tile(x_ptr, packed_ptr, first, row, column, stride, limit, RAGGED: tl.constexpr):
    """Pack bools (as uint8), or `~(x <= 0)` of floats: where a ReLU passes the gradient, NaN included."""
    planes = load_planes(x_ptr + first, row, column, stride, limit, BLOCK, RAGGED)
    bits = ()
    for i in tl.static_range(8):
        if planes[i].dtype.is_floating():
            bit = tl.where(widen(planes[i]) <= 0.0, 0, 1)
        else:
            bit = tl.minimum(planes[i].to(tl.int32), 1)
        if RAGGED:
            bit = tl.where(element_mask(i, row, column, stride, limit, RAGGED), bit, 0)
        bits += (bit,)
    store_codes(packed_ptr + first // 8, bits, row, column, stride, limit, BLOCK, 1, RAGGED)


@triton.jit
def unpack_mask_tile(packed_ptr, target_ptr, first, row, column, stride, limit, RAGGED: tl.constexpr):
    """Unpack to bools (as uint8)."""
    packed = load_bytes(packed_ptr + first // 8, row, column, stride, limit, BLOCK, 1, RAGGED)
    for i in tl.static_range(8):
        pointers = target_ptr + first + (row * BLOCK + i * stride + column)
        valid = element_mask(i, row, column, stride, limit, RAGGED)
        tl.store(pointers, unpack_code(packed, i, 1).to(tl.uint8), mask=valid)


@triton.jit
def mask_multiply_tile(
    packed_ptr, grad_ptr, target_ptr, slope, first, row, column, stride, limit,
    HAS_SLOPE: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """where(mask, grad, slope * grad); +0 for no slope."""
    packed = load_bytes(packed_ptr + first // 8, row, column, stride, limit, BLOCK, 1, RAGGED)
    planes = load_planes(grad_ptr + first, row, column, stride, limit, BLOCK, RAGGED)
    for i in tl.static_range(8):
        grad = planes[i]
        if HAS_SLOPE:
            other = cast(widen(grad) * slope, grad.dtype)
        else:
            other = tl.zeros_like(grad)
        pointers = target_ptr + first + (row * BLOCK + i * stride + column)
        valid = element_mask(i, row, column, stride, limit, RAGGED)
        tl.store(pointers, tl.where(unpack_code(packed, i, 1) != 0, grad, other), mask=valid)


@triton.jit(do_not_specialize=["numel"])
def pack_mask_kernel(x_ptr, packed_ptr, numel, ROWS: tl.constexpr):
    """Pack a mask."""
    first, row, column, stride, rows = whole_blocks(numel, BLOCK, ROWS)
    pack_mask_tile(x_ptr, packed_ptr, first, row, column, stride, rows, RAGGED=False)
    first, row, column, stride, count = single_block(numel, BLOCK, ROWS, BLOCK // 8)
    if count > 0:
        pack_mask_tile(x_ptr, packed_ptr, first, row, column, stride, count, RAGGED=True)


@triton.jit(do_not_specialize=["numel"])
def unpack_mask_kernel(packed_ptr, target_ptr, numel, ROWS: tl.constexpr):
    """Unpack a mask."""
    first, row, column, stride, rows = whole_blocks(numel, BLOCK, ROWS)
    unpack_mask_tile(packed_ptr, target_ptr, first, row, column, stride, rows, RAGGED=False)
    first, row, column, stride, count = single_block(numel, BLOCK, ROWS, BLOCK // 8)
    if count > 0:
        unpack_mask_tile(packed_ptr, target_ptr, first, row, column, stride, count, RAGGED=True)


@triton.jit(do_not_specialize=["numel"])
def mask_multiply_kernel(packed_ptr, grad_ptr, target_ptr, slope, numel, ROWS: tl.constexpr, HAS_SLOPE: tl.constexpr):
    """Multiply a gradient by a mask."""
    first, row, column, stride, rows = whole_blocks(numel, BLOCK, ROWS)
    mask_multiply_tile(
        packed_ptr, grad_ptr, target_ptr, slope, first, row, column, stride, rows, HAS_SLOPE, RAGGED=False
    )
    first, row, column, stride, count = single_block(numel, BLOCK, ROWS, BLOCK // 8)
    if count > 0:
        mask_multiply_tile(
            packed_ptr, grad_ptr, target_ptr, slope, first, row, column, stride, count, HAS_SLOPE, RAGGED=True
        )
