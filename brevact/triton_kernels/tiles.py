"""Tiles: the eight planes of a few packing blocks, in device memory and in registers.

A plane of R blocks is one [R, W] tensor, so a thread has the same column in every plane: a column's eight codes, its
bytes and its random bits meet in one thread, and packing moves nothing between threads.

A tile is a tuple of five values: first element (int64), row, column, stride and limit. `row` [R, 1] and `column` [1,
W] are indices. Whole blocks: planes are `stride` = W columns apart and `limit` is the number of existing rows. One
incomplete block (RAGGED, R = 1): planes are `stride` = ceil(limit / 8) columns apart, `limit` is its number of
elements, and W is a power of two of at least `stride`.
"""

import triton
import triton.language as tl


@triton.jit
def whole_blocks(numel, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """A program's tile of whole blocks."""
    block = tl.program_id(0).to(tl.int64) * ROWS
    rows = tl.minimum(numel // BLOCK - block, ROWS).to(tl.int32)
    return block * BLOCK, tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK // 8)[None, :], BLOCK // 8, rows


@triton.jit
def single_block(numel, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, IN_INT64: tl.constexpr = False):
    """As `whole_blocks`, for the last block if incomplete, or, ROWS = 0, the only one; limit 0 for no such block."""
    if ROWS > 0:
        blocks = numel // BLOCK
        first = (blocks * BLOCK).to(tl.int64)
        rows = blocks - tl.program_id(0).to(tl.int64) * ROWS
        is_last = rows < ROWS if IN_INT64 else tl.minimum(rows, ROWS).to(tl.int32) < ROWS
        count = tl.where(is_last, numel - first, 0).to(tl.int32)
    else:
        first = tl.program_id(0).to(tl.int64) * BLOCK
        count = tl.minimum(numel - first, BLOCK).to(tl.int32)
    return first, tl.zeros((1, 1), tl.int32), tl.arange(0, COLUMNS)[None, :], (count + 7) // 8, count


@triton.jit
def tile(
    numel, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RAGGED: tl.constexpr,
    IN_INT64: tl.constexpr = False,
):  # fmt: skip
    """A program's whole blocks, or, RAGGED, its incomplete one; kernels loop over both, ROWS = 0 over the latter."""
    if RAGGED:
        found = single_block(numel, BLOCK, ROWS, COLUMNS, IN_INT64)
    else:
        found = whole_blocks(numel, BLOCK, ROWS)
    return found


@triton.jit
def element_mask(i: tl.constexpr, tile, RAGGED: tl.constexpr):
    _, row, column, stride, limit = tile
    if RAGGED:
        mask = (column < stride) & (i * stride + column < limit)
    else:
        mask = row < limit  # by row: a mask by element would turn wide loads into narrow ones
    return mask


@triton.jit
def plane_of(pointer, i: tl.constexpr, tile, BLOCK: tl.constexpr):
    """Pointers to the elements of plane i."""
    first, row, column, stride, _ = tile
    return pointer + first + (row * BLOCK + i * stride + column)


@triton.jit
def _bytes_of(pointer, k: tl.constexpr, tile, BLOCK: tl.constexpr, BIT_WIDTH: tl.constexpr, RAGGED: tl.constexpr):
    """Pointers to byte k of all columns, and which of them exist."""
    first, row, column, stride, limit = tile
    if RAGGED:
        mask = column < stride
    else:
        mask = row < limit
    return pointer + first // 8 * BIT_WIDTH + (row * (BLOCK // 8 * BIT_WIDTH) + k * stride + column), mask


@triton.jit
def load_planes(pointer, tile, BLOCK: tl.constexpr, RAGGED: tl.constexpr):
    """The eight planes of a tile in their stored type; undefined beyond the elements that exist."""
    planes = ()
    for i in tl.static_range(8):
        planes += (tl.load(plane_of(pointer, i, tile, BLOCK), mask=element_mask(i, tile, RAGGED)),)
    return planes


@triton.jit
def load_bytes(pointer, tile, BLOCK: tl.constexpr, BIT_WIDTH: tl.constexpr, RAGGED: tl.constexpr):
    """The packed bytes of a tile's columns, least significant first, as uint32."""
    packed = ()
    for k in tl.static_range(BIT_WIDTH):
        pointers, mask = _bytes_of(pointer, k, tile, BLOCK, BIT_WIDTH, RAGGED)
        packed += (tl.load(pointers, mask=mask, other=0).to(tl.uint32),)
    return packed


@triton.jit
def store_codes(pointer, codes, tile, BLOCK: tl.constexpr, BIT_WIDTH: tl.constexpr, RAGGED: tl.constexpr):
    """Pack the eight codes of every column and store their bytes. Bits above BIT_WIDTH must be 0."""
    for k in tl.static_range(BIT_WIDTH):
        pointers, mask = _bytes_of(pointer, k, tile, BLOCK, BIT_WIDTH, RAGGED)
        tl.store(pointers, _byte(codes, k, BIT_WIDTH), mask=mask)


@triton.jit
def _byte(codes, k: tl.constexpr, BIT_WIDTH: tl.constexpr):
    """Byte k of the little-endian integer that eight codes make."""
    if BIT_WIDTH == 1 or BIT_WIDTH == 2 or BIT_WIDTH == 4:  # a sum, for which codes' other bits need not be cleared
        EACH: tl.constexpr = 8 // BIT_WIDTH
        byte = codes[k * EACH]
        for i in tl.static_range(1, EACH):
            byte += codes[k * EACH + i] << (i * BIT_WIDTH)
    else:
        byte = tl.zeros_like(codes[0])
        for i in tl.static_range(8):
            if i * BIT_WIDTH < 8 * k + 8 and (i + 1) * BIT_WIDTH > 8 * k:
                if i * BIT_WIDTH >= 8 * k:
                    byte |= codes[i] << (i * BIT_WIDTH - 8 * k)
                else:
                    byte |= codes[i] >> (8 * k - i * BIT_WIDTH)
    return byte.to(tl.uint8)


@triton.jit
def unpack_code(packed, i: tl.constexpr, BIT_WIDTH: tl.constexpr):
    """Code i of every column, as uint32."""
    code = tl.zeros_like(packed[0])
    for k in tl.static_range(BIT_WIDTH):
        if i * BIT_WIDTH < 8 * k + 8 and (i + 1) * BIT_WIDTH > 8 * k:
            if i * BIT_WIDTH >= 8 * k:
                code |= packed[k] >> (i * BIT_WIDTH - 8 * k)
            else:
                code |= packed[k] << (8 * k - i * BIT_WIDTH)
    return code & ((1 << BIT_WIDTH) - 1)
