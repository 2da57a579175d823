"""Kernels of quantizers to levels of any spacing, which all groups share.

Bytes and values are those of `kernel_ops.quantize_grid` and `dequantize_grid`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.floats import FLOAT32, emit, emit_product, limit_of, limited, stage
from brevact.cpu_kernels.groups import (
    BIT_WIDTH,
    BLOCK,
    KIND,
    NEAREST,
    NUMEL,
    ROUNDING,
    STOCHASTIC,
    count_missing,
    grid_table,
    is_finite,
)
from brevact.cpu_kernels.memory import (
    advance,
    as_i32,
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
from brevact.cpu_kernels.packing import bytes_to_words
from brevact.cpu_kernels.rounding import halves_of, write_codes
from brevact.cpu_kernels.teams import share
from brevact.geometry import Geometry, Grid

_MOST_BLENDED = 8
"""Levels whose distances are all taken, which is faster than looking up each value's own."""


@inlined
def _number(row, k, size):
    """Number k of a row, and beyond its end NaN, which no value reaches."""
    return load(row, k) if k < size else np.float32(np.nan)


@inlined
def _count(z, count, row, size, q):
    """q = how many of the ascending numbers z reaches; none if it is NaN."""
    for e in range(count):
        store(q, e, np.int32(0))
    for k in range(0, size, 4):
        b0, b1, b2, b3 = load(row, k), _number(row, k + 1, size), _number(row, k + 2, size), _number(row, k + 3, size)
        for e in range(count):
            v = load(z, e)
            low, high = np.int32(v >= b0) + np.int32(v >= b1), np.int32(v >= b2) + np.int32(v >= b3)
            store(q, e, np.int32(load(q, e) + np.int32(low + high)))


@inlined
def _clip(fraction):
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
def _mark(x, count, top, t):
    """The last position where an element is not finite."""
    if count_missing(x, count) == np.int32(0):
        return
    for e in range(count):
        store(t, e, load(t, e) if is_finite(load(x, e)) else top)


@kernel
def quantize_grid_blocks(source, codes, levels, steps, size, marks, seed, table_at, start, stop):
    """There are `size` levels, and one less of `Grid.steps`."""
    table = i64_at(table_at)
    numel, bit_width, block = load(table, NUMEL), load(table, BIT_WIDTH), load(table, BLOCK)
    stochastic = load(table, ROUNDING) == STOCHASTIC
    k = halves_of(seed)
    top = (np.int64(1) << bit_width) - 1
    t, fractions, scratch = f32_scratch(block), f32_scratch(block), f32_scratch(block)
    columns = block // 8
    random = u32_scratch(columns), u32_scratch(columns), u32_scratch(columns), u32_scratch(columns)
    joined = u32_scratch(columns), u32_scratch(columns)
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        z = stage(source, load(table, KIND), first, count, scratch)
        place(z, count, f32_at(levels), f32_at(steps), size, stochastic, t, fractions)
        if marks:
            _mark(z, count, np.float32(top), t)
        write_codes(t, first, count, bit_width, stochastic, k, random, joined, u8_at(codes))


def quantize_grid(flat: Tensor, geometry: Geometry, grid: Grid, seed: int | Tensor | None, codes: Tensor) -> None:
    if grid.levels.shape[0] > 1 or geometry.bit_width > 8:
        return NotImplemented
    stochastic = seed is not None
    levels, steps = grid.levels.contiguous(), grid.steps(stochastic=stochastic).contiguous()
    table = grid_table(geometry, flat.dtype, STOCHASTIC if stochastic else NEAREST)
    row, key = (levels.data_ptr(), steps.data_ptr(), levels.shape[1]), 0 if seed is None else int(seed)
    arguments = (flat.data_ptr(), codes.data_ptr(), *row, grid.marks, key, table.address)
    share(quantize_grid_blocks, arguments, table.blocks, geometry.block_size, torch.get_num_threads())


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
def dequantize_grid_blocks(codes, levels, size, other, target, table_at, start, stop):
    """Codes have at most 8 bits; from `size` on, they have the last level."""
    table = i64_at(table_at)
    numel, bit_width, block, kind = load(table, NUMEL), load(table, BIT_WIDTH), load(table, BLOCK), load(table, KIND)
    limit, entries = limit_of(kind), np.int64(1) << bit_width
    scratch, row = f32_scratch(block), f32_scratch(entries)
    low, high = u32_scratch(block // 8), u32_scratch(block // 8)
    for k in range(entries):
        store(row, k, limited(load(f32_at(levels), min(k, size - 1)), limit))
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        columns = (count + 7) // 8
        packed = advance(u8_at(codes), first // 8 * bit_width)
        direct = kind == FLOAT32 and other == 0 and count == 8 * columns
        values = advance(f32_at(target), first) if direct else scratch
        _decode_planes(packed, columns, bit_width, row, low, high, values)
        if other:
            emit_product(values, other, target, kind, first, count)
        elif not direct:
            emit(values, target, kind, first, count)


def dequantize_grid(codes: Tensor, geometry: Geometry, grid: Grid, other: Tensor | None, target: Tensor) -> None:
    if grid.levels.shape[0] > 1 or geometry.bit_width > 8:
        return NotImplemented
    levels = grid.levels.contiguous()
    table, factor = grid_table(geometry, target.dtype, NEAREST), 0 if other is None else other.data_ptr()
    arguments = (codes.data_ptr(), levels.data_ptr(), levels.shape[1], factor, target.data_ptr(), table.address)
    share(dequantize_grid_blocks, arguments, table.blocks, geometry.block_size, torch.get_num_threads())
