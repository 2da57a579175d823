"""Ranges of groups that lie in many blocks: `kernel_ops.ranges`, and the first pass of such groups' quantization."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.groups import (
    BLOCK,
    GROUPS,
    HIGHEST_KEY,
    INFINITY_KEY,
    INNER,
    LOWEST_KEY,
    MINUS_INFINITY_KEY,
    NEAREST,
    NUMEL,
    count_missing,
    extend,
    extend_finite,
    has_zero,
    key_of,
    run_of,
    stage_rows,
)
from brevact.cpu_kernels.memory import advance, as_i32, f32_scratch, i32_at, i64_at, inlined, kernel, load, store
from brevact.cpu_kernels.tables import GroupTable, grid_table
from brevact.cpu_kernels.teams import share
from brevact.geometry import Geometry, ranges_of_keys


@inlined
def _extend(x, first, count, lows, highs, missing, finite, table):
    inner = load(table, INNER)
    e = 0
    while e < count:
        group, run = run_of(first + e, count - e, table)
        low, high = advance(lows, group), advance(highs, group)
        if inner == 1 and not finite:
            bits = as_i32(advance(x, e))
            for g in range(run):
                store(low, g, min(load(low, g), key_of(load(bits, g))))
                store(high, g, max(load(high, g), key_of(load(bits, g))))
        else:
            run = 1 if inner == 1 else run
            if finite:
                low_key, high_key = extend_finite(advance(x, e), run, load(low, 0), load(high, 0))
                store(missing, group, np.int32(load(missing, group) + count_missing(advance(x, e), run)))
            else:
                low_key, high_key = extend(advance(x, e), run, load(low, 0), load(high, 0))
            store(low, 0, low_key)
            store(high, 0, high_key)
        e += run


@inlined
def _mark_zeros(x, first, count, zeros, table):
    e = 0
    while e < count:
        group, run = run_of(first + e, count - e, table)
        zero = advance(zeros, group)
        if load(table, INNER) == 1:
            for g in range(run):
                store(zero, g, np.int32(load(zero, g) | np.int32(load(x, e + g) == np.float32(0.0))))
        else:
            store(zero, 0, np.int32(load(zero, 0) | np.int32(has_zero(advance(x, e), run))))
        e += run


@kernel
def extend_ranges(source, keys_at, finite, table_at, blocks, parts, start, stop):
    """`keys_at`: for each part int32 rows of lowest and highest keys, elements left out if `finite`, marks of zeros."""
    table = i64_at(table_at)
    numel, block, groups = load(table, NUMEL), load(table, BLOCK), load(table, GROUPS)
    scratch = f32_scratch(block)
    for part in range(start, stop):
        lows = advance(i32_at(keys_at), 4 * part * groups)
        highs, missing, marks = advance(lows, groups), advance(lows, 2 * groups), advance(lows, 3 * groups)
        for index in range(blocks * part // parts, blocks * (part + 1) // parts):
            first = index * block
            count = min(block, numel - first)
            x = stage_rows(source, first, count, scratch, table)
            _extend(x, first, count, lows, highs, missing, finite, table)
            if has_zero(x, count):
                _mark_zeros(x, first, count, marks, table)


def ranges(flat: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    table = grid_table(geometry, flat.dtype, NEAREST)
    keys = range_keys(flat.data_ptr(), table, torch.get_num_threads())
    return ranges_of_keys(torch.from_numpy(keys))


def range_keys(source: int, table: GroupTable, threads: int) -> np.ndarray:
    """(parts, 4, G) int32 rows of `extend_ranges`, of finite values; a second pass only where others are found."""
    geometry = table.geometry
    parts = parts_of(geometry, threads)
    keys = np.empty((parts, 4, geometry.groups), dtype=np.int32)
    for finite in (0, 1):
        keys[:, 0], keys[:, 1], keys[:, 2:] = HIGHEST_KEY, LOWEST_KEY, 0
        arguments = (source, keys.ctypes.data, finite, table.address, table.blocks, parts)
        share(extend_ranges, arguments, parts, -(-geometry.numel // parts), threads)
        if (keys[:, 0] > MINUS_INFINITY_KEY).all() and (keys[:, 1] < INFINITY_KEY).all():
            break
    return keys


def parts_of(geometry: Geometry, threads: int) -> int:
    """Parts of a tensor that threads reduce on their own; their results stay small beside the tensor."""
    most = max(geometry.numel // (8 * geometry.groups), 1) if geometry.groups else 1
    return max(min(threads, most, geometry.numel // (1 << 16)), 1)
