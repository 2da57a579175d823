"""Kernels of quantizers on grids; the bytes of `grid_reference`. Offsets and factors may be missing: address 0."""

from __future__ import annotations

import numpy as np

from brevact.cpu_kernels.dequantize import LIMITS, limited
from brevact.cpu_kernels.floats import emit, emit_product, stage
from brevact.cpu_kernels.groups import BIT_WIDTH, BLOCK, GROUPS, INNER, KIND, NUMEL, STOCHASTIC
from brevact.cpu_kernels.levels import place, place_each
from brevact.cpu_kernels.memory import (
    advance,
    as_i32,
    as_u32,
    f32_at,
    f32_scratch,
    i64_at,
    inlined,
    kernel,
    load,
    store,
    u8_at,
    u32_scratch,
)
from brevact.cpu_kernels.philox import column_words
from brevact.cpu_kernels.planes import bytes_to_codes, codes_to_bytes, words_to_bytes
from brevact.cpu_kernels.quantize import round_narrow, round_wide


@inlined
def affine(x, first, count, offset, factor, table, z):
    """z = (x - offset) * factor of each element's group, for elements first to first + count."""
    inner, groups = load(table, INNER), load(table, GROUPS)
    offsets, factors = f32_at(offset), f32_at(factor)
    e = 0
    while e < count:
        group = (first + e) // inner % groups
        if inner == 1:
            run = min(groups - group, count - e)
            for g in range(run):
                store(z, e + g, (load(x, e + g) - load(offsets, group + g)) * load(factors, group + g))
        else:
            run = min(inner - (first + e) % inner, count - e)
            m, s = load(offsets, group), load(factors, group)
            for g in range(e, e + run):
                store(z, g, (load(x, g) - m) * s)
        e += run


@inlined
def _place_by_group(z, first, count, levels, steps, size, rows, stochastic, table, t, scratch):
    """Positions on the one row of levels, or each group's own."""
    inner, groups = load(table, INNER), load(table, GROUPS)
    e = 0
    while e < count:
        group, run = np.int64(0), count
        if rows > 1:
            group = (first + e) // inner % groups
            run = min(groups - group, count - e) if inner == 1 else min(inner - (first + e) % inner, count - e)
        row, row_steps = advance(levels, group * size), advance(steps, group * (size - 1))
        if rows > 1 and inner == 1:
            place_each(advance(z, e), run, row, row_steps, size, stochastic, advance(t, e), advance(scratch, e))
        else:
            place(advance(z, e), run, row, row_steps, size, stochastic, advance(t, e), advance(scratch, e))
        e += run


@kernel
def quantize_grid_blocks(source, codes, offset, inverse, levels, steps, size, rows, seed, table_at, start, stop):
    """Quantize blocks start to stop to codes of levels.

    Args:
        source: Address of the elements.
        codes: Address of the packed codes.
        offset: Address of the groups' offsets, or 0 where `inverse` is 0 as well.
        inverse: Address of the groups' inverse scales, or 0.
        levels: Address of the rows of levels.
        steps: Address of the rows of bounds, or of inverse gaps for stochastic rounding.
        size: Levels of a row.
        rows: Number of rows: 1, or one a group.
        seed: Key of the random bits.
        table_at: Address of the table.
        start: First block.
        stop: One past the last block.
    """
    table = i64_at(table_at)
    numel, bit_width, block = load(table, NUMEL), load(table, BIT_WIDTH), load(table, BLOCK)
    stochastic = load(table, STOCHASTIC) != 0
    k0, k1 = np.uint64(seed) & np.uint64(0xFFFFFFFF), np.uint64(seed) >> np.uint64(32)
    top = (np.int64(1) << bit_width) - 1
    t, fractions, scratch, values = f32_scratch(block), f32_scratch(block), f32_scratch(block), f32_scratch(block)
    wide = as_u32(scratch)
    columns = block // 8
    w0, w1, w2, w3 = u32_scratch(columns), u32_scratch(columns), u32_scratch(columns), u32_scratch(columns)
    low, high = u32_scratch(columns), u32_scratch(columns)
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        columns = (count + 7) // 8
        z = stage(source, load(table, KIND), first, count, scratch)
        if inverse:
            affine(z, first, count, offset, inverse, table, values)
            z = values
        _place_by_group(z, first, count, f32_at(levels), f32_at(steps), size, rows, stochastic, table, t, fractions)
        for e in range(count, 8 * columns):
            store(t, e, np.float32(0.0))
        if stochastic:
            column_words(first // 8, columns, k0, k1, w0, w1, w2, w3)
        out = advance(u8_at(codes), first // 8 * bit_width)
        if bit_width < 8:
            round_narrow(t, columns, bit_width, stochastic, w0, w1, w2, w3, low, high)
            words_to_bytes(low, high, columns, bit_width, out)
        else:
            round_wide(t, columns, top, stochastic, w0, w1, w2, w3, wide)
            codes_to_bytes(wide, columns, bit_width, out)


@inlined
def _decode_row(levels, m, s, size, entries, limit, row):
    """What the codes below `entries` stand for; those from `size` on are as the last level."""
    for k in range(size):
        store(row, k, limited(m + s * load(levels, k), limit))
    for k in range(size, entries):
        store(row, k, load(row, size - 1))


@inlined
def _decode_by_element(q, count, levels, stride, size, offsets, scales, limit, values):
    """Values of codes of elements that are each in a group of their own."""
    last, across = np.int32(size - 1), np.int32(stride)
    for e in range(count):
        code = load(q, e)
        code = code if code < last else last
        store(values, e, load(levels, np.int64(np.int32(np.int32(np.int32(e) * across) + code))))
    if scales:
        m, s = f32_at(offsets), f32_at(scales)
        for e in range(count):
            store(values, e, load(m, e) + load(s, e) * load(values, e))
    for e in range(count):
        store(values, e, limited(load(values, e), limit))


@kernel
def dequantize_grid_blocks(codes, offset, scale, levels, size, rows, other, target, table_at, start, stop):
    """Decode blocks start to stop, and multiply.

    Args:
        codes: Address of the packed codes.
        offset: Address of the groups' offsets, or 0 where `scale` is 0 as well.
        scale: Address of the groups' scales, or 0.
        levels: Address of the rows of levels.
        size: Levels of a row.
        rows: Number of rows: 1, or one a group.
        other: Address of the factor, 0 for none.
        target: Address of the result.
        table_at: Address of the table.
        start: First block.
        stop: One past the last block.
    """
    table = i64_at(table_at)
    numel, bit_width, block, kind = load(table, NUMEL), load(table, BIT_WIDTH), load(table, BLOCK), load(table, KIND)
    inner, groups = load(table, INNER), load(table, GROUPS)
    if scale == 0 and rows == 1:
        inner, groups = numel, 1
    limit, entries = np.float32(LIMITS[kind]), np.int64(1) << bit_width
    values, words, row = f32_scratch(block), u32_scratch(block), f32_scratch(entries)
    q, in_row = as_i32(words), np.int64(-1)
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        bytes_to_codes(advance(u8_at(codes), first // 8 * bit_width), (count + 7) // 8, bit_width, words)
        e = 0
        while e < count:
            group = (first + e) // inner % groups
            own = advance(f32_at(levels), group * size if rows > 1 else 0)
            if inner == 1:
                run = min(groups - group, count - e)
                m, s = (offset + 4 * group, scale + 4 * group) if scale else (0, 0)
                stride = size if rows > 1 else 0
                _decode_by_element(advance(q, e), run, own, stride, size, m, s, limit, advance(values, e))
            else:
                run = min(inner - (first + e) % inner, count - e)
                if group != in_row:
                    m = load(f32_at(offset), group) if scale else np.float32(-0.0)  # which adds nothing, to zeros too
                    _decode_row(
                        own, m, load(f32_at(scale), group) if scale else np.float32(1.0), size, entries, limit, row
                    )
                    in_row = group
                for g in range(e, e + run):
                    store(values, g, load(row, np.int64(load(q, g))))
            e += run
        if other:
            emit_product(values, other, target, kind, first, count)
        else:
            emit(values, target, kind, first, count)
