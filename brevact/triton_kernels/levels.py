"""Kernels that quantize to levels of any spacing, and decode; the bytes of the references.

All groups share SIZE levels and the SIZE - 1 numbers of `Grid.steps`, which stay in the cache.
"""

import triton
import triton.language as tl

from brevact.triton_kernels.floats import cast, float_of_code, maximum, minimum, round_stochastic, widen
from brevact.triton_kernels.groups import group_of, is_finite, is_flagged
from brevact.triton_kernels.philox import element_bits
from brevact.triton_kernels.quantize import seed_words
from brevact.triton_kernels.tiles import element_mask, load_bytes, load_planes, store_codes, tile, unpack_code

_UNALIGNED = ["levels_ptr", "steps_ptr", "offset_ptr", "inverse_ptr", "scale_ptr", "seed_ptr"]


@triton.jit
def count_reached(z, row_ptr, SIZE: tl.constexpr, BIT_WIDTH: tl.constexpr):
    """How many of SIZE - 1 ascending numbers z reaches, 2 <= SIZE <= 2^BIT_WIDTH; none if z is NaN."""
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
    """Codes (int32) of plane i of a tile, see `quantizers.kernel_ops.positions`."""
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
    """Groups of plane i of a tile, per row if BY_ROW, else per element."""
    offset = row * BLOCK + i * stride
    if not BY_ROW:
        offset += column
    return group_of(first, offset, inner, groups, INNER)


@triton.jit(do_not_specialize=["numel", "inner", "groups"], do_not_specialize_on_alignment=_UNALIGNED)
def quantize_grid_kernel(
    x_ptr, codes_ptr, levels_ptr, steps_ptr, offset_ptr, inverse_ptr, seed_ptr, numel, inner, groups,
    BIT_WIDTH: tl.constexpr, STOCHASTIC: tl.constexpr, SIZE: tl.constexpr, MARKS: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS_2: tl.constexpr, INNER: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Round z = (x - offset) * |inverse| to levels, and pack; offsets and inverses may be None. MARKS: `Grid.marks`."""
    PLANES: tl.constexpr = INNER // (BLOCK // 8) if INNER > BLOCK // 8 else 1  # with the same groups
    for RAGGED in tl.static_range(ROWS == 0, 2):
        first, row, column, stride, limit = tile(numel, BLOCK, ROWS, COLUMNS_2, RAGGED, IN_INT64=True)
        if limit > 0:
            planes = load_planes(x_ptr + first, row, column, stride, limit, BLOCK, RAGGED)
            words = seed_words(first, row, column, seed_ptr, BLOCK, STOCHASTIC)
            codes = ()
            for i in tl.static_range(8):
                valid = element_mask(i, row, column, stride, limit, RAGGED)
                if RAGGED or not ALIGNED or i % PLANES == 0:
                    group = group_of_plane(
                        i, first, row, column, stride, inner, groups, BLOCK, INNER, ALIGNED and not RAGGED
                    )  # fmt: skip
                    if offset_ptr is not None:
                        base = tl.load(offset_ptr + group, mask=valid)
                    if inverse_ptr is not None:
                        inverse = tl.load(inverse_ptr + group, mask=valid)
                x = widen(planes[i])
                z = x
                if offset_ptr is not None:
                    z -= base
                if inverse_ptr is not None:
                    z *= tl.abs(inverse)
                q = codes_on_row(z, words, levels_ptr, steps_ptr, i, SIZE, BIT_WIDTH, STOCHASTIC)
                if MARKS:
                    if inverse_ptr is not None:
                        q = tl.where(is_flagged(inverse), tl.minimum(q, SIZE - 2), q)
                    q = tl.where(is_finite(x), q, (1 << BIT_WIDTH) - 1)
                if RAGGED:
                    q = tl.where(valid, q, 0)
                codes += (q,)
            out_ptr = codes_ptr + first // 8 * BIT_WIDTH
            store_codes(out_ptr, codes, row, column, stride, limit, BLOCK, BIT_WIDTH, RAGGED)


@triton.jit(do_not_specialize=["numel", "inner", "groups"], do_not_specialize_on_alignment=_UNALIGNED)
def dequantize_grid_kernel(
    codes_ptr, levels_ptr, offset_ptr, scale_ptr, other_ptr, target_ptr, numel, inner, groups, largest,
    BIT_WIDTH: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS_2: tl.constexpr, INNER: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    PLANES: tl.constexpr = INNER // (BLOCK // 8) if INNER > BLOCK // 8 else 1
    for RAGGED in tl.static_range(ROWS == 0, 2):
        first, row, column, stride, limit = tile(numel, BLOCK, ROWS, COLUMNS_2, RAGGED)
        if limit > 0:
            in_ptr = codes_ptr + first // 8 * BIT_WIDTH
            packed = load_bytes(in_ptr, row, column, stride, limit, BLOCK, BIT_WIDTH, RAGGED)
            for i in tl.static_range(8):
                valid = element_mask(i, row, column, stride, limit, RAGGED)
                if RAGGED or not ALIGNED or i % PLANES == 0:
                    group = group_of_plane(
                        i, first, row, column, stride, inner, groups, BLOCK, INNER, ALIGNED and not RAGGED
                    )  # fmt: skip
                    if offset_ptr is not None:
                        base = tl.load(offset_ptr + group, mask=valid)
                    if scale_ptr is not None:
                        scale = tl.load(scale_ptr + group, mask=valid)
                q = unpack_code(packed, i, BIT_WIDTH).to(tl.int32)
                y = tl.load(levels_ptr + (tl.minimum(q, SIZE - 1) if SIZE < (1 << BIT_WIDTH) else q))
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
