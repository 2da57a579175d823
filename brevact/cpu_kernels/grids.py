"""Kernels of quantizers on grids; the bytes of `grid_reference`. Offsets, scales and rows may be missing: address 0."""

from __future__ import annotations

import numpy as np

from brevact.cpu_kernels.dequantize import LIMITS, limited
from brevact.cpu_kernels.floats import emit, emit_product, stage
from brevact.cpu_kernels.groups import BIT_WIDTH, BLOCK, GROUPS, INNER, KIND, NUMEL, STOCHASTIC
from brevact.cpu_kernels.memory import (
    advance,
    as_u32,
    f32_at,
    f32_scratch,
    i64_at,
    inlined,
    kernel,
    load,
    rint,
    store,
    u8_at,
    u32_scratch,
)
from brevact.cpu_kernels.philox import column_words
from brevact.cpu_kernels.planes import bytes_to_codes, codes_to_bytes, words_to_bytes
from brevact.cpu_kernels.quantize import round_narrow, round_wide

LARGEST_UNIT = np.float32(65536.0)


@inlined
def _affine(x, first, count, offset, factor, table, z):
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
def _place(z, count, levels, steps, size, stochastic, t):
    """Positions of values on one row of levels, as `grid_reference.positions` defines them."""
    if not stochastic:
        for e in range(count):
            store(t, e, np.float32(0.0))
        for k in range(size - 1):
            bound = load(steps, k)
            for e in range(count):
                store(t, e, load(t, e) + (np.float32(1.0) if load(z, e) >= bound else np.float32(0.0)))
        return
    low, inverse = load(levels, 0), load(steps, 0)
    for e in range(count):
        fraction = (load(z, e) - low) * inverse
        fraction = fraction if fraction > np.float32(0.0) else np.float32(0.0)  # NaN as well
        store(t, e, fraction if fraction < np.float32(1.0) else np.float32(1.0))
    for k in range(1, size - 1):
        low, inverse, base = load(levels, k), load(steps, k), np.float32(k)
        for e in range(count):
            fraction = (load(z, e) - low) * inverse
            fraction = fraction if fraction > np.float32(0.0) else np.float32(0.0)
            reached = base + (fraction if fraction < np.float32(1.0) else np.float32(1.0))
            store(t, e, reached if load(z, e) >= low else load(t, e))


@inlined
def _place_by_group(z, first, count, levels, steps, size, stochastic, table, t):
    """Positions where each group has a row of its own."""
    inner, groups = load(table, INNER), load(table, GROUPS)
    e = 0
    while e < count:
        group = (first + e) // inner % groups
        run = min(inner - (first + e) % inner, count - e)
        row, row_steps = advance(levels, group * size), advance(steps, group * (size - 1))
        _place(advance(z, e), run, row, row_steps, size, stochastic, advance(t, e))
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
    t, scratch, values = f32_scratch(block), f32_scratch(block), f32_scratch(block)
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
            _affine(z, first, count, offset, inverse, table, values)
            z = values
        if rows > 1:
            _place_by_group(z, first, count, f32_at(levels), f32_at(steps), size, stochastic, table, t)
        else:
            _place(z, count, f32_at(levels), f32_at(steps), size, stochastic, t)
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
def _scale_levels(values, first, count, offset, scale, limit, table):
    """clamp(offset + scale * value) of each element's group, in place."""
    inner, groups = load(table, INNER), load(table, GROUPS)
    offsets, scales = f32_at(offset), f32_at(scale)
    e = 0
    while e < count:
        group = (first + e) // inner % groups
        if inner == 1:
            run = min(groups - group, count - e)
            for g in range(run):
                y = load(offsets, group + g) + load(scales, group + g) * load(values, e + g)
                store(values, e + g, limited(y, limit))
        else:
            run = min(inner - (first + e) % inner, count - e)
            m, s = load(offsets, group), load(scales, group)
            for g in range(e, e + run):
                store(values, g, limited(m + s * load(values, g), limit))
        e += run


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
    limit = np.float32(LIMITS[kind])
    values, q = f32_scratch(block), u32_scratch(block)
    last = np.uint32(size - 1)
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        bytes_to_codes(advance(u8_at(codes), first // 8 * bit_width), (count + 7) // 8, bit_width, q)
        if rows > 1:
            e = 0
            while e < count:
                group = (first + e) // inner % groups
                run = min(inner - (first + e) % inner, count - e)
                row = advance(f32_at(levels), group * size)
                for g in range(e, e + run):
                    store(values, g, limited(load(row, np.int64(min(load(q, g), last))), limit))
                e += run
        else:
            row = f32_at(levels)
            for e in range(count):
                store(values, e, limited(load(row, np.int64(min(load(q, e), last))), limit))
        if scale:
            _scale_levels(values, first, count, offset, scale, limit, table)
        if other:
            emit_product(values, other, target, kind, first, count)
        else:
            emit(values, target, kind, first, count)


@inlined
def _add(x, count, m, s, sums):
    """Add values of one group to its six sums."""
    n0, s0, q0 = np.int64(0), np.int64(0), np.int64(0)
    n1, s1, q1 = np.int64(0), np.int64(0), np.int64(0)
    for e in range(count):
        z = (load(x, e) - m) * s
        size = abs(z)
        size = size if size < LARGEST_UNIT else LARGEST_UNIT
        r = np.int64(np.int32(rint(size if z == z else np.float32(0.0))))
        below, above = np.int64(z < np.float32(0.0)), np.int64(z > np.float32(0.0))
        n0, s0, q0 = n0 + below, s0 + below * r, q0 + below * r * r
        n1, s1, q1 = n1 + above, s1 + above * r, q1 + above * r * r
    store(sums, 0, load(sums, 0) + n0)
    store(sums, 1, load(sums, 1) + s0)
    store(sums, 2, load(sums, 2) + q0)
    store(sums, 3, load(sums, 3) + n1)
    store(sums, 4, load(sums, 4) + s1)
    store(sums, 5, load(sums, 5) + q1)


@kernel
def add_moments(source, offset, inverse, sums_at, table_at, blocks, parts, start, stop):
    """Add the moments of parts start to stop of a tensor to the sums of each part.

    Args:
        source: Address of the elements.
        offset: Address of the groups' offsets.
        inverse: Address of the groups' factors.
        sums_at: Address of int64 sums, six a group for each part.
        table_at: Address of the table.
        blocks: Number of blocks.
        parts: Number of parts, each a run of blocks.
        start: First part.
        stop: One past the last part.
    """
    table = i64_at(table_at)
    numel, block, inner, groups = load(table, NUMEL), load(table, BLOCK), load(table, INNER), load(table, GROUPS)
    offsets, factors = f32_at(offset), f32_at(inverse)
    scratch = f32_scratch(block)
    for part in range(start, stop):
        sums = advance(i64_at(sums_at), 6 * part * groups)
        for index in range(blocks * part // parts, blocks * (part + 1) // parts):
            first = index * block
            count = min(block, numel - first)
            x = stage(source, load(table, KIND), first, count, scratch)
            e = 0
            while e < count:
                group = (first + e) // inner % groups
                run = min(inner - (first + e) % inner, count - e)
                own = advance(sums, 6 * group)
                _add(advance(x, e), run, load(offsets, group), load(factors, group), own)
                e += run
