"""Kernels that pack and unpack integer codes of 1 to 32 bits, in blocks of any multiple of 8."""

import triton
import triton.language as tl

from brevact.triton_kernels.tiles import (
    element_mask,
    load_bytes,
    load_planes,
    single_block,
    store_codes,
    unpack_code,
    whole_blocks,
)


@triton.jit
def pack_codes_tile(
    x_ptr, packed_ptr, first, row, column, stride, limit,
    BIT_WIDTH: tl.constexpr, BLOCK: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Pack the low bits of integers."""
    planes = load_planes(x_ptr + first, row, column, stride, limit, BLOCK, RAGGED)
    codes = ()
    for i in tl.static_range(8):
        code = planes[i].to(tl.uint32) & ((1 << BIT_WIDTH) - 1)
        if RAGGED:
            code = tl.where(element_mask(i, row, column, stride, limit, RAGGED), code, 0)
        codes += (code,)
    out_ptr = packed_ptr + first // 8 * BIT_WIDTH
    store_codes(out_ptr, codes, row, column, stride, limit, BLOCK, BIT_WIDTH, RAGGED)


@triton.jit
def unpack_codes_tile(
    packed_ptr, target_ptr, first, row, column, stride, limit,
    BIT_WIDTH: tl.constexpr, BLOCK: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Unpack codes to int32 or int64."""
    packed = load_bytes(packed_ptr + first // 8 * BIT_WIDTH, row, column, stride, limit, BLOCK, BIT_WIDTH, RAGGED)
    for i in tl.static_range(8):
        code = unpack_code(packed, i, BIT_WIDTH).to(target_ptr.dtype.element_ty)
        pointers = target_ptr + first + (row * BLOCK + i * stride + column)
        tl.store(pointers, code, mask=element_mask(i, row, column, stride, limit, RAGGED))


@triton.jit(do_not_specialize=["numel"])
def pack_codes_kernel(
    x_ptr, packed_ptr, numel,
    BIT_WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS_2: tl.constexpr,
):  # fmt: skip
    """Pack: tiles of ROWS whole blocks and a last ragged one, or, ROWS = 0, one block of any size."""
    if ROWS > 0:
        first, row, column, stride, rows = whole_blocks(numel, BLOCK, ROWS)
        pack_codes_tile(x_ptr, packed_ptr, first, row, column, stride, rows, BIT_WIDTH, BLOCK, RAGGED=False)
    first, row, column, stride, count = single_block(numel, BLOCK, ROWS, COLUMNS_2)
    if count > 0:
        pack_codes_tile(x_ptr, packed_ptr, first, row, column, stride, count, BIT_WIDTH, BLOCK, RAGGED=True)


@triton.jit(do_not_specialize=["numel"])
def unpack_codes_kernel(
    packed_ptr, target_ptr, numel,
    BIT_WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS_2: tl.constexpr,
):  # fmt: skip
    """Unpack, in the same tiles."""
    if ROWS > 0:
        first, row, column, stride, rows = whole_blocks(numel, BLOCK, ROWS)
        unpack_codes_tile(packed_ptr, target_ptr, first, row, column, stride, rows, BIT_WIDTH, BLOCK, RAGGED=False)
    first, row, column, stride, count = single_block(numel, BLOCK, ROWS, COLUMNS_2)
    if count > 0:
        unpack_codes_tile(packed_ptr, target_ptr, first, row, column, stride, count, BIT_WIDTH, BLOCK, RAGGED=True)
