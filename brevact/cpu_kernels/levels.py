"""Kernels of levels of any spacing: positions on a row of them, and tables of the values of each segment's codes.

Bytes and values are those of `kernel_ops.quantize_grid`, `dequantize_grid`, `map_levels` and `look_up`.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.floats import (
    FLOAT16,
    FLOAT32,
    KINDS,
    emit,
    emit_product,
    is_finite,
    limit_of,
    limited,
    round_to,
    stage,
)
from brevact.cpu_kernels.intrinsics import (
    advance,
    f32_at,
    f32_scratch,
    i64_at,
    inlined,
    kernel,
    load,
    store,
    u8_at,
    u8_scratch,
    u32_scratch,
)
from brevact.cpu_kernels.normalize import INNER as PLACE_INNER
from brevact.cpu_kernels.normalize import MEAN, OUTER, ROW, SCALE, next_of, start_of, words_of
from brevact.cpu_kernels.packing import bytes_to_codes, halves_of, look_up_row, write_codes
from brevact.cpu_kernels.teams import share
from brevact.cpu_kernels.uniform import (
    BIT_WIDTH,
    BLOCK,
    KIND,
    NEAREST,
    NUMEL,
    ROUNDING,
    STOCHASTIC,
    GroupTable,
    all_levels,
    grid_table,
    read_metadata,
    uniform_table,
)
from brevact.geometry import Geometry, Grid, Segments

REGISTER = 16
"""Entries of the largest table: those of codes of 4 bits."""

SEGMENT_INNER, SEGMENT_RUN, SLOTS = range(3)
"""First fields of the words of `geometry.Segments`."""


@inlined
def _emit_levels(levels, values, codes, factor, mean, target, kind, at):
    """Write levels * factor + mean, within the range of the type, to a table; loops of constant length are fast."""
    for q in range(REGISTER):
        store(values, q, load(levels, q) * factor + mean)
    if kind == FLOAT16:
        for q in range(REGISTER):
            store(values, q, limited(load(values, q), limit_of(FLOAT16)))
    emit(values, target, kind, at, codes)


@kernel
def map_levels_blocks(scale, minimum, norm_at, segments_at, target, target_kind, table_at, start, stop):
    """`norm_at` has words of an affine map (`normalize`), or is 0; `table_at` has the type of decoded elements."""
    table, words = i64_at(table_at), i64_at(segments_at)
    kind, codes = load(table, KIND), np.int64(1) << load(table, BIT_WIDTH)
    inner, run, slots = load(words, SEGMENT_INNER), load(words, SEGMENT_RUN), load(words, SLOTS)
    last, limit = (load(table, NUMEL) - 1) // run, limit_of(kind)
    levels, values = f32_scratch(REGISTER), f32_scratch(REGISTER)
    for bucket in range(start, stop):
        m, s = read_metadata(scale, minimum, bucket)
        all_levels(m, s, limit, REGISTER, levels, table)
        round_to(kind, levels, REGISTER)
        at = bucket * slots * codes
        if norm_at == 0:
            _emit_levels(levels, values, codes, np.float32(1.0), np.float32(-0.0), target, target_kind, at)
            continue
        norm = i64_at(norm_at)
        outer, row, span = load(norm, OUTER), load(norm, ROW), load(norm, PLACE_INNER)
        means, factors, has_mean = f32_at(load(norm, MEAN)), f32_at(load(norm, SCALE)), load(norm, MEAN) != 0
        base, in_row, in_span = start_of(bucket * inner // run * run, norm)
        group = base + in_span // run
        for slot in range(slots):
            mean = load(means, group) if has_mean else np.float32(-0.0)  # which adds nothing, to zeros too
            _emit_levels(levels, values, codes, load(factors, group), mean, target, target_kind, at + slot * codes)
            if bucket * inner // run + slot < last:
                base, group, in_row, in_span = next_of(base, group, in_row, in_span, run, span, outer, row)


@kernel
def look_up_blocks(codes, segments_at, rows, other, other_kind, target, table_at, start, stop):
    """Write the entries of codes of at most 8 bits in the rows of their segments, times `other`."""
    table, words = i64_at(table_at), i64_at(segments_at)
    numel, bit_width, block, kind = load(table, NUMEL), load(table, BIT_WIDTH), load(table, BLOCK), load(table, KIND)
    inner, run, slots = load(words, SEGMENT_INNER), load(words, SEGMENT_RUN), load(words, SLOTS)
    size = np.int64(1) << bit_width
    scratch, factors, q = f32_scratch(block), f32_scratch(block), u8_scratch(block)
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        bytes_to_codes(advance(u8_at(codes), first // 8 * bit_width), (count + 7) // 8, bit_width, q)
        direct = kind == FLOAT32 and other == 0
        values = advance(f32_at(target), first) if direct else scratch
        bucket = first // inner
        number, e = bucket * slots + first // run - bucket * inner // run, np.int64(0)
        left, run_left = inner - first % inner, run - first % run  # elements of the run of a group, and of statistics
        while e < count:
            row, step = advance(f32_at(rows), number * size), min(count - e, min(left, run_left))
            look_up_row(advance(q, e), step, row, advance(values, e))
            e, left, run_left = e + step, left - step, run_left - step
            if run_left == 0:
                number, run_left = number + 1, run
            if left == 0:
                bucket, left = bucket + 1, inner
                number = bucket * slots
        if other:
            emit_product(values, other, other_kind, target, kind, first, count, factors)
        elif not direct:
            emit(values, target, kind, first, count)


def map_levels(buffer, plan, dtype, mean, factor, place, segments, table):
    if plan.geometry.bit_width > 4 or not plan.has_kernels:
        return NotImplemented
    own, words = uniform_table(plan, dtype), _words_of_segments(segments)
    norm_at, _norm = words_of(mean, factor, place)
    codes = buffer.data_ptr()
    metadata = codes + plan.scale_at, codes + plan.minimum_at
    arguments = (*metadata, norm_at, ctypes.addressof(words), table.data_ptr(), KINDS[table.dtype], own.address)
    entries = segments.slots << plan.geometry.bit_width
    share(map_levels_blocks, arguments, segments.rows // segments.slots, entries)


def look_up(buffer, plan, segments, table, other, target):
    if plan.geometry.bit_width > 4 or not plan.has_kernels:
        return NotImplemented
    look_up_rows(buffer, uniform_table(plan, target.dtype), segments, table, other, target)


def look_up_rows(
    codes: Tensor, table: GroupTable, segments: Segments, rows: Tensor, other: Tensor | None, target: Tensor
) -> None:
    words, factor = _words_of_segments(segments), (0, 0) if other is None else (other.data_ptr(), KINDS[other.dtype])
    pointers = codes.data_ptr(), ctypes.addressof(words), rows.data_ptr(), *factor, target.data_ptr()
    block_size = table.geometry.block_size
    share(look_up_blocks, (*pointers, table.address), table.blocks, block_size)


@functools.lru_cache(maxsize=4096)
def _words_of_segments(segments: Segments) -> ctypes.Array:
    return (ctypes.c_int64 * 4)(*segments)


@inlined
def _clip(fraction):
    fraction = fraction if fraction > np.float32(0.0) else np.float32(0.0)
    return fraction if fraction < np.float32(1.0) else np.float32(1.0)


@inlined
def place(z, count, levels, steps, size, stochastic, t):
    """Write positions on a row of levels to `t`; to the nearest, the number of `steps` that a value reaches."""
    for e in range(count):
        store(t, e, np.float32(0.0))
    for k in range(size - 1):
        low, step, base = load(levels, k), load(steps, k), np.float32(k)
        if stochastic:
            for e in range(count):
                reached = base + _clip((load(z, e) - low) * step)
                store(t, e, reached if load(z, e) >= low else load(t, e))
        else:
            for e in range(count):
                store(t, e, load(t, e) + (np.float32(1.0) if load(z, e) >= step else np.float32(0.0)))


@kernel
def quantize_grid_blocks(source, codes, levels, steps, size, marks, seed, table_at, start, stop):
    """There are `size` levels, and one less of `Grid.steps`."""
    table = i64_at(table_at)
    numel, bit_width, block = load(table, NUMEL), load(table, BIT_WIDTH), load(table, BLOCK)
    stochastic = load(table, ROUNDING) == STOCHASTIC
    k = halves_of(seed)
    top = (np.int64(1) << bit_width) - 1
    t, scratch = f32_scratch(block), f32_scratch(block)
    random, q = u32_scratch(block // 2), u8_scratch(block)
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        z = stage(source, load(table, KIND), first, count, scratch)
        place(z, count, f32_at(levels), f32_at(steps), size, stochastic, t)
        if marks:
            for e in range(count):
                store(t, e, load(t, e) if is_finite(load(z, e)) else np.float32(top))
        write_codes(t, first, count, bit_width, stochastic, k, random, q, u8_at(codes))


def quantize_grid(flat: Tensor, geometry: Geometry, grid: Grid, seed: int | Tensor | None, codes: Tensor) -> None:
    if grid.levels.shape[0] > 1 or geometry.bit_width > 8:
        return NotImplemented
    stochastic = seed is not None
    levels, steps = grid.levels.contiguous(), grid.steps(stochastic=stochastic).contiguous()
    table = grid_table(geometry, flat.dtype, STOCHASTIC if stochastic else NEAREST)
    row, key = (levels.data_ptr(), steps.data_ptr(), levels.shape[1]), 0 if seed is None else int(seed)
    arguments = (flat.data_ptr(), codes.data_ptr(), *row, grid.marks, key, table.address)
    share(quantize_grid_blocks, arguments, table.blocks, geometry.block_size)


def dequantize_grid(codes: Tensor, geometry: Geometry, grid: Grid, other: Tensor | None, target: Tensor) -> None:
    """Codes from the number of levels on have the last level."""
    if grid.levels.shape[0] > 1 or geometry.bit_width > 8:
        return NotImplemented
    limit, size = torch.finfo(target.dtype).max, grid.levels.shape[1]
    row = grid.levels[0].clamp(-limit, limit).to(target.dtype).float()
    row = torch.cat((row, row[-1:].expand(max((1 << geometry.bit_width) - size, 0))))
    everything = max(geometry.numel, 1)
    segments = Segments(everything, everything, 1, 1)
    look_up_rows(codes, grid_table(geometry, target.dtype, NEAREST), segments, row, other, target)
