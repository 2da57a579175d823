"""Kernel that decodes from the levels of a grid; `kernel_ops.dequantize_grid`'s values. Offsets and scales may lack."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.floats import FLOAT32, emit, emit_product, limit_of, limited
from brevact.cpu_kernels.groups import BIT_WIDTH, BLOCK, GROUPS, INNER, KIND, NEAREST, NUMEL, is_flagged, run_of
from brevact.cpu_kernels.memory import (
    advance,
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
from brevact.cpu_kernels.planes import bytes_to_codes, bytes_to_words
from brevact.cpu_kernels.tables import affine_rows, grid_table
from brevact.cpu_kernels.teams import share
from brevact.geometry import Geometry, Grid


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
    affine = affine_rows(grid.offset, grid.scale)
    addresses = (0, 0) if affine is None else (affine[0].data_ptr(), affine[1].data_ptr())
    table, factor = grid_table(geometry, target.dtype, NEAREST), 0 if other is None else other.data_ptr()
    flagged = grid.scale is not None and bool(torch.signbit(grid.scale).any())
    row = levels.data_ptr(), levels.shape[1]
    arguments = (codes.data_ptr(), *addresses, *row, flagged, factor, target.data_ptr(), table.address)
    share(dequantize_grid_blocks, arguments, table.blocks, geometry.block_size, torch.get_num_threads())
