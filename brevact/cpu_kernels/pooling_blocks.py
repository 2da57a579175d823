"""Kernels of block means and residuals: `kernel_ops.split_maps` and `kernel_ops.join_maps`, to the same bits.

The work is cut into tiles: the rows of one line of blocks, over so many columns that their sums fit into scratch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.floats import KINDS, emit, emit_product, float_to_half, half_to_float, limit_of, stage
from brevact.cpu_kernels.groups import count_missing, has_zero, is_finite
from brevact.cpu_kernels.map_tables import (
    BLOCK_DEPTH,
    BLOCK_HEIGHT,
    BLOCK_WIDTH,
    DEPTH,
    HEIGHT,
    ROWS,
    TILE,
    WIDTH,
    map_table,
)
from brevact.cpu_kernels.memory import (
    LARGEST_BLOCK,
    advance,
    f32_at,
    f32_scratch,
    i64_at,
    inlined,
    kernel,
    load,
    store,
    u16_at,
)
from brevact.cpu_kernels.teams import share
from brevact.geometry import MapBlocks

LANES = 8
"""Elements that a loop takes at once: blocks and maps are small, and mostly of this width."""

_LARGEST_MEAN = np.float32(65504.0)


@inlined
def _place(index, table):
    """Where a tile lies: (first element, rows in depth, rows in height, columns, first block).

    A tile's rows begin `width` elements apart in height and `height * width` in depth.
    """
    height, width, tile = load(table, HEIGHT), load(table, WIDTH), load(table, TILE)
    block_depth, block_height = load(table, BLOCK_DEPTH), load(table, BLOCK_HEIGHT)
    tiles = (width + tile - 1) // tile
    slab, column = index // tiles, index % tiles * tile
    lines = (height + block_height - 1) // block_height
    layer, j = slab // lines, slab % lines * block_height
    layers = (load(table, DEPTH) + block_depth - 1) // block_depth
    item, i = layer // layers, layer % layers * block_depth
    first = ((item * load(table, DEPTH) + i) * height + j) * width + column
    block_width = load(table, BLOCK_WIDTH)
    first_block = slab * ((width + block_width - 1) // block_width) + column // block_width
    depth = min(block_depth, load(table, DEPTH) - i)
    return first, depth, min(block_height, height - j), min(tile, width - column), first_block


@inlined
def _fill(x, count, value):
    """Write a value `count` times; LANES is a number that the compiler knows."""
    if count == LANES:
        for k in range(LANES):
            store(x, k, value)
    else:
        for k in range(count):
            store(x, k, value)


@inlined
def _repeat(means, columns, rows, block_width):
    """Repeat a row of means, so that it covers `rows` rows."""
    if columns <= block_width:
        mean = load(means, 0)
        for k in range(columns * rows):
            store(means, k, mean)
    else:
        for k in range(columns, columns * rows):
            store(means, k, load(means, k - columns))


@inlined
def _add(sums, x, count):
    """sums += x."""
    whole = count // LANES * LANES
    for start in range(0, whole, LANES):
        a, b = advance(sums, start), advance(x, start)
        for k in range(LANES):
            store(a, k, load(a, k) + load(b, k))
    for k in range(whole, count):
        store(sums, k, load(sums, k) + load(x, k))


@inlined
def _subtract(x, means, out, count, lanes):
    """out = x - means. By way of scratch, which overlaps nothing, so that the compiler takes LANES elements at once."""
    whole = count // LANES * LANES
    for start in range(0, whole, LANES):
        a, b, c = advance(x, start), advance(means, start), advance(out, start)
        for k in range(LANES):
            store(lanes, k, load(a, k) - load(b, k))
        for k in range(LANES):
            store(c, k, load(lanes, k))
    for k in range(whole, count):
        store(out, k, load(x, k) - load(means, k))


@inlined
def _sum(x, means, values, count, limit):
    """values = clamp(means + x), in scratch."""
    for k in range(count):
        y = load(means, k) + load(x, k)
        y = limit if y > limit else y
        store(values, k, -limit if y < -limit else y)


@inlined
def _total(x, count):
    """Sum of values, one after the other."""
    total = np.float32(0.0)
    if count == LANES:
        for k in range(LANES):
            total += load(x, k)
    else:
        for k in range(count):
            total += load(x, k)
    return total


@inlined
def _half_mean(total, count):
    """float16 bits of a mean; NaN gives 0, and large means the largest float16."""
    mean = total / count
    mean = mean if mean == mean else np.float32(0.0)
    return float_to_half(max(min(mean, _LARGEST_MEAN), -_LARGEST_MEAN))


@inlined
def _means(sums, rows, columns, block_width, low, totals):
    """Write the means of a line of blocks, and replace the sums of columns by them."""
    whole = columns // block_width
    for block in range(whole):
        store(totals, block, _total(advance(sums, block * block_width), block_width))
    count = np.float32(rows * block_width)
    for block in range(whole):
        store(low, block, _half_mean(load(totals, block), count))
    tail = columns - whole * block_width
    if tail:
        total = _total(advance(sums, whole * block_width), tail)
        store(low, whole, _half_mean(total, np.float32(rows * tail)))
    _widen(low, columns, block_width, sums)


@inlined
def _widen(low, columns, block_width, means):
    """A row of means as float32, 0 for NaN."""
    block = 0
    for k in range(0, columns, max(block_width, 1)):
        mean = half_to_float(load(low, block))
        mean = mean if mean == mean else np.float32(0.0)
        _fill(advance(means, k), min(block_width, columns - k), mean)
        block += 1


@inlined
def _clear(x, columns, block_width, low):
    """0 for the mean of each block that holds a 0 in this row."""
    for k in range(columns):
        if load(x, k) == np.float32(0.0):
            store(low, k // block_width, np.uint16(0))


@inlined
def _mark(x, columns, block_width, low):
    """NaN for the mean of each block that holds NaN or an infinity in this row."""
    for k in range(columns):
        if not is_finite(load(x, k)):
            store(low, k // block_width, np.uint16(0x7E00))


@kernel
def split_maps_tiles(source, kind, low_at, residual_at, table_at, start, stop):
    """Write float16 means and the float32 residual of tiles start to stop of elements that lie map by map."""
    table = i64_at(table_at)
    width, plane = load(table, WIDTH), load(table, HEIGHT) * load(table, WIDTH)
    low, residual = u16_at(low_at), f32_at(residual_at)
    most = max(load(table, TILE), load(table, ROWS) * width)
    sums, scratch, lanes = f32_scratch(most), f32_scratch(most), f32_scratch(LANES)
    for index in range(start, stop):
        first, depth, height, columns, first_block = _place(index, table)
        rows = min(load(table, ROWS), height)
        for k in range(columns):
            store(sums, k, np.float32(0.0))
        zero = False
        for i in range(depth):
            for j in range(0, height, max(rows, 1)):
                at = first + i * plane + j * width
                x = stage(source, kind, at, rows * columns, scratch)
                zero = has_zero(x, rows * columns) or zero
                for row in range(rows):
                    _add(sums, advance(x, row * columns), columns)
        overflow = count_missing(sums, columns) != np.int32(0)
        _means(sums, depth * height, columns, load(table, BLOCK_WIDTH), advance(low, first_block), scratch)
        for marks, is_wanted in ((False, zero), (True, overflow)):  # the latter also where something is not finite
            for i in range(depth if is_wanted else 0):
                for j in range(height):
                    x = stage(source, kind, first + i * plane + j * width, columns, scratch)
                    if marks:
                        _mark(x, columns, load(table, BLOCK_WIDTH), advance(low, first_block))
                    else:
                        _clear(x, columns, load(table, BLOCK_WIDTH), advance(low, first_block))
        if zero or overflow:
            _widen(advance(low, first_block), columns, load(table, BLOCK_WIDTH), sums)
        _repeat(sums, columns, rows, load(table, BLOCK_WIDTH))
        for i in range(depth):
            for j in range(0, height, max(rows, 1)):
                at = first + i * plane + j * width
                x = stage(source, kind, at, rows * columns, scratch)
                _subtract(x, sums, advance(residual, at), rows * columns, lanes)


@kernel
def join_maps_tiles(residual_at, low_at, other, target, kind, table_at, start, stop):
    """Add float16 means to the float32 residual in tiles start to stop, and multiply.

    The factor, 0 for none, has the kind of the target, which may be the residual or the factor itself.
    """
    table = i64_at(table_at)
    width, plane = load(table, WIDTH), load(table, HEIGHT) * load(table, WIDTH)
    block_width = load(table, BLOCK_WIDTH)
    low, residual = u16_at(low_at), f32_at(residual_at)
    limit = limit_of(kind)
    most = max(load(table, TILE), load(table, ROWS) * width)
    means, values = f32_scratch(most), f32_scratch(most)
    for index in range(start, stop):
        first, depth, height, columns, block = _place(index, table)
        _widen(advance(low, block), columns, block_width, means)
        rows = min(load(table, ROWS), height)
        _repeat(means, columns, rows, block_width)
        for i in range(depth):
            for j in range(0, height, max(rows, 1)):
                at = first + i * plane + j * width
                _sum(advance(residual, at), means, values, rows * columns, limit)
                if other:
                    emit_product(values, other, target, kind, at, rows * columns)
                else:
                    emit(values, target, kind, at, rows * columns)


def split_maps(flat: Tensor, blocks: MapBlocks, low: Tensor, residual: Tensor) -> None:
    """The kernel's scratch is limited."""
    if blocks.block[2] > LARGEST_BLOCK:
        return NotImplemented
    table = map_table(blocks)
    arguments = (flat.data_ptr(), KINDS[flat.dtype], low.data_ptr(), residual.data_ptr(), table.address)
    share(split_maps_tiles, arguments, table.tiles, table.tile_size, torch.get_num_threads())


def join_maps(residual: Tensor, blocks: MapBlocks, low: Tensor, other: Tensor | None, target: Tensor) -> None:
    """The kernel's scratch is limited."""
    if blocks.block[2] > LARGEST_BLOCK:
        return NotImplemented
    table, factor = map_table(blocks), 0 if other is None else other.data_ptr()
    pointers = residual.data_ptr(), low.data_ptr(), factor, target.data_ptr()
    arguments = (*pointers, KINDS[target.dtype], table.address)
    share(join_maps_tiles, arguments, table.tiles, table.tile_size, torch.get_num_threads())
