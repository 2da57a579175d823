"""Quantizers on grids: passes over x that reduce groups, then codes of levels of any spacing, and back.

All groups share SIZE levels and the SIZE - 1 numbers of `Grid.steps`, which stay in the cache.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from brevact.geometry import Geometry, Grid, ranges_of_keys
from brevact.triton_kernels.floats import cast, float_of_code, maximum, minimum, nearest_int, round_stochastic, widen
from brevact.triton_kernels.groups import (
    RANGES_TILE,
    elements_of_tile,
    group_of,
    is_finite,
    is_flagged,
    ranges_kernel,
    tiles_of_part,
)
from brevact.triton_kernels.launch import (
    THREADS,
    WIDEST_ACCESS,
    Program,
    over_blocks,
    over_groups,
    rows_in_groups,
    seed_on,
)
from brevact.triton_kernels.philox import element_bits, seed_words
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
    for index in range(begin, end):
        start, offset, valid = elements_of_tile(
            index, first_group, numel, inner, groups, repeats, REPEATS_TILE, GROUPS_TILE, INNER_TILE
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


_LEAST_OF_MOMENTS = 64
"""Elements of a group that a part has at least: its six sums are 48 bytes."""


def ranges(flat: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    program = over_groups(ranges_kernel, geometry, RANGES_TILE)
    keys = flat.new_empty((program.grid[1], 4, geometry.groups), dtype=torch.int32)
    program.run(flat, keys)
    return ranges_of_keys(keys)


def moments(flat: Tensor, geometry: Geometry, offset: Tensor, inverse: Tensor) -> Tensor:
    itemsize = flat.itemsize if geometry.inner % WIDEST_ACCESS == 0 else 4  # more masks of single elements would spill
    program = over_groups(moments_kernel, geometry, THREADS * WIDEST_ACCESS // itemsize, _LEAST_OF_MOMENTS)
    sums = flat.new_empty((program.grid[1], geometry.groups, COLUMNS.value), dtype=torch.int64)
    program.run(flat, offset.contiguous(), inverse.contiguous(), sums)
    return sums.sum(0)


def quantize_grid(flat: Tensor, geometry: Geometry, grid: Grid, seed: int | Tensor | None, codes: Tensor) -> None:
    if len(grid.levels) > 1:
        return NotImplemented
    itemsize = flat.itemsize if rows_in_groups(geometry) else max(flat.itemsize, 4)  # more groups would spill
    stochastic = seed is not None
    constants = {"STOCHASTIC": stochastic, "MARKS": grid.marks}
    program = _program(quantize_grid_kernel, geometry, itemsize, SIZE=grid.levels.shape[1], **constants)
    rows = _contiguous(grid.levels, grid.steps(stochastic=stochastic), grid.offset, grid.inverse)
    program.run(flat, codes, *rows, seed_on(flat.device, seed))


def dequantize_grid(codes: Tensor, geometry: Geometry, grid: Grid, other: Tensor | None, target: Tensor) -> None:
    if len(grid.levels) > 1:
        return NotImplemented
    size, largest = grid.levels.shape[1], torch.finfo(target.dtype).max
    program = _program(dequantize_grid_kernel, geometry, target.itemsize, SIZE=size, largest=largest)
    program.run(codes, *_contiguous(grid.levels, grid.offset, grid.scale), other, target)


def _contiguous(*parts: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if part is None else part.contiguous() for part in parts)


@functools.lru_cache(maxsize=4096)
def _program(kernel: Any, geometry: Geometry, itemsize: int, **values: Any) -> Program:
    return over_blocks(kernel, geometry, itemsize, **values)
