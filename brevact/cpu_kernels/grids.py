"""Kernels of quantizers to levels of any spacing, and the moments that these are fitted to.

Bytes and values are those of `kernel_ops.quantize_grid`, `dequantize_grid` and `moments`; offsets and scales may lack.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.floats import FLOAT32, emit, emit_product, limit_of, limited, stage
from brevact.cpu_kernels.groups import (
    BIT_WIDTH,
    BLOCK,
    GROUPS,
    INNER,
    KIND,
    NEAREST,
    NUMEL,
    ROUNDING,
    STOCHASTIC,
    affine_rows,
    count_missing,
    grid_table,
    is_finite,
    is_flagged,
    parts_of,
    run_of,
)
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
    rint,
    store,
    u8_at,
    u32_scratch,
)
from brevact.cpu_kernels.packing import bytes_to_codes, bytes_to_words
from brevact.cpu_kernels.rounding import halves_of, write_codes
from brevact.cpu_kernels.teams import share
from brevact.geometry import Geometry, Grid

_MOST_COMPARED = 32
"""Numbers that are all compared with; among more, every 2nd, 4th ..., and halving finds the place between two."""
_MOST_BLENDED = 8
"""Levels whose distances are all taken, which is faster than looking up each value's own."""


@inlined
def _number(row, k, size):
    """Number k of a row, and beyond its end NaN, which no value reaches."""
    return load(row, k) if k < size else np.float32(np.nan)


@inlined
def _compare(z, count, row, unit, size, q):
    """q = how many z reaches among every unit-th of the ascending numbers."""
    for e in range(count):
        store(q, e, np.int32(0))
    for k in range(unit - 1, size, 4 * unit):
        b0, b1 = load(row, k), _number(row, k + unit, size)
        b2, b3 = _number(row, k + 2 * unit, size), _number(row, k + 3 * unit, size)
        for e in range(count):
            v = load(z, e)
            low, high = np.int32(v >= b0) + np.int32(v >= b1), np.int32(v >= b2) + np.int32(v >= b3)
            store(q, e, np.int32(load(q, e) + np.int32(low + high)))


@inlined
def _halve(z, count, row, size, q):
    """Add to q how many of the `size` ascending numbers from row + q on z reaches."""
    while size > 0:
        half = (size + 1) >> 1
        middle, step = advance(row, half - 1), np.int32(half)
        for e in range(count):
            place = load(q, e)
            store(q, e, np.int32(place + (step if load(z, e) >= load(middle, np.int64(place)) else np.int32(0))))
        size -= half


@inlined
def _count(z, count, row, size, q):
    """q = how many of the ascending numbers z reaches; none if it is NaN."""
    unit = 1
    while size >= _MOST_COMPARED * unit:
        unit *= 2
    _compare(z, count, row, unit, size, q)
    if unit > 1:
        factor, last = np.int32(unit), np.int32(size - (unit - 1))  # from a lower start the numbers suffice
        for e in range(count):
            place = np.int32(load(q, e) * factor)
            store(q, e, place if place < last else last)
        _halve(z, count, row, unit - 1, q)


@inlined
def _clip(fraction):
    """clip(fraction, 0, 1); 0 for NaN."""
    fraction = fraction if fraction > np.float32(0.0) else np.float32(0.0)
    return fraction if fraction < np.float32(1.0) else np.float32(1.0)


@inlined
def _blend(z, count, levels, steps, size, t):
    low, inverse = load(levels, 0), load(steps, 0)
    for e in range(count):
        store(t, e, _clip((load(z, e) - low) * inverse))
    for k in range(1, size - 1):
        low, inverse, base = load(levels, k), load(steps, k), np.float32(k)
        for e in range(count):
            reached = base + _clip((load(z, e) - low) * inverse)
            store(t, e, reached if load(z, e) >= low else load(t, e))


@inlined
def place(z, count, levels, steps, size, stochastic, t, scratch):
    """Write positions on a row of levels to `t`; rounding needs `steps`, too. Scratch: `count` numbers."""
    q = as_i32(t)
    if not stochastic:
        _count(z, count, steps, size - 1, q)
        for e in range(count):
            store(t, e, np.float32(load(q, e)))
    elif size <= _MOST_BLENDED:
        _blend(z, count, levels, steps, size, t)
    else:
        _count(z, count, advance(levels, 1), size - 2, q)
        for e in range(count):
            index = np.int64(load(q, e))
            store(scratch, e, (load(z, e) - load(levels, index)) * load(steps, index))
        for e in range(count):
            store(t, e, np.float32(load(q, e)) + _clip(load(scratch, e)))


@inlined
def affine(x, first, count, offset, factor, table, z):
    """z = (x - offset) * |factor| of each element's group, for elements first to first + count."""
    inner, offsets, factors = load(table, INNER), f32_at(offset), f32_at(factor)
    e = 0
    while e < count:
        group, run = run_of(first + e, count - e, table)
        if inner == 1:
            for g in range(run):
                store(z, e + g, (load(x, e + g) - load(offsets, group + g)) * abs(load(factors, group + g)))
        else:
            m, s = load(offsets, group), abs(load(factors, group))
            for g in range(e, e + run):
                store(z, g, (load(x, g) - m) * s)
        e += run


@inlined
def _keep_below(first, count, inverse, most, table, t):
    """Positions of at most `most` in flagged groups."""
    inner, inverses = load(table, INNER), f32_at(inverse)
    e = 0
    while e < count:
        group, run = run_of(first + e, count - e, table)
        if inner == 1:
            for g in range(e, e + run):
                limit = most if is_flagged(load(inverses, group + g - e)) else np.float32(np.inf)
                store(t, g, min(load(t, g), limit))
        elif is_flagged(load(inverses, group)):
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
def quantize_grid_blocks(source, codes, offset, inverse, levels, steps, size, marks, seed, table_at, start, stop):
    """There are `size` levels, and one less of `Grid.steps`. Addresses are 0 for no `inverse`, and then no `offset`."""
    table = i64_at(table_at)
    numel, bit_width, block = load(table, NUMEL), load(table, BIT_WIDTH), load(table, BLOCK)
    stochastic = load(table, ROUNDING) == STOCHASTIC
    k = halves_of(seed)
    top = (np.int64(1) << bit_width) - 1
    t, fractions, scratch, values = f32_scratch(block), f32_scratch(block), f32_scratch(block), f32_scratch(block)
    wide = as_u32(scratch)
    columns = block // 8
    random = u32_scratch(columns), u32_scratch(columns), u32_scratch(columns), u32_scratch(columns)
    joined = u32_scratch(columns), u32_scratch(columns)
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        z = x = stage(source, load(table, KIND), first, count, scratch)
        if inverse:
            affine(z, first, count, offset, inverse, table, values)
            z = values
        place(z, count, f32_at(levels), f32_at(steps), size, stochastic, t, fractions)
        if marks and inverse:
            _keep_below(first, count, inverse, np.float32(size - 2), table, t)
        if marks:
            _mark(x, count, np.float32(top), t)
        write_codes(t, first, count, bit_width, stochastic, k, random, joined, wide, u8_at(codes))


def quantize_grid(flat: Tensor, geometry: Geometry, grid: Grid, seed: int | Tensor | None, codes: Tensor) -> None:
    if grid.levels.shape[0] > 1:
        return NotImplemented
    stochastic = seed is not None
    levels, steps = grid.levels.contiguous(), grid.steps(stochastic=stochastic).contiguous()
    rows = affine_rows(grid.offset, grid.inverse)  # in a name, so that its memory lives on
    addresses = (0, 0) if rows is None else (rows[0].data_ptr(), rows[1].data_ptr())
    table = grid_table(geometry, flat.dtype, STOCHASTIC if stochastic else NEAREST)
    row, key = (levels.data_ptr(), steps.data_ptr(), levels.shape[1]), 0 if seed is None else int(seed)
    arguments = (flat.data_ptr(), codes.data_ptr(), *addresses, *row, grid.marks, key, table.address)
    share(quantize_grid_blocks, arguments, table.blocks, geometry.block_size, torch.get_num_threads())


@inlined
def _decode_row(levels, m, s, size, entries, limit, row):
    """Values of the codes below `entries` in a group; from `size` on, that of the last level."""
    for k in range(size):
        store(row, k, limited(m + abs(s) * load(levels, k), limit))
    for k in range(size, entries):
        store(row, k, load(row, size - 1))
    if is_flagged(s):
        store(row, entries - 1, np.float32(np.nan))


@inlined
def _scale_groups(values, first, count, offset, scale, limit, table):
    """clamp(offset + |scale| * value) of elements first to first + count of several groups."""
    e = 0
    while e < count:
        group, run = run_of(first + e, count - e, table)
        ms, scales, y = advance(f32_at(offset), group), advance(f32_at(scale), group), advance(values, e)
        if load(table, INNER) == 1:
            for g in range(run):
                store(y, g, limited(load(ms, g) + abs(load(scales, g)) * load(y, g), limit))
        else:
            m, s = load(ms, 0), abs(load(scales, 0))
            for g in range(run):
                store(y, g, limited(m + s * load(y, g), limit))
        e += run


@inlined
def _mark_missing(codes, first, count, scale, top, values, table):
    """NaN for the last code of groups that are flagged."""
    inner, groups = load(table, INNER), load(table, GROUPS)
    for e in range(count):
        if load(codes, e) == top and is_flagged(load(f32_at(scale), (first + e) // inner % groups)):
            store(values, e, np.float32(np.nan))


@inlined
def _decode_planes(packed, columns, bit_width, row, low, high, values):
    """Values of a block of one row, of codes of at most 8 bits."""
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


@kernel
def dequantize_grid_blocks(codes, offset, scale, levels, size, flagged, other, target, table_at, start, stop):
    """Codes have at most 8 bits. Addresses are 0 for none: of `scale`, and then of `offset`. `flagged`: a scale is."""
    table = i64_at(table_at)
    numel, bit_width, block, kind = load(table, NUMEL), load(table, BIT_WIDTH), load(table, BLOCK), load(table, KIND)
    inner, limit, entries = load(table, INNER), limit_of(kind), np.int64(1) << bit_width
    scratch, words, row, in_row = f32_scratch(block), u32_scratch(block), f32_scratch(entries), np.int64(-2)
    low, high = u32_scratch(block // 8), u32_scratch(block // 8)
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        columns = (count + 7) // 8
        packed = advance(u8_at(codes), first // 8 * bit_width)
        direct = kind == FLOAT32 and other == 0 and count == 8 * columns
        values = advance(f32_at(target), first) if direct else scratch
        group = np.int64(-1)  # all codes stand for the same in the block, but for scales
        m, s, loose = np.float32(-0.0), np.float32(1.0), np.float32(np.inf) if scale else limit
        if scale and first % inner + count <= inner:
            group = first // inner % load(table, GROUPS)
            m, s, loose = load(f32_at(offset), group), load(f32_at(scale), group), limit
        if group != in_row:
            _decode_row(f32_at(levels), m, s, size, entries, loose, row)
            in_row = group
        _decode_planes(packed, columns, bit_width, row, low, high, values)
        if scale and group < 0:
            _scale_groups(values, first, count, offset, scale, limit, table)
            if flagged:
                bytes_to_codes(packed, columns, bit_width, words)
                _mark_missing(words, first, count, scale, np.uint32(entries - 1), values, table)
        if other:
            emit_product(values, other, target, kind, first, count)
        elif not direct:
            emit(values, target, kind, first, count)


def dequantize_grid(codes: Tensor, geometry: Geometry, grid: Grid, other: Tensor | None, target: Tensor) -> None:
    if grid.levels.shape[0] > 1 or geometry.bit_width > 8:
        return NotImplemented
    levels = grid.levels.contiguous()
    rows = affine_rows(grid.offset, grid.scale)
    addresses = (0, 0) if rows is None else (rows[0].data_ptr(), rows[1].data_ptr())
    table, factor = grid_table(geometry, target.dtype, NEAREST), 0 if other is None else other.data_ptr()
    flagged = grid.scale is not None and bool(torch.signbit(grid.scale).any())
    row = levels.data_ptr(), levels.shape[1]
    arguments = (codes.data_ptr(), *addresses, *row, flagged, factor, target.data_ptr(), table.address)
    share(dequantize_grid_blocks, arguments, table.blocks, geometry.block_size, torch.get_num_threads())


COLUMNS = 6
"""Sums of a group: count, sum and sum of squares below its offset, then above."""
_LARGEST_UNIT = np.float32(65536.0)


@inlined
def _split(z, count, counts, units, sign):
    """Whether 0 < sign * z < infinity, and min(rint(|z|), 65536) where it is, else 0."""
    for e in range(count):
        v = load(z, e) * sign
        r = np.uint32(np.int32(rint(v if v < _LARGEST_UNIT else _LARGEST_UNIT)))
        inside = v > np.float32(0.0) and v < np.float32(np.inf)
        store(counts, e, np.uint32(inside))
        store(units, e, r if inside else np.uint32(0))


@inlined
def _add_run(counts, units, count, group, groups, sums):
    """Add elements of one group: sums of a block fit 32 bits, those of squares do not."""
    n, s, q = np.uint32(0), np.uint32(0), np.uint64(0)
    for e in range(count):
        n = np.uint32(n + load(counts, e))
        s = np.uint32(s + load(units, e))
        q = np.uint64(q + np.uint64(np.uint64(load(units, e)) * np.uint64(load(units, e))))
    store(sums, group, load(sums, group) + np.int64(n))
    store(sums, groups + group, load(sums, groups + group) + np.int64(s))
    store(sums, 2 * groups + group, load(sums, 2 * groups + group) + np.int64(q))


@inlined
def _add_each(counts, units, count, group, groups, sums):
    n, s, q = advance(sums, group), advance(sums, groups + group), advance(sums, 2 * groups + group)
    for e in range(count):
        store(n, e, load(n, e) + np.int64(load(counts, e)))
    for e in range(count):
        store(s, e, load(s, e) + np.int64(load(units, e)))
    for e in range(count):
        r = np.uint64(load(units, e))
        store(q, e, load(q, e) + np.int64(np.uint64(r * r)))


@kernel
def add_moments(source, offset, inverse, sums_at, table_at, blocks, parts, start, stop):
    """Add the moments of parts start to stop, each a run of blocks, to the part's six int64 sums of each group."""
    table = i64_at(table_at)
    numel, block, inner, groups = load(table, NUMEL), load(table, BLOCK), load(table, INNER), load(table, GROUPS)
    scratch, z, counts, units = f32_scratch(block), f32_scratch(block), u32_scratch(block), u32_scratch(block)
    for part in range(start, stop):
        for index in range(blocks * part // parts, blocks * (part + 1) // parts):
            first = index * block
            count = min(block, numel - first)
            affine(stage(source, load(table, KIND), first, count, scratch), first, count, offset, inverse, table, z)
            for side in range(2):
                _split(z, count, counts, units, np.float32(2 * side - 1))
                sums = advance(i64_at(sums_at), (2 * part + side) * 3 * groups)
                e = 0
                while e < count:
                    group, run = run_of(first + e, count - e, table)
                    if inner == 1:
                        _add_each(advance(counts, e), advance(units, e), run, group, groups, sums)
                    else:
                        _add_run(advance(counts, e), advance(units, e), run, group, groups, sums)
                    e += run


def moments(flat: Tensor, geometry: Geometry, offset: Tensor, inverse: Tensor) -> Tensor:
    table, threads = grid_table(geometry, flat.dtype, NEAREST), torch.get_num_threads()
    sums = np.zeros((parts_of(geometry, threads), COLUMNS, geometry.groups), dtype=np.int64)
    offset, inverse = offset.contiguous(), inverse.contiguous()  # in names, so that their memory lives on
    pointers = flat.data_ptr(), offset.data_ptr(), inverse.data_ptr(), sums.ctypes.data
    share(
        add_moments,
        (*pointers, table.address, table.blocks, len(sums)),
        len(sums),
        -(-geometry.numel // len(sums)),
        threads,
    )
    return torch.from_numpy(sums.sum(0).T)
