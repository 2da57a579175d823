"""Groups of elements that share metadata: the table of a tensor, ranges, and stored minima and scales.

Kernels take integers only: addresses, counts, and the address of an int64 table with the fields below, so that each is
compiled once for all types and widths.
"""

from __future__ import annotations

import numpy as np

from brevact.cpu_kernels.floats import FLOAT32, bfloat16_to_float, stage
from brevact.cpu_kernels.memory import (
    advance,
    as_i32,
    bits_of,
    f32_at,
    f32_scratch,
    float_of,
    i32_at,
    i64_at,
    inlined,
    kernel,
    load,
    store,
    u16_at,
)

NUMEL, BIT_WIDTH, BLOCK, INNER, GROUPS, FUSED, STOCHASTIC, SCALE_KIND, MINIMUM_KIND, KIND, ROWS = range(11)
"""Fields of the table. FUSED: every group is one run inside one block. ROWS: address of int64 indices, or 0 for a whole
tensor: the elements are some groups of a tensor, its rows, group g being row ROWS[g] of INNER elements there."""

LOWEST_KEY, HIGHEST_KEY = np.int32(-(2**31)), np.int32(2**31 - 1)
_MINUS_INFINITY_KEY, _INFINITY_KEY = np.int32(-0x7F800001), np.int32(0x7F800000)
_SMALLEST_SCALE = np.float32(2.0**-126)


@inlined
def key_of(bits):
    """Float bits to an integer of the same order, and back. NaNs lie beyond the infinities."""
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inlined
def extend(x, count, low, high):
    """Widen a range of keys by `count` values."""
    bits = as_i32(x)
    for e in range(count):
        key = key_of(load(bits, e))
        low, high = min(low, key), max(high, key)
    return low, high


@inlined
def read_metadata(address, kind, index):
    """A metadata value as float32."""
    if kind == FLOAT32:
        return load(f32_at(address), index)
    return bfloat16_to_float(load(u16_at(address), index))


@inlined
def _write(address, kind, index, value):
    """Store a metadata value that its type holds exactly."""
    if kind == FLOAT32:
        store(f32_at(address), index, value)
    else:
        store(u16_at(address), index, np.uint16(np.uint32(bits_of(value)) >> np.uint32(16)))


@inlined
def calibrate(low, high, group, scale, minimum, table):
    """Store minimum and scale of a group with this range of keys. Returns (minimum, inverse scale)."""
    m, s = np.float32(np.nan), np.float32(np.nan)
    levels = np.float32((np.int64(1) << load(table, BIT_WIDTH)) - 1)
    if low > _MINUS_INFINITY_KEY and high < _INFINITY_KEY:
        bottom, top = float_of(key_of(low)) + np.float32(0.0), float_of(key_of(high))
        if load(table, MINIMUM_KIND) != FLOAT32:
            bits = bits_of(bottom)
            up = np.int32(0xFFFF) if bits < 0 else np.int32(0)
            bottom = float_of(np.int32(np.int32(bits + up) & np.int32(-65536)))
        width = top - bottom
        step = width / levels
        if load(table, SCALE_KIND) != FLOAT32:
            step = float_of(np.int32(np.int32(bits_of(step) + np.int32(0xFFFF)) & np.int32(-65536)))
        step = max(step, _SMALLEST_SCALE) if width > np.float32(0.0) else np.float32(0.0)
        if abs(step * levels) < np.float32(np.inf):
            m, s = bottom, step
    _write(minimum, load(table, MINIMUM_KIND), group, m)
    _write(scale, load(table, SCALE_KIND), group, s)
    return m, inverse_of(s)


@inlined
def inverse_of(scale):
    return np.float32(1.0) / scale if scale > np.float32(0.0) else np.float32(0.0)


@inlined
def place_of(element, table):
    """Where an element of the rows lies in the tensor that holds them."""
    rows, inner = load(table, ROWS), load(table, INNER)
    return load(i64_at(rows), element // inner) * inner + element % inner if rows else element


@inlined
def in_one_run(first, count, table):
    """Whether elements first to first + count lie behind each other."""
    inner = load(table, INNER)
    return load(table, ROWS) == 0 or first % inner + count <= inner


@inlined
def stage_rows(source, first, count, scratch, table):
    """Elements first to first + count of the rows as float32; see `floats.stage`.

    Args:
        source: Address of the tensor that holds the rows.
        first: First element.
        count: Number of elements.
        scratch: float32 pointer, used unless the elements are float32 and lie behind each other.
        table: The table of the rows.

    Returns:
        float32 pointer to the elements.
    """
    kind, inner = load(table, KIND), load(table, INNER)
    if in_one_run(first, count, table):
        return stage(source, kind, place_of(first, table), count, scratch)
    e = 0
    while e < count:
        run = min(inner - (first + e) % inner, count - e)
        to = advance(scratch, e)
        x = stage(source, kind, place_of(first + e, table), run, to)
        if kind == FLOAT32:
            for i in range(run):
                store(to, i, load(x, i))
        e += run
    return scratch


@inlined
def _extend_ranges(source, lows, highs, table, start, stop, scratch):
    """Widen the key ranges of all groups by the elements of blocks start to stop."""
    numel, block, inner, groups = load(table, NUMEL), load(table, BLOCK), load(table, INNER), load(table, GROUPS)
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        x = stage_rows(source, first, count, scratch, table)
        e = 0
        while e < count:
            group = (first + e) // inner % groups
            if inner == 1:
                run = min(groups - group, count - e)
                bits, low, high = as_i32(advance(x, e)), advance(lows, group), advance(highs, group)
                for g in range(run):
                    store(low, g, min(load(low, g), key_of(load(bits, g))))
                    store(high, g, max(load(high, g), key_of(load(bits, g))))
            else:
                run = min(inner - (first + e) % inner, count - e)
                low_key, high_key = extend(advance(x, e), run, load(lows, group), load(highs, group))
                store(lows, group, low_key)
                store(highs, group, high_key)
            e += run


@kernel
def extend_ranges(source, keys_at, table_at, blocks, parts, start, stop):
    """Widen the key ranges of parts start to stop by the elements of each part.

    Args:
        source: Address of the elements.
        keys_at: Address of int32 keys: for each part the lowest of every group, then the highest.
        table_at: Address of the table.
        blocks: Number of blocks.
        parts: Number of parts, each a run of blocks.
        start: First part.
        stop: One past the last part.
    """
    table = i64_at(table_at)
    scratch = f32_scratch(load(table, BLOCK))
    for part in range(start, stop):
        lows = advance(i32_at(keys_at), 2 * part * load(table, GROUPS))
        highs = advance(lows, load(table, GROUPS))
        first, last = blocks * part // parts, blocks * (part + 1) // parts
        _extend_ranges(source, lows, highs, table, first, last, scratch)


@kernel
def calibrate_groups(keys_at, parts, scale, minimum, table_at):
    """Join the key ranges that parts of the tensor gave, and store minimum and scale of every group.

    Args:
        keys_at: Address of `parts` times the keys of `extend_ranges`.
        parts: Number of parts.
        scale: Address of the scales.
        minimum: Address of the minima.
        table_at: Address of the table.
    """
    table = i64_at(table_at)
    groups = load(table, GROUPS)
    keys = i32_at(keys_at)
    for group in range(groups):
        low, high = HIGHEST_KEY, LOWEST_KEY
        for part in range(parts):
            low = min(low, load(keys, 2 * part * groups + group))
            high = max(high, load(keys, (2 * part + 1) * groups + group))
        calibrate(low, high, group, scale, minimum, table)
