"""Decoding by a table of the values of each segment's codes: kernels and launches."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from brevact.geometry import Place, Segments, UniformPlan
from brevact.triton_kernels.floats import cast, maximum, minimum, shrink, widen
from brevact.triton_kernels.launch import Program, over_blocks, parts_of
from brevact.triton_kernels.normalize import LARGEST_RUN, runs_before
from brevact.triton_kernels.tiles import element_mask, load_bytes, plane_of, tile, unpack_code
from brevact.triton_kernels.uniform import load_grid, value_of

LEVELS_TILE = 512
"""Entries of a table that a program writes."""
_ROUNDINGS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@triton.jit(
    do_not_specialize="entries inner run slots last groups place_outer place_row place_inner place_run".split(),
    do_not_specialize_on_alignment=["scale_ptr", "minimum_ptr", "mean_ptr", "factor_ptr"],
)
def map_levels_kernel(
    scale_ptr, minimum_ptr, table_ptr, entries, inner, run, slots, last, groups, largest,
    mean_ptr, factor_ptr, place_outer, place_row, place_inner, place_run,
    BIT_WIDTH: tl.constexpr, ROUNDING: tl.constexpr, TILE: tl.constexpr, UNEVEN: tl.constexpr,
    STRETCHED: tl.constexpr,
):  # fmt: skip
    """ROUNDING: type of decoded values, 0 float32, 1 bfloat16, 2 float16. `last`: number of the last statistics run."""
    entry = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    valid = entry < entries
    q, row = (entry % (1 << BIT_WIDTH)).to(tl.uint32), entry >> BIT_WIDTH
    bucket = row // slots
    group = bucket % groups
    base, scale, flagged = load_grid(scale_ptr + group, minimum_ptr + group, valid, BIT_WIDTH)
    y = value_of(q, base, scale, flagged, largest, BIT_WIDTH, UNEVEN, FLAGGED=True)
    if STRETCHED:
        y = shrink(y)
    if ROUNDING == 1:
        y = widen(cast(y, tl.bfloat16))
    elif ROUNDING == 2:
        y = widen(cast(y, tl.float16))
    if factor_ptr is not None:
        first = tl.minimum(bucket * inner // run + (row - bucket * slots), last) * run
        at = first // place_outer * place_row + first % place_inner // place_run
        y = y * tl.load(factor_ptr + at, mask=valid, other=0.0)
        if mean_ptr is not None:
            y = y + tl.load(mean_ptr + at, mask=valid, other=0.0)
    if table_ptr.dtype.element_ty == tl.float16:
        y = maximum(minimum(y, 65504.0), -65504.0)
    tl.store(table_ptr + entry, cast(y, table_ptr.dtype.element_ty), mask=valid)


@triton.jit
def _segment_of(first, offset, place, inner, run, slots, SLOTS: tl.constexpr):
    """Segment of element first (int64) + place (int32), see `geometry.Segments`, from the first of that of `first`'s
    group; `offset` is another place in the same run of its group. SLOTS: whether groups have several segments."""
    into = first % inner
    groups, _ = runs_before(into, offset, inner)
    segment = groups * slots
    if SLOTS:
        runs, _ = runs_before(first % run, place, run)
        before, _ = runs_before(first % run, tl.maximum(groups * inner - into, 0).to(tl.int32), run)
        segment += runs - tl.where(groups > 0, before, ((first - into) // run - first // run).to(tl.int32))
    return segment


@triton.jit(do_not_specialize=["numel", "inner", "run", "slots"])
def look_up_kernel(
    codes_ptr, rows_ptr, other_ptr, target_ptr, numel, inner, run, slots,
    BIT_WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS_2: tl.constexpr,
    SLOTS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Look up, and multiply by `other` unless that is None. ALIGNED: a row of a whole block's plane is in one group, 1,
    or in one segment, 2."""
    for RAGGED in tl.static_range(ROWS == 0, 2):
        at = tile(numel, BLOCK, ROWS, COLUMNS_2, RAGGED, IN_INT64=True)
        first, row, column, stride, limit = at
        if limit > 0:
            packed = load_bytes(codes_ptr, at, BLOCK, BIT_WIDTH, RAGGED)
            row_ptr = rows_ptr + ((first // inner * slots) << BIT_WIDTH)
            for i in tl.static_range(8):
                valid = element_mask(i, at, RAGGED)
                offset = row * BLOCK + i * stride
                place = offset if ALIGNED > 1 and not RAGGED else offset + column
                offset = offset if ALIGNED and not RAGGED else place
                segment = _segment_of(first, offset, place, inner, run, slots, SLOTS)
                q = unpack_code(packed, i, BIT_WIDTH).to(tl.int32)
                y = tl.load(row_ptr + ((segment << BIT_WIDTH) + q), mask=valid, other=0.0)
                if other_ptr is not None:
                    y = y * widen(tl.load(plane_of(other_ptr, i, at, BLOCK), mask=valid))
                tl.store(plane_of(target_ptr, i, at, BLOCK), cast(y, target_ptr.dtype.element_ty), mask=valid)


def map_levels(buffer, plan, dtype, mean, factor, place, segments, table):
    _mapping(plan, dtype, place, segments).run(buffer, buffer, table, mean, factor)


@functools.lru_cache(maxsize=4096)
def _mapping(plan: UniformPlan, dtype: torch.dtype, place: Place | None, segments: Segments) -> Program:
    """The program of tables. Its tensors are the buffer for scales and minima, the table, means and factors."""
    geometry = plan.geometry
    entries = segments.rows << geometry.bit_width
    values = {
        **parts_of(plan),
        **segments._asdict(),
        "entries": entries,
        "last": max(geometry.numel - 1, 0) // segments.run,
        "groups": geometry.groups,
        "largest": torch.finfo(dtype).max,
        **{f"place_{name}": value for name, value in zip(Place._fields, place or (0, 0, 0, 0), strict=True)},
        "BIT_WIDTH": geometry.bit_width,
        "ROUNDING": _ROUNDINGS[dtype],
        "TILE": LEVELS_TILE,
        "UNEVEN": plan.uneven,
        "STRETCHED": plan.stretched,
    }
    return Program(map_levels_kernel, (-(-entries // LEVELS_TILE),), **values)


def look_up(buffer, plan, segments, table, other, target):
    program = _looking_up(plan, segments, target.itemsize)
    if program is None:
        return NotImplemented
    program.run(buffer, table, other, target)


@functools.lru_cache(maxsize=4096)
def _looking_up(plan: UniformPlan, segments: Segments, itemsize: int) -> Program | None:
    """The program that looks up. Its tensors are the buffer for codes, the table, the factor and the target."""
    geometry = plan.geometry
    run = segments.run if segments.slots > 1 else segments.inner
    if max(segments.inner, run) > LARGEST_RUN:
        return None
    columns = geometry.block_size // 8
    aligned = (segments.inner % columns == 0) * (2 - (run % columns > 0))
    values: dict[str, Any] = {"inner": segments.inner, "run": run, "slots": segments.slots, "SLOTS": segments.slots > 1}
    return over_blocks(look_up_kernel, geometry, itemsize, ALIGNED=aligned, **values, **parts_of(plan))
