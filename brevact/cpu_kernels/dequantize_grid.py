"""Kernel that decodes from the levels of a grid; `kernel_ops.dequantize_grid`'s values. Offsets and scales may lack."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.floats import FLOAT32, emit, emit_product, limit_of, limited
from brevact.cpu_kernels.groups import BIT_WIDTH, BLOCK, GROUPS, INNER, KIND, NEAREST, NUMEL, is_flagged
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
    """Decode blocks start to stop, and multiply by `other`, if its address is not 0.

    There are `rows` rows of `size` levels: 1, or one a group. `scale` is 0 where there is none, and then `offset`, too;
    `flagged` is 1 if a scale has its sign bit set.
    """
    table = i64_at(table_at)
    numel, bit_width, block, kind = load(table, NUMEL), load(table, BIT_WIDTH), load(table, BLOCK), load(table, KIND)
    inner, groups = load(table, INNER), load(table, GROUPS)
    if scale == 0 and rows == 1:
        inner, groups = numel, 1
    limit, entries = limit_of(kind), np.int64(1) << bit_width
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


def dequantize_grid(codes: Tensor, geometry: Geometry, grid: Grid, other: Tensor | None, target: Tensor) -> None:
    """See the reference."""
    levels = grid.levels.contiguous()
    affine = affine_rows(grid.offset, grid.scale)
    addresses = (0, 0) if affine is None else (affine[0].data_ptr(), affine[1].data_ptr())
    table, factor = grid_table(geometry, target.dtype, NEAREST), 0 if other is None else other.data_ptr()
    flagged = grid.scale is not None and bool(torch.signbit(grid.scale).any())
    rows = levels.data_ptr(), levels.shape[1], levels.shape[0]
    arguments = (codes.data_ptr(), *addresses, *rows, flagged, factor, target.data_ptr(), table.address)
    share(dequantize_grid_blocks, arguments, table.blocks, geometry.block_size, torch.get_num_threads())
