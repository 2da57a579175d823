"""Kernel that quantizes to the levels of a grid; `kernel_ops.quantize_grid`'s bytes. Offsets and factors may lack."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.floats import stage
from brevact.cpu_kernels.groups import (
    BIT_WIDTH,
    BLOCK,
    INNER,
    KIND,
    NEAREST,
    NUMEL,
    ROUNDING,
    STOCHASTIC,
    count_missing,
    is_finite,
    is_flagged,
    run_of,
)
from brevact.cpu_kernels.levels import place
from brevact.cpu_kernels.memory import (
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
from brevact.cpu_kernels.philox import halves_of
from brevact.cpu_kernels.rounding import write_codes
from brevact.cpu_kernels.tables import affine_rows, grid_table
from brevact.cpu_kernels.teams import share
from brevact.geometry import Geometry, Grid


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
    affine = affine_rows(grid.offset, grid.inverse)  # in a name, so that its memory lives on
    addresses = (0, 0) if affine is None else (affine[0].data_ptr(), affine[1].data_ptr())
    table = grid_table(geometry, flat.dtype, STOCHASTIC if stochastic else NEAREST)
    row, key = (levels.data_ptr(), steps.data_ptr(), levels.shape[1]), 0 if seed is None else int(seed)
    arguments = (flat.data_ptr(), codes.data_ptr(), *addresses, *row, grid.marks, key, table.address)
    share(quantize_grid_blocks, arguments, table.blocks, geometry.block_size, torch.get_num_threads())
