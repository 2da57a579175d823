"""Kernels that quantize to levels of any spacing, and decode; the bytes of the references.

Rows of SIZE levels, and of the SIZE - 1 numbers that rounding needs beside them (`Grid.steps`), are read where they
lie: a row is small and stays in the cache. With GROUP_ROWS each group has a row, else there is one for all.
"""

import triton
import triton.language as tl

from brevact.triton_kernels.floats import cast, float_of_code, maximum, minimum, round_stochastic, widen
from brevact.triton_kernels.groups import group_of, is_finite, is_flagged
from brevact.triton_kernels.philox import element_bits
from brevact.triton_kernels.quantize import seed_words
from brevact.triton_kernels.tiles import (
    element_mask,
    load_bytes,
    load_planes,
    single_block,
    store_codes,
    unpack_code,
    whole_blocks,
)

_UNALIGNED = ["levels_ptr", "steps_ptr", "offset_ptr", "inverse_ptr", "scale_ptr", "seed_ptr"]


@triton.jit
def count_reached(z, row_ptr, SIZE: tl.constexpr, BIT_WIDTH: tl.constexpr):
    """How many of SIZE - 1 ascending numbers z reaches, by binary search; none if z is NaN.

    Args:
        z: Values.
        row_ptr: The first of the numbers: a scalar, or a tensor that z's shape broadcasts.
        SIZE: At most 2^BIT_WIDTH, at least 2.
        BIT_WIDTH: Halvings.
    """
    count = 0  # the first probe is the same for all values
    for k in tl.static_range(BIT_WIDTH):
        probe = count + (1 << (BIT_WIDTH - 1 - k))
        if SIZE < (1 << BIT_WIDTH):
            probe = tl.minimum(probe, SIZE - 1)
        count = tl.where(z >= tl.load(row_ptr + (probe - 1)), probe, count)
    return count


@triton.jit
def codes_on_row(
    z, words, levels_ptr, steps_ptr,
    i: tl.constexpr, SIZE: tl.constexpr, BIT_WIDTH: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """Codes (int32) of plane i of a tile, see `quantizers.kernel_ops.positions`. Pointers are to each value's row."""
    if STOCHASTIC:
        # a value that reaches the last level lies in the last gap, too
        index = tl.minimum(count_reached(z, levels_ptr + 1, SIZE, BIT_WIDTH), SIZE - 2)
        low, step = tl.load(levels_ptr + index), tl.load(steps_ptr + index)
        fraction = (z - low) * step
        fraction = tl.where(fraction > 0.0, tl.minimum(fraction, 1.0), 0.0)  # 0 for NaN as well
        t = float_of_code(index.to(tl.uint32), BIT_WIDTH) + fraction
        q = round_stochastic(t, element_bits(words, i), BIT_WIDTH)
    else:
        q = count_reached(z, steps_ptr, SIZE, BIT_WIDTH)
    return q


@triton.jit
def group_of_plane(
    i: tl.constexpr, first, row, column, stride, inner, groups,
    BLOCK: tl.constexpr, INNER: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """Groups of plane i of a tile, one a row if BY_ROW, else one an element."""
    offset = row * BLOCK + i * stride
    if not BY_ROW:
        offset += column
    return group_of(first, offset, inner, groups, INNER)


@triton.jit
def quantize_grid_tile(
    x_ptr, codes_ptr, levels_ptr, steps_ptr, offset_ptr, inverse_ptr, seed_ptr,
    first, row, column, stride, limit, inner, groups,
    BIT_WIDTH: tl.constexpr, STOCHASTIC: tl.constexpr, SIZE: tl.constexpr, GROUP_ROWS: tl.constexpr,
    MARKS: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr, ALIGNED: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Round z = (x - offset) * |inverse| to levels, and pack a tile. Offsets and inverses may be None.

    MARKS: what is not finite takes the last code, and finite elements of flagged groups those below it. ALIGNED: a row
    of a whole block's plane lies in one group.
    """
    PLANES: tl.constexpr = INNER // (BLOCK // 8) if INNER > BLOCK // 8 else 1  # with the same groups
    BY_ROW: tl.constexpr = ALIGNED and not RAGGED
    GROUPED: tl.constexpr = GROUP_ROWS or offset_ptr is not None or inverse_ptr is not None
    planes = load_planes(x_ptr + first, row, column, stride, limit, BLOCK, RAGGED)
    words = seed_words(first, row, column, seed_ptr, BLOCK, STOCHASTIC)
    levels_row_ptr, steps_row_ptr = levels_ptr, steps_ptr
    codes = ()
    for i in tl.static_range(8):
        valid = element_mask(i, row, column, stride, limit, RAGGED)
        if GROUPED and not (BY_ROW and i % PLANES):
            group = group_of_plane(i, first, row, column, stride, inner, groups, BLOCK, INNER, BY_ROW)
            if offset_ptr is not None:
                base = tl.load(offset_ptr + group, mask=valid)
            if inverse_ptr is not None:
                inverse = tl.load(inverse_ptr + group, mask=valid)
            if GROUP_ROWS:
                own = tl.minimum(group, groups - 1)  # masks, of what does not exist, would make spills likelier
                levels_row_ptr, steps_row_ptr = levels_ptr + own * SIZE, steps_ptr + own * (SIZE - 1)
        x = widen(planes[i])
        z = x
        if offset_ptr is not None:
            z -= base
        if inverse_ptr is not None:
            z *= tl.abs(inverse)
        q = codes_on_row(z, words, levels_row_ptr, steps_row_ptr, i, SIZE, BIT_WIDTH, STOCHASTIC)
        if MARKS:
            if inverse_ptr is not None:
                q = tl.where(is_flagged(inverse), tl.minimum(q, SIZE - 2), q)
            q = tl.where(is_finite(x), q, (1 << BIT_WIDTH) - 1)
        if RAGGED:
            q = tl.where(valid, q, 0)
        codes += (q,)
    out_ptr = codes_ptr + first // 8 * BIT_WIDTH
    store_codes(out_ptr, codes, row, column, stride, limit, BLOCK, BIT_WIDTH, RAGGED)


@triton.jit
def dequantize_grid_tile(
    codes_ptr, levels_ptr, offset_ptr, scale_ptr, other_ptr, target_ptr,
    first, row, column, stride, limit, inner, groups, largest,
    BIT_WIDTH: tl.constexpr, SIZE: tl.constexpr, GROUP_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, INNER: tl.constexpr, ALIGNED: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Decode a tile, x = offset + |scale| * level clamped to +-largest, and multiply by `other` unless that is None."""
    PLANES: tl.constexpr = INNER // (BLOCK // 8) if INNER > BLOCK // 8 else 1
    BY_ROW: tl.constexpr = ALIGNED and not RAGGED
    GROUPED: tl.constexpr = GROUP_ROWS or offset_ptr is not None or scale_ptr is not None
    packed = load_bytes(codes_ptr + first // 8 * BIT_WIDTH, row, column, stride, limit, BLOCK, BIT_WIDTH, RAGGED)
    row_ptr = levels_ptr
    for i in tl.static_range(8):
        valid = element_mask(i, row, column, stride, limit, RAGGED)
        if GROUPED and not (BY_ROW and i % PLANES):
            group = group_of_plane(i, first, row, column, stride, inner, groups, BLOCK, INNER, BY_ROW)
            if offset_ptr is not None:
                base = tl.load(offset_ptr + group, mask=valid)
            if scale_ptr is not None:
                scale = tl.load(scale_ptr + group, mask=valid)
            if GROUP_ROWS:
                row_ptr = levels_ptr + tl.minimum(group, groups - 1) * SIZE
        q = unpack_code(packed, i, BIT_WIDTH).to(tl.int32)
        y = tl.load(row_ptr + (tl.minimum(q, SIZE - 1) if SIZE < (1 << BIT_WIDTH) else q))
        if scale_ptr is not None:
            y = tl.abs(scale) * y
        if offset_ptr is not None:
            y = base + y
        y = maximum(minimum(y, largest), -largest)
        if scale_ptr is not None:
            y = tl.where(is_flagged(scale) & (q == (1 << BIT_WIDTH) - 1), float("nan"), y)
        y = cast(y, target_ptr.dtype.element_ty)
        pointers = first + (row * BLOCK + i * stride + column)
        if other_ptr is not None:
            factor = widen(tl.load(other_ptr + pointers, mask=valid))
            y = cast(widen(y) * factor, target_ptr.dtype.element_ty)
        tl.store(target_ptr + pointers, y, mask=valid)


@triton.jit(do_not_specialize=["numel", "inner", "groups"], do_not_specialize_on_alignment=_UNALIGNED)
def quantize_grid_kernel(
    x_ptr, codes_ptr, levels_ptr, steps_ptr, offset_ptr, inverse_ptr, seed_ptr, numel, inner, groups,
    BIT_WIDTH: tl.constexpr, STOCHASTIC: tl.constexpr, SIZE: tl.constexpr, GROUP_ROWS: tl.constexpr,
    MARKS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS_2: tl.constexpr, INNER: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    """Quantize: tiles of ROWS whole blocks and a last ragged one, or, ROWS = 0, one block of any size."""
    if ROWS > 0:
        first, row, column, stride, rows = whole_blocks(numel, BLOCK, ROWS)
        quantize_grid_tile(
            x_ptr, codes_ptr, levels_ptr, steps_ptr, offset_ptr, inverse_ptr, seed_ptr,
            first, row, column, stride, rows, inner, groups,
            BIT_WIDTH, STOCHASTIC, SIZE, GROUP_ROWS, MARKS, BLOCK, INNER, ALIGNED, RAGGED=False,
        )  # fmt: skip
    first, row, column, stride, count = single_block(numel, BLOCK, ROWS, COLUMNS_2)
    if count > 0:
        quantize_grid_tile(
            x_ptr, codes_ptr, levels_ptr, steps_ptr, offset_ptr, inverse_ptr, seed_ptr,
            first, row, column, stride, count, inner, groups,
            BIT_WIDTH, STOCHASTIC, SIZE, GROUP_ROWS, MARKS, BLOCK, INNER, ALIGNED, RAGGED=True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["numel", "inner", "groups"], do_not_specialize_on_alignment=_UNALIGNED)
def dequantize_grid_kernel(
    codes_ptr, levels_ptr, offset_ptr, scale_ptr, other_ptr, target_ptr, numel, inner, groups, largest,
    BIT_WIDTH: tl.constexpr, SIZE: tl.constexpr, GROUP_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS_2: tl.constexpr, INNER: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Decode, in the same tiles."""
    if ROWS > 0:
        first, row, column, stride, rows = whole_blocks(numel, BLOCK, ROWS)
        dequantize_grid_tile(
            codes_ptr, levels_ptr, offset_ptr, scale_ptr, other_ptr, target_ptr,
            first, row, column, stride, rows, inner, groups, largest,
            BIT_WIDTH, SIZE, GROUP_ROWS, BLOCK, INNER, ALIGNED, RAGGED=False,
        )  # fmt: skip
    first, row, column, stride, count = single_block(numel, BLOCK, ROWS, COLUMNS_2)
    if count > 0:
        dequantize_grid_tile(
            codes_ptr, levels_ptr, offset_ptr, scale_ptr, other_ptr, target_ptr,
            first, row, column, stride, count, inner, groups, largest,
            BIT_WIDTH, SIZE, GROUP_ROWS, BLOCK, INNER, ALIGNED, RAGGED=True,
        )  # fmt: skip
