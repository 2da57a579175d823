"""Kernels that decode by a table of the values of each segment's codes: `map_levels` and `look_up`."""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.floats import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    KINDS,
    bfloat16_to_float,
    emit,
    emit_product,
    float_to_bfloat16,
    float_to_half,
    half_to_float,
    limit_of,
    limited,
    stage,
)
from brevact.cpu_kernels.groups import BIT_WIDTH, BLOCK, KIND, NUMEL, UNEVEN, is_flagged, read_metadata, uniform_table
from brevact.cpu_kernels.memory import (
    advance,
    f32_at,
    f32_scratch,
    i64_at,
    inlined,
    kernel,
    lanes,
    load,
    look_up_lanes,
    store,
    u8_at,
)
from brevact.cpu_kernels.normalize import INNER as PLACE_INNER
from brevact.cpu_kernels.normalize import MEAN, OUTER, ROW, RUN, SCALE, words_of
from brevact.cpu_kernels.teams import share
from brevact.cpu_kernels.uneven import uneven_levels
from brevact.cpu_kernels.uniform import decoded
from brevact.geometry import Place, Segments, UniformPlan

REGISTER = 16
"""Entries of a table that registers hold: those of codes of 4 bits."""

SEGMENT_INNER, SEGMENT_RUN, SLOTS = range(3)
"""First fields of the words of `geometry.Segments`."""


@inlined
def _emit_levels(levels, values, codes, factor, mean, target, kind, at):
    """Write levels * factor + mean, within the range of the type, to a table; loops of constant length are fast."""
    y = advance(f32_at(target), at) if kind == FLOAT32 and codes == REGISTER else values
    for q in range(REGISTER):
        store(y, q, load(levels, q) * factor + mean)
    if kind == FLOAT16:
        for q in range(REGISTER):
            store(values, q, limited(load(values, q), limit_of(FLOAT16)))
    if kind != FLOAT32 or codes < REGISTER:
        emit(values, target, kind, at, codes)


@kernel
def map_levels_blocks(scale, minimum, norm_at, segments_at, target, target_kind, table_at, start, stop):
    """`norm_at` has words of an affine map (`normalize`), or is 0; `table_at` has the type of decoded elements."""
    table, words = i64_at(table_at), i64_at(segments_at)
    kind, codes = load(table, KIND), np.int64(1) << load(table, BIT_WIDTH)
    inner, run, slots = load(words, SEGMENT_INNER), load(words, SEGMENT_RUN), load(words, SLOTS)
    last, top, limit = (load(table, NUMEL) - 1) // run, np.float32(codes - 1), limit_of(kind)
    levels, values = f32_scratch(REGISTER), f32_scratch(REGISTER)
    for bucket in range(start, stop):
        m, s = read_metadata(scale, minimum, bucket)
        if load(table, UNEVEN) != 0 and is_flagged(s):
            uneven_levels(m, s, load(table, BIT_WIDTH), limit, levels)
        else:
            for q in range(REGISTER):
                store(levels, q, decoded(np.float32(np.int32(q)), m, s, top, limit))
        if kind == BFLOAT16:
            for q in range(REGISTER):
                store(levels, q, bfloat16_to_float(float_to_bfloat16(load(levels, q))))
        elif kind == FLOAT16:
            for q in range(REGISTER):
                store(levels, q, half_to_float(float_to_half(load(levels, q))))
        at = bucket * slots * codes
        if norm_at == 0:
            _emit_levels(levels, values, codes, np.float32(1.0), np.float32(-0.0), target, target_kind, at)
            continue
        norm = i64_at(norm_at)
        outer, row, span, places = load(norm, OUTER), load(norm, ROW), load(norm, PLACE_INNER), load(norm, RUN)
        means, factors, has_mean = f32_at(load(norm, MEAN)), f32_at(load(norm, SCALE)), load(norm, MEAN) != 0
        start_of_run = bucket * inner // run * run
        base, in_row, in_span = start_of_run // outer * row, start_of_run % outer, start_of_run % span
        for slot in range(slots):
            place = base + in_span // places
            mean = load(means, place) if has_mean else np.float32(-0.0)  # which adds nothing, to zeros too
            _emit_levels(levels, values, codes, load(factors, place), mean, target, target_kind, at + slot * codes)
            if bucket * inner // run + slot < last:
                in_row, in_span = in_row + run, in_span + run
                if in_span >= span:
                    in_span = np.int64(0)
                if in_row >= outer:
                    in_row, base = np.int64(0), base + row


@inlined
def _look_up_columns(packed, columns, plane, bit_width, start, stop, row, out):
    """Write the values of a plane's columns to their places in the block; the row has room for 16 values."""
    mask, at = np.uint32((1 << bit_width) - 1), plane * bit_width
    shift, low = np.uint32(at & 7), advance(packed, (at >> 3) * columns)
    high = advance(packed, (at + bit_width - 1 >> 3) * columns)  # the same, unless a code lies in two bytes
    target, j = advance(out, plane * columns), start
    if stop - start >= lanes():
        while j < stop:
            j = min(j, stop - lanes())  # the last columns are looked up with some that are known already
            look_up_lanes(advance(low, j), advance(high, j), shift, mask, row, advance(target, j))
            j += lanes()
    for k in range(j, stop):
        word = np.uint32(np.uint32(load(low, k)) | np.uint32(np.uint32(load(high, k)) << np.uint32(8)))
        store(target, k, load(row, np.int64(np.uint32(np.uint32(word >> shift) & mask))))


@kernel
def look_up_blocks(codes, segments_at, rows, other, other_kind, target, table_at, start, stop):
    table, words = i64_at(table_at), i64_at(segments_at)
    numel, bit_width, block, kind = load(table, NUMEL), load(table, BIT_WIDTH), load(table, BLOCK), load(table, KIND)
    inner, run, slots = load(words, SEGMENT_INNER), load(words, SEGMENT_RUN), load(words, SLOTS)
    size, is_short = np.int64(1) << bit_width, bit_width < 4
    scratch, factors, register = f32_scratch(block), f32_scratch(block), f32_scratch(REGISTER)
    for q in range(REGISTER):
        store(register, q, np.float32(0.0))
    first = start * block
    bucket = first // inner
    left, run_left = inner - first % inner, run - first % run  # elements of the run of a group, and of statistics
    number, is_new = bucket * slots + first // run - bucket * inner // run, True
    row = f32_at(rows)
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        columns = (count + 7) // 8
        packed = advance(u8_at(codes), first // 8 * bit_width)
        direct = kind == FLOAT32 and other == 0
        values = advance(f32_at(target), first) if direct else scratch
        plane, j, e = np.int64(0), np.int64(0), np.int64(0)
        while e < count:
            if is_new:
                row, is_new = advance(f32_at(rows), number * size), False
                if is_short:
                    for q in range(size):
                        store(register, q, load(row, q))
                    row = register
            step = min(min(columns - j, count - e), min(left, run_left))
            _look_up_columns(packed, columns, plane, bit_width, j, j + step, row, values)
            j, e, left, run_left = j + step, e + step, left - step, run_left - step
            if j == columns:
                plane, j = plane + 1, np.int64(0)
            if run_left == 0:
                number, run_left, is_new = number + 1, run, True
            if left == 0:
                bucket, left, is_new = bucket + 1, inner, True
                number = bucket * slots
        if other and kind == FLOAT32 and other_kind == FLOAT32:
            emit_product(values, other, target, kind, first, count)
        elif other:
            factor = stage(other, other_kind, first, count, factors)
            for i in range(count):
                store(scratch, i, load(scratch, i) * load(factor, i))
            emit(scratch, target, kind, first, count)
        elif not direct:
            emit(values, target, kind, first, count)


def map_levels(
    buffer: Tensor,
    plan: UniformPlan,
    dtype: torch.dtype,
    mean: Tensor | None,
    factor: Tensor | None,
    place: Place | None,
    segments: Segments,
    table: Tensor,
) -> None:
    if plan.geometry.bit_width > 4 or not plan.has_kernels:
        return NotImplemented
    own, words = uniform_table(plan, dtype), _words_of_segments(segments)
    norm = None if factor is None or place is None else words_of(mean, factor, place)
    codes = buffer.data_ptr()
    metadata = codes + plan.scale_at, codes + plan.minimum_at
    norm_at, segments_at = 0 if norm is None else ctypes.addressof(norm), ctypes.addressof(words)
    arguments = (*metadata, norm_at, segments_at, table.data_ptr(), KINDS[table.dtype], own.address)
    entries = segments.slots << plan.geometry.bit_width
    share(map_levels_blocks, arguments, segments.rows // segments.slots, entries, torch.get_num_threads())


def look_up(
    buffer: Tensor, plan: UniformPlan, segments: Segments, table: Tensor, other: Tensor | None, target: Tensor
) -> None:
    if plan.geometry.bit_width > 4 or not plan.has_kernels:
        return NotImplemented
    own, words = uniform_table(plan, target.dtype), _words_of_segments(segments)
    factor, kind = (0, 0) if other is None else (other.data_ptr(), KINDS[other.dtype])
    pointers = buffer.data_ptr(), ctypes.addressof(words), table.data_ptr(), factor, kind, target.data_ptr()
    share(look_up_blocks, (*pointers, own.address), own.blocks, plan.geometry.block_size, torch.get_num_threads())


@functools.lru_cache(maxsize=4096)
def _words_of_segments(segments: Segments) -> ctypes.Array:
    return (ctypes.c_int64 * 4)(*segments)
