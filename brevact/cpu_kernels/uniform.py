"""Kernels of the uniform quantizer: `brevact.quantizers.reference`, block by block, with the same bytes.

All arguments are integers: addresses, counts, and the address of an int64 table with the fields below, so that each
kernel is compiled once for all types and widths.
"""

from __future__ import annotations

import numpy as np

from brevact.cpu_kernels.floats import FLOAT32, bfloat16_to_float, emit, emit_product, stage
from brevact.cpu_kernels.memory import (
    advance,
    as_i32,
    bits_of,
    f32_at,
    f32_block,
    float_of,
    i32_at,
    i64_at,
    inlined,
    kernel,
    load,
    rint,
    store,
    u8_at,
    u16_at,
    u32_block,
    u32_columns,
)
from brevact.cpu_kernels.philox import column_words
from brevact.cpu_kernels.planes import bytes_to_codes, bytes_to_words, codes_to_bytes, words_to_bytes

NUMEL, BIT_WIDTH, BLOCK, INNER, GROUPS, FUSED, STOCHASTIC, SCALE_KIND, MINIMUM_KIND, KIND = range(10)
"""Fields of the table. FUSED: every group is one run inside one block."""

_LOWEST_KEY, _HIGHEST_KEY = np.int32(-(2**31)), np.int32(2**31 - 1)
_MINUS_INFINITY_KEY, _INFINITY_KEY = np.int32(-0x7F800001), np.int32(0x7F800000)
_SMALLEST_SCALE = np.float32(2.0**-126)
_LIMITS = (3.4028234663852886e38, 3.3895313892515355e38, 65504.0, 3.4028234663852886e38)  # by type code


@inlined
def _key(bits):
    """Float bits to an integer of the same order, and back. NaNs lie beyond the infinities."""
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inlined
def _extend(x, count, low, high):
    """Widen a range of keys by `count` values."""
    bits = as_i32(x)
    for e in range(count):
        key = _key(load(bits, e))
        low, high = min(low, key), max(high, key)
    return low, high


@inlined
def _read(address, kind, index):
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
def _calibrate(low, high, group, scale, minimum, table):
    """Store minimum and scale of a group with this range of keys. Returns (minimum, inverse scale)."""
    m, s = np.float32(np.nan), np.float32(np.nan)
    levels = np.float32((np.int64(1) << load(table, BIT_WIDTH)) - 1)
    if low > _MINUS_INFINITY_KEY and high < _INFINITY_KEY:
        bottom, top = float_of(_key(low)) + np.float32(0.0), float_of(_key(high))
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
    return m, _inverse(s)


@inlined
def _inverse(scale):
    return np.float32(1.0) / scale if scale > np.float32(0.0) else np.float32(0.0)


@inlined
def _to_steps(x, count, m, inverse, levels, steps):
    """Positions on the grid, t = clip((x - m) / s), of elements of one group; zeros if the inverse is 0."""
    if inverse > np.float32(0.0):
        for e in range(count):
            t = (load(x, e) - m) * inverse
            store(steps, e, t if t < levels else levels)
    else:
        for e in range(count):
            store(steps, e, np.float32(0.0))


@inlined
def _steps_of_segments(x, first, count, scale, minimum, table, steps):
    """Positions on the grid of elements first to first + count, with the stored metadata of their groups."""
    inner, groups = load(table, INNER), load(table, GROUPS)
    scale_kind, minimum_kind = load(table, SCALE_KIND), load(table, MINIMUM_KIND)
    levels = np.float32((np.int64(1) << load(table, BIT_WIDTH)) - 1)
    e = 0
    while e < count:
        group = (first + e) // inner % groups
        if inner == 1:
            run = min(groups - group, count - e)
            for g in range(run):
                inverse = _inverse(_read(scale, scale_kind, group + g))
                t = (load(x, e + g) - _read(minimum, minimum_kind, group + g)) * inverse
                t = t if t < levels else levels
                store(steps, e + g, t if inverse > np.float32(0.0) else np.float32(0.0))
        else:
            run = min(inner - (first + e) % inner, count - e)
            inverse = _inverse(_read(scale, scale_kind, group))
            m = _read(minimum, minimum_kind, group)
            _to_steps(advance(x, e), run, m, inverse, levels, advance(steps, e))
        e += run


@inlined
def _nearest(t):
    return np.uint32(np.int32(rint(t)))


@inlined
def _stochastic(t, bits):
    """floor(t) + ((rint(65536 frac(t)) + bits) >> 16) in one piece: 65536 t is exact, and rint keeps its even part."""
    return np.uint32(np.uint32(np.uint32(np.int32(rint(t * np.float32(65536.0)))) + bits) >> np.uint32(16))


@inlined
def _low_half(word):
    return np.uint32(word & np.uint32(0xFFFF))


@inlined
def _high_half(word):
    return np.uint32(word >> np.uint32(16))


@inlined
def _join(q0, q1, q2, q3, bit_width):
    b1, b2, b3 = np.uint32(bit_width), np.uint32(2 * bit_width), np.uint32(3 * bit_width)
    return np.uint32(np.uint32(q0 | np.uint32(q1 << b1)) | np.uint32(np.uint32(q2 << b2) | np.uint32(q3 << b3)))


@inlined
def _round_narrow(t, columns, bit_width, stochastic, w0, w1, w2, w3, low, high):
    """Round positions to codes of less than 8 bits and join the codes 0 to 3 and 4 to 7 of each column."""
    t4 = advance(t, 4 * columns)
    for half, out in ((0, low), (1, high)):
        th = t4 if half else t
        t1, t2, t3 = advance(th, columns), advance(th, 2 * columns), advance(th, 3 * columns)
        if not stochastic:
            for j in range(columns):
                q0, q1, q2, q3 = (
                    _nearest(load(th, j)),
                    _nearest(load(t1, j)),
                    _nearest(load(t2, j)),
                    _nearest(load(t3, j)),
                )
                store(out, j, _join(q0, q1, q2, q3, bit_width))
        elif half:
            for j in range(columns):
                q0 = _stochastic(load(th, j), _high_half(load(w0, j)))
                q1 = _stochastic(load(t1, j), _high_half(load(w1, j)))
                q2 = _stochastic(load(t2, j), _high_half(load(w2, j)))
                q3 = _stochastic(load(t3, j), _high_half(load(w3, j)))
                store(out, j, _join(q0, q1, q2, q3, bit_width))
        else:
            for j in range(columns):
                q0 = _stochastic(load(th, j), _low_half(load(w0, j)))
                q1 = _stochastic(load(t1, j), _low_half(load(w1, j)))
                q2 = _stochastic(load(t2, j), _low_half(load(w2, j)))
                q3 = _stochastic(load(t3, j), _low_half(load(w3, j)))
                store(out, j, _join(q0, q1, q2, q3, bit_width))


@inlined
def _round_wide(t, columns, top, stochastic, w0, w1, w2, w3, codes):
    """Round positions to separate codes of at least 8 bits, of at most `top`."""
    for i in range(8):
        word = w0 if i & 3 == 0 else w1 if i & 3 == 1 else w2 if i & 3 == 2 else w3
        shift = np.uint32(16 * (i >> 2))
        plane, out = advance(t, i * columns), advance(codes, i * columns)
        if not stochastic:
            for j in range(columns):
                store(out, j, _nearest(load(plane, j)))
        elif top < 1 << 15:
            for j in range(columns):
                store(out, j, _stochastic(load(plane, j), _low_half(np.uint32(load(word, j) >> shift))))
        else:  # 65536 t does not fit 32 bits
            for j in range(columns):
                floor = np.float32(np.floor(load(plane, j)))
                threshold = np.int64(rint((load(plane, j) - floor) * np.float32(65536.0)))
                code = np.int64(floor) + ((threshold + _low_half(np.uint32(load(word, j) >> shift))) >> 16)
                store(out, j, np.uint32(min(code, top)))


@kernel
def quantize_blocks(source, codes, scale, minimum, seed, table_at, start, stop):
    """Quantize blocks start to stop. Groups that are not inside blocks must have been calibrated.

    Args:
        source: Address of the elements.
        codes: Address of the packed codes.
        scale: Address of the scales.
        minimum: Address of the minima.
        seed: Key of the random bits.
        table_at: Address of the table.
        start: First block.
        stop: One past the last block.
    """
    table = i64_at(table_at)
    numel, bit_width, block, inner = load(table, NUMEL), load(table, BIT_WIDTH), load(table, BLOCK), load(table, INNER)
    fused, stochastic = load(table, FUSED) != 0, load(table, STOCHASTIC) != 0
    k0, k1 = np.uint64(seed) & np.uint64(0xFFFFFFFF), np.uint64(seed) >> np.uint64(32)
    top = (np.int64(1) << bit_width) - 1
    steps, scratch, wide = f32_block(), f32_block(), u32_block()
    w0, w1, w2, w3 = u32_columns(), u32_columns(), u32_columns(), u32_columns()
    low, high = u32_columns(), u32_columns()
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        columns = (count + 7) // 8
        x = stage(source, load(table, KIND), first, count, scratch)
        if fused:
            e = 0
            while e < count:
                run = min(inner, count - e)
                low_key, high_key = _extend(advance(x, e), run, _HIGHEST_KEY, _LOWEST_KEY)
                m, inverse = _calibrate(low_key, high_key, (first + e) // inner, scale, minimum, table)
                _to_steps(advance(x, e), run, m, inverse, np.float32(top), advance(steps, e))
                e += run
        else:
            _steps_of_segments(x, first, count, scale, minimum, table, steps)
        for e in range(count, 8 * columns):
            store(steps, e, np.float32(0.0))
        if stochastic:
            column_words(first // 8, columns, k0, k1, w0, w1, w2, w3)
        out = advance(u8_at(codes), first // 8 * bit_width)
        if bit_width < 8:
            _round_narrow(steps, columns, bit_width, stochastic, w0, w1, w2, w3, low, high)
            words_to_bytes(low, high, columns, bit_width, out)
        else:
            _round_wide(steps, columns, top, stochastic, w0, w1, w2, w3, wide)
            codes_to_bytes(wide, columns, bit_width, out)


@kernel
def extend_ranges(source, keys_at, table_at, start, stop):
    """Widen the key ranges of all groups by the elements of blocks start to stop.

    Args:
        source: Address of the elements.
        keys_at: Address of int32 keys: the lowest of every group, then the highest.
        table_at: Address of the table.
        start: First block.
        stop: One past the last block.
    """
    table = i64_at(table_at)
    numel, block, inner, groups = load(table, NUMEL), load(table, BLOCK), load(table, INNER), load(table, GROUPS)
    lows = i32_at(keys_at)
    highs = advance(lows, groups)
    scratch = f32_block()
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        x = stage(source, load(table, KIND), first, count, scratch)
        e = 0
        while e < count:
            group = (first + e) // inner % groups
            if inner == 1:
                run = min(groups - group, count - e)
                bits, low, high = as_i32(advance(x, e)), advance(lows, group), advance(highs, group)
                for g in range(run):
                    store(low, g, min(load(low, g), _key(load(bits, g))))
                    store(high, g, max(load(high, g), _key(load(bits, g))))
            else:
                run = min(inner - (first + e) % inner, count - e)
                low_key, high_key = _extend(advance(x, e), run, load(lows, group), load(highs, group))
                store(lows, group, low_key)
                store(highs, group, high_key)
            e += run


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
        low, high = _HIGHEST_KEY, _LOWEST_KEY
        for part in range(parts):
            low = min(low, load(keys, 2 * part * groups + group))
            high = max(high, load(keys, (2 * part + 1) * groups + group))
        _calibrate(low, high, group, scale, minimum, table)


@inlined
def _value(q, m, s, limit):
    """clamp(m + s * q); NaN stays."""
    y = m + s * q
    y = limit if y > limit else y
    return -limit if y < -limit else y


@inlined
def _needs_clamp(m, s, top, limit):
    """Whether values of a group come near the limit of the result's type."""
    return not (abs(m) + s * top < np.float32(0.5) * limit)


@inlined
def _decode_segment(q, count, m, s, top, limit):
    """Replace codes by their values, in place."""
    if _needs_clamp(m, s, top, limit):
        for e in range(count):
            store(q, e, _value(load(q, e), m, s, limit))
    else:
        for e in range(count):
            store(q, e, m + s * load(q, e))


@inlined
def _decode_planes(low, high, first, last, columns, bit_width, m, s, limit, values):
    """Values of planes first to last of one group, from the joined codes 0 to 3 and 4 to 7 of each column."""
    mask = np.uint32((1 << bit_width) - 1)
    top = np.float32(mask)
    for i in range(first, last):
        shift = np.uint32((i & 3) * bit_width)
        plane = advance(values, i * columns)
        words = high if i & 4 else low
        if _needs_clamp(m, s, top, limit):
            for j in range(columns):
                q = np.float32(np.int32(np.uint32(load(words, j) >> shift) & mask))
                store(plane, j, _value(q, m, s, limit))
        else:
            for j in range(columns):
                store(plane, j, m + s * np.float32(np.int32(np.uint32(load(words, j) >> shift) & mask)))


@inlined
def _decode_segments(q, first, count, scale, minimum, limit, table):
    """Replace the codes of elements first to first + count by their values, in place."""
    inner, groups = load(table, INNER), load(table, GROUPS)
    scale_kind, minimum_kind = load(table, SCALE_KIND), load(table, MINIMUM_KIND)
    top = np.float32((np.int64(1) << load(table, BIT_WIDTH)) - 1)
    e = 0
    while e < count:
        group = (first + e) // inner % groups
        if inner == 1:
            run = min(groups - group, count - e)
            for g in range(run):
                m, s = _read(minimum, minimum_kind, group + g), _read(scale, scale_kind, group + g)
                store(q, e + g, _value(load(q, e + g), m, s, limit))
        else:
            run = min(inner - (first + e) % inner, count - e)
            m, s = _read(minimum, minimum_kind, group), _read(scale, scale_kind, group)
            _decode_segment(advance(q, e), run, m, s, top, limit)
        e += run


@kernel
def dequantize_blocks(codes, scale, minimum, other, target, table_at, start, stop):
    """Decode blocks start to stop, and multiply.

    Args:
        codes: Address of the packed codes.
        scale: Address of the scales.
        minimum: Address of the minima.
        other: Address of the factor, 0 for none.
        target: Address of the result.
        table_at: Address of the table.
        start: First block.
        stop: One past the last block.
    """
    table = i64_at(table_at)
    numel, bit_width, block, kind = load(table, NUMEL), load(table, BIT_WIDTH), load(table, BLOCK), load(table, KIND)
    inner = load(table, INNER)
    scale_kind, minimum_kind = load(table, SCALE_KIND), load(table, MINIMUM_KIND)
    limit = np.float32(_LIMITS[kind])
    scratch, wide = f32_block(), u32_block()
    low, high = u32_columns(), u32_columns()
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        columns = (count + 7) // 8
        packed = advance(u8_at(codes), first // 8 * bit_width)
        direct = kind == FLOAT32 and other == 0 and count == 8 * columns
        values = advance(f32_at(target), first) if direct else scratch
        whole = first % inner + count <= inner  # the block lies in one group
        if bit_width < 8 and (whole or (load(table, FUSED) != 0 and inner % columns == 0 and count == block)):
            bytes_to_words(packed, columns, bit_width, low, high)
            group = first // inner % load(table, GROUPS)
            planes = 8 if whole else inner // columns
            for i in range(0, 8, planes):
                m, s = _read(minimum, minimum_kind, group), _read(scale, scale_kind, group)
                _decode_planes(low, high, i, min(i + planes, 8), columns, bit_width, m, s, limit, values)
                group += 1
        else:
            if bit_width == 8:
                for e in range(8 * columns):
                    store(values, e, np.float32(np.int32(load(packed, e))))
            else:
                bytes_to_codes(packed, columns, bit_width, wide)
                for e in range(8 * columns):
                    store(values, e, np.float32(np.int32(load(wide, e))))
            _decode_segments(values, first, count, scale, minimum, limit, table)
        if other:
            emit_product(values, other, target, kind, first, count)
        elif not direct:
            emit(values, target, kind, first, count)
