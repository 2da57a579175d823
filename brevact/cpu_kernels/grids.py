"""Kernels of quantizers on grids; the bytes of the laws. Offsets and factors may be missing: address 0."""

from __future__ import annotations

import numpy as np

from brevact.cpu_kernels.dequantize import LIMITS, limited
from brevact.cpu_kernels.floats import FLOAT32, emit, emit_product, stage
from brevact.cpu_kernels.groups import (
    BIT_WIDTH,
    BLOCK,
    GROUPS,
    INNER,
    KIND,
    NUMEL,
    ROUNDING,
    STOCHASTIC,
    count_missing,
    is_finite,
    is_flagged,
)
from brevact.cpu_kernels.levels import place, place_each
from brevact.cpu_kernels.memory import (
    advance,
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
from brevact.cpu_kernels.planes import bytes_to_codes, bytes_to_words, codes_to_bytes, words_to_bytes
from brevact.cpu_kernels.quantize import round_narrow, round_wide


@inlined
def affine(x, first, count, offset, factor, table, z):
    """z = (x - offset) * |factor| of each element's group, for elements first to first + count."""
    inner, groups = load(table, INNER), load(table, GROUPS)
    offsets, factors = f32_at(offset), f32_at(factor)
    e = 0
    while e < count:
        group = (first + e) // inner % groups
        if inner == 1:
            run = min(groups - group, count - e)
            for g in range(run):
                store(z, e + g, (load(x, e + g) - load(offsets, group + g)) * abs(load(factors, group + g)))
        else:
            run = min(inner - (first + e) % inner, count - e)
            m, s = load(offsets, group), abs(load(factors, group))
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


@inlined
def _keep_below(first, count, inverse, most, table, t):
    """Positions of at most `most` in flagged groups."""
    inner, groups = load(table, INNER), load(table, GROUPS)
    inverses = f32_at(inverse)
    e = 0
    while e < count:
        group = (first + e) // inner % groups
        if inner == 1:
            run = min(groups - group, count - e)
            for g in range(e, e + run):
                limit = most if is_flagged(load(inverses, group + g - e)) else np.float32(np.inf)
                store(t, g, min(load(t, g), limit))
        else:
            run = min(inner - (first + e) % inner, count - e)
            if is_flagged(load(inverses, group)):
                for g in range(e, e + run):
                    store(t, g, min(load(t, g), most))
        e += run


@inlined
def _mark(x, count, top, t):
    """The last position where an element is not finite."""
    if count_missing(x, count) == np.int32(0):
        return
    for e in range(count):
        store(t, e, load(t, e) if is_finite(load(x, e)) else top)


@kernel
def quantize_grid_blocks(source, codes, offset, inverse, levels, steps, size, rows, marks, seed, table_at, start, stop):
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
        marks: 1 if elements that are not finite take the last code.
        seed: Key of the random bits.
        table_at: Address of the table.
        start: First block.
        stop: One past the last block.
    """
    table = i64_at(table_at)
    numel, bit_width, block = load(table, NUMEL), load(table, BIT_WIDTH), load(table, BLOCK)
    stochastic = load(table, ROUNDING) == STOCHASTIC
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
        z = x = stage(source, load(table, KIND), first, count, scratch)
        if inverse:
            affine(z, first, count, offset, inverse, table, values)
            z = values
        _place_by_group(z, first, count, f32_at(levels), f32_at(steps), size, rows, stochastic, table, t, fractions)
        if marks and inverse:
            _keep_below(first, count, inverse, np.float32(size - 2), table, t)
        if marks:
            _mark(x, count, np.float32(top), t)
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
def _decode_row(levels, offset, scale, group, size, entries, limit, row):
    """What the codes below `entries` stand for in a group; those from `size` on are as the last level."""
    m = load(f32_at(offset), group) if scale else np.float32(-0.0)  # which adds nothing, to zeros too
    s = load(f32_at(scale), group) if scale else np.float32(1.0)
    for k in range(size):
        store(row, k, limited(m + abs(s) * load(levels, k), limit))
    for k in range(size, entries):
        store(row, k, load(row, size - 1))
    if is_flagged(s):
        store(row, entries - 1, np.float32(np.nan))


@inlined
def _scale_each(values, first, count, offset, scale, groups, limit):
    """clamp(offset + scale * value) of elements first to first + count, each in another group than the one before."""
    e = 0
    while e < count:
        group = (first + e) % groups
        run = min(groups - group, count - e)
        m, s, y = advance(f32_at(offset), group), advance(f32_at(scale), group), advance(values, e)
        for g in range(run):
            store(y, g, limited(load(m, g) + load(s, g) * load(y, g), limit))
        e += run


@inlined
def _decode_planes(packed, columns, bit_width, row, low, high, values):
    """Values of a block whose codes, of at most 8 bits, all stand for the same."""
    count = 8 * columns
    if bit_width == 8:
        for e in range(count):
            store(values, e, load(row, np.int64(load(packed, e))))
        return
    bytes_to_words(packed, columns, bit_width, low, high)
    mask, i, start = np.uint32((1 << bit_width) - 1), 0, 0
    r0, r1, r2, r3 = load(row, 0), load(row, 1), load(row, mask - 1), load(row, mask)
    while start < count:  # planes; a loop of eight would be unrolled, which takes long to compile
        plane, words, shift = advance(values, start), high if i & 4 else low, np.uint32((i & 3) * bit_width)
        if bit_width <= 2:  # blending four values is faster than looking one up
            for j in range(columns):
                q = np.uint32(np.uint32(load(words, j) >> shift) & mask)
                odd = np.uint32(q & np.uint32(1)) != np.uint32(0)
                store(plane, j, (r3 if odd else r2) if q > np.uint32(1) else (r1 if odd else r0))
        else:
            for j in range(columns):
                store(plane, j, load(row, np.int64(np.uint32(np.uint32(load(words, j) >> shift) & mask))))
        i, start = i + 1, start + columns


@inlined
def _decode_segments(words, first, count, levels, offset, scale, size, rows, entries, limit, table, row, values):
    """Values of elements first to first + count of several groups, from their codes."""
    inner, groups = load(table, INNER), load(table, GROUPS)
    e = 0
    while e < count:
        group = (first + e) // inner % groups
        run = min(inner - (first + e) % inner, count - e)
        _decode_row(advance(levels, group * size if rows > 1 else 0), offset, scale, group, size, entries, limit, row)
        for g in range(e, e + run):
            store(values, g, load(row, np.int64(load(words, g))))
        e += run


@inlined
def _look_up_each(words, first, count, levels, size, groups, limit, values):
    """Levels of elements first to first + count, each on another group's row than the one before."""
    last, group = np.int64(size - 1), first % groups
    for e in range(count):
        code = np.int64(load(words, e))
        store(values, e, limited(load(levels, group * size + (code if code < last else last)), limit))
        group = group + 1 if group + 1 < groups else np.int64(0)


@kernel
def dequantize_grid_blocks(codes, offset, scale, levels, size, rows, flagged, other, target, table_at, start, stop):
    """Decode blocks start to stop, and multiply.

    Args:
        codes: Address of the packed codes.
        offset: Address of the groups' offsets, or 0 where `scale` is 0 as well.
        scale: Address of the groups' scales, or 0.
        levels: Address of the rows of levels.
        size: Levels of a row.
        rows: Number of rows: 1, or one a group.
        flagged: 1 if a scale has its sign bit set.
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
    # each element is in another group than the one before; flags are read a group at a time
    each = inner == 1 and groups > 1 and flagged == 0
    loose = np.float32(np.inf) if each and scale else limit
    scratch, words, row, in_row = f32_scratch(block), u32_scratch(block), f32_scratch(entries), np.int64(-1)
    low, high = u32_scratch(block // 8), u32_scratch(block // 8)
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        columns = (count + 7) // 8
        packed = advance(u8_at(codes), first // 8 * bit_width)
        direct = kind == FLOAT32 and other == 0 and count == 8 * columns
        values = advance(f32_at(target), first) if direct else scratch
        shared = first % inner + count <= inner or (each and rows == 1)  # all codes stand for the same, but for scales
        if shared:
            group = first // inner % groups if rows > 1 or not each else np.int64(0)
            if group != in_row:
                own = advance(f32_at(levels), group * size if rows > 1 else 0)
                _decode_row(own, offset, 0 if each else scale, group, size, entries, loose, row)
                in_row = group
        if shared and bit_width <= 8:
            _decode_planes(packed, columns, bit_width, row, low, high, values)
        else:
            bytes_to_codes(packed, columns, bit_width, words)
            if shared:
                for e in range(count):
                    store(values, e, load(row, np.int64(load(words, e))))
            elif each:
                _look_up_each(words, first, count, f32_at(levels), size, groups, loose, values)
            else:
                _decode_segments(
                    words, first, count, f32_at(levels), offset, scale, size, rows, entries, limit, table, row, values
                )
                in_row = np.int64(-1)
        if each and scale:
            _scale_each(values, first, count, offset, scale, groups, limit)
        if other:
            emit_product(values, other, target, kind, first, count)
        elif not direct:
            emit(values, target, kind, first, count)
