"""Kernel that counts and sums the values on either side of each group's offset; see `quantizers.kernel_ops.moments`."""

import triton
import triton.language as tl

from brevact.triton_kernels.floats import nearest_int, widen
from brevact.triton_kernels.groups import is_finite
from brevact.triton_kernels.ranges import elements_of_tile, tiles_of_part

COLUMNS = tl.constexpr(6)
"""Sums of a group: count, sum and sum of squares below its offset, then above."""
_LARGEST_UNIT = tl.constexpr(65536.0)


@triton.jit
def _sum_of_runs(values):
    """Sum over a tile's first and last axis, in int64."""
    return tl.sum(tl.sum(values.to(tl.int64), axis=0), axis=1)


@triton.jit(do_not_specialize=["repeats"], do_not_specialize_on_alignment=["offset_ptr", "inverse_ptr"])
def moments_kernel(
    x_ptr, offset_ptr, inverse_ptr, sums_ptr, numel, inner, groups, repeats,
    REPEATS_TILE: tl.constexpr, GROUPS_TILE: tl.constexpr, INNER_TILE: tl.constexpr,
):  # fmt: skip
    """Int64 sums [parts, groups, 6]. Squares are at most 2^32; int32 holds the count of one element of a tile."""
    first_group, part = tl.program_id(0).to(tl.int64) * GROUPS_TILE, tl.program_id(1)
    group = first_group + tl.arange(0, GROUPS_TILE)
    base = tl.load(offset_ptr + group, mask=group < groups)[None, :, None]
    inverse = tl.load(inverse_ptr + group, mask=group < groups)[None, :, None]
    count_below = tl.zeros((REPEATS_TILE, GROUPS_TILE, INNER_TILE), tl.int32)
    sum_below = tl.zeros((REPEATS_TILE, GROUPS_TILE, INNER_TILE), tl.int64)
    count_above, sum_above, square_below, square_above = count_below, sum_below, sum_below, sum_below
    begin, end = tiles_of_part(part, tl.num_programs(1), inner, repeats, REPEATS_TILE, INNER_TILE)
    for tile in range(begin, end):
        start, offset, valid = elements_of_tile(
            tile, first_group, numel, inner, groups, repeats, REPEATS_TILE, GROUPS_TILE, INNER_TILE
        )
        z = (widen(tl.load(x_ptr + start + offset, mask=valid)) - base) * inverse
        r = nearest_int(tl.minimum(tl.abs(z), _LARGEST_UNIT))
        inside = valid & is_finite(z)
        below, above = inside & (z < 0.0), inside & (z > 0.0)
        r_below, r_above = tl.where(below, r, 0).to(tl.int64), tl.where(above, r, 0).to(tl.int64)
        count_below, count_above = count_below + below.to(tl.int32), count_above + above.to(tl.int32)
        sum_below, sum_above = sum_below + r_below, sum_above + r_above
        square_below, square_above = square_below + r_below * r_below, square_above + r_above * r_above
    row_ptr = sums_ptr + (part.to(tl.int64) * groups + group) * COLUMNS
    tl.store(row_ptr, _sum_of_runs(count_below), mask=group < groups)
    tl.store(row_ptr + 1, _sum_of_runs(sum_below), mask=group < groups)
    tl.store(row_ptr + 2, _sum_of_runs(square_below), mask=group < groups)
    tl.store(row_ptr + 3, _sum_of_runs(count_above), mask=group < groups)
    tl.store(row_ptr + 4, _sum_of_runs(sum_above), mask=group < groups)
    tl.store(row_ptr + 5, _sum_of_runs(square_above), mask=group < groups)
