"""Levels of buckets whose range a few values take; the arithmetic of `quantizers.uneven`, a bucket at a time."""

from __future__ import annotations

import numpy as np

from brevact.cpu_kernels.floats import is_finite, key_of, round_up
from brevact.cpu_kernels.intrinsics import bits_of, f32_at, float_of, i32_at, inlined, load, store, u16_at
from brevact.geometry import SENTINELS

_LARGEST_NEAR, _SMALLEST_STEP = np.float32(2.0**126), np.float32(2.0**-126)
_ZERO, _ONE, _INFINITY = np.float32(0.0), np.float32(1.0), np.float32(np.inf)
_SPECIAL, _QUIET, _SIGN = np.int32(0x7F800000), np.int32(0x7FC00000), np.int32(-(2**31))
_MAGNITUDE = np.int32(0x7FFFFFFF)
_SENTINELS = tuple(np.float32(x) for x in SENTINELS)


@inlined
def float_of_key(key):
    return float_of(key_of(key))


@inlined
def canonical(key):
    """Key of `value + 0.0`, which is that of 0.0 for -0.0."""
    return np.int32(0) if key == np.int32(-1) else key


@inlined
def second_ends(x, count, low, high):
    """Keys of the second ends of finite elements, and whether the bucket is uneven; two loops, short, for LLVM."""
    bottom, ceiling = float_of_key(low), float_of_key(high)
    limit = bits_of(max(-bottom, ceiling) * np.float32(0.125))
    first, last = np.uint32(low + np.int32(1)), np.uint32(high - np.int32(1))
    above, below = np.uint32(0xFFFFFFFF), np.uint32(0xFFFFFFFF)  # distances, which wrap around for the ends
    for e in range(count):
        key = np.uint32(key_of(bits_of(load(x, e) + _ZERO)))
        above, below = min(above, np.uint32(key - first)), min(below, np.uint32(last - key))
    small, zeros = np.int32(0), np.int32(0)
    for e in range(count):
        size = np.int32(bits_of(load(x, e)) & _MAGNITUDE)
        zeros = np.int32(zeros + np.int32(1 if size == np.int32(0) else 0))
        small = np.int32(small + np.int32(1 if size <= limit else 0))
    second_low, second_high = np.int32(first + above), np.int32(last - below)
    near = min(ceiling - float_of_key(second_low), float_of_key(second_high) - bottom)
    tails = 5 * np.int64(small - zeros) >= 4 * (count - np.int64(zeros))
    return second_low, second_high, low < high and (tails or near < (ceiling - bottom) * np.float32(0.5))


@inlined
def _reach(count, spacing, octave):
    """Value of a level in steps; see `quantizers.uneven.reach`. An octave has 2^octave levels."""
    one, beyond = np.int64(octave + 127) << 23, max(np.int64(count) - _evenly(spacing, octave), np.int64(0))
    octaves = float_of(np.int32((beyond << (23 - octave)) + one)) - float_of(np.int32(one))
    return np.float32(np.int64(count) - beyond) + octaves


@inlined
def _evenly(spacing, octave):
    return (np.int64(spacing) << octave) + (np.int64(256) if spacing == 7 else np.int64(0))


@inlined
def _stored(step):
    return max(round_up(step, np.int32(1 << 20)), _SMALLEST_STEP)


@inlined
def _covering(below, above, zero, most, spacing, octave):
    low = below / _reach(zero, spacing, octave) if below > _ZERO else _ZERO
    return max(low, above / _reach(most - zero, spacing, octave) if above > _ZERO else _ZERO)


@inlined
def _octaves(low, high, most, spacing, octave, middle):
    below, above = max(-low, _ZERO), max(high, _ZERO)
    zero = np.int64(0)
    for place in range(8):
        tried = zero | (np.int64(128) >> place)
        if tried < most and _reach(tried, spacing, octave) * above <= _reach(most - tried, spacing, octave) * below:
            zero = tried
    step = _covering(below, above, zero, most, spacing, octave)
    next_step = _covering(below, above, zero + 1, most, spacing, octave)
    if next_step < step:
        zero, step = zero + 1, next_step
    step = _stored(step)
    beyond = max(middle * (_ONE / step) - np.float32(_evenly(spacing, octave)), _ZERO)
    exponent = np.int64(bits_of(beyond + float_of(np.int32((octave + 127) << 23)))) >> 23
    return np.int64(spacing) << 8 | zero, step, step * float_of(np.int32((exponent - octave) << 23))


@inlined
def _median_magnitude(x, count, far, has_missing, sizes):
    """See `quantizers.uneven`; scratch words take the magnitudes of elements that count, and 0 for others."""
    if has_missing:
        for e in range(count):
            size = np.int32(bits_of(load(x, e)) & _MAGNITUDE)
            store(sizes, e, size if size < _SPECIAL else np.int32(0))
    else:
        for e in range(count):
            size = np.int32(bits_of(load(x, e)) & _MAGNITUDE)
            store(sizes, e, size if load(x, e) != far else np.int32(0))
    total, found = _count_from(sizes, count, np.int32(1)), np.int32(0)
    for place in range(8):
        tried = np.int32(found | np.int32(128 >> place))
        if 2 * _count_from(sizes, count, max(np.int32(tried << np.int32(23)), np.int32(1))) >= total:
            found = tried
    return float_of(np.int32(np.int32(found << np.int32(23)) | np.int32(1 << 22))) if total else _ZERO


@inlined
def _count_from(sizes, count, least):
    """Number of words that are at least this."""
    found = np.int32(0)
    for e in range(count):
        found = np.int32(found + np.int32(1 if load(sizes, e) >= least else 0))
    return np.int64(found)


@inlined
def _far_bits(x, count, far, has_missing):
    if has_missing:
        plus, minus = True, True
        for e in range(count):
            v = load(x, e)
            plus, minus = plus and (is_finite(v) or v == _INFINITY), minus and (is_finite(v) or v == -_INFINITY)
        return (
            np.int32(_QUIET | np.int32(1 << 8))
            if plus
            else np.int32(np.int32(_QUIET | np.int32(1 << 8)) | _SIGN)
            if minus
            else _QUIET
        )
    bits = bits_of(far)
    rounded = np.int32(
        np.int32(bits + np.int32(0x7F) + np.int32(np.int32(bits >> np.int32(8)) & np.int32(1))) & np.int32(-256)
    )
    pattern = np.int32(_QUIET | np.int32(2 << 8))
    for sentinel in _SENTINELS:
        if abs(far) == sentinel:
            rounded = np.int32(np.int32(bits & _SIGN) | pattern)
        pattern = np.int32(pattern + np.int32(1 << 8))
    return rounded


@inlined
def quantize_uneven(x, count, low, high, second_low, second_high, has_missing, bit_width, group, scale, minimum, steps):
    """Store the metadata of an uneven bucket, and in `steps` the positions of its elements on its levels.

    `low` and `high` are keys of the finite ends; for the next two see `second_ends`: unused with missing elements.
    """
    far = _ZERO
    if not has_missing:
        bottom, ceiling = float_of_key(low), float_of_key(high)
        if ceiling - float_of_key(second_low) <= float_of_key(second_high) - bottom:
            far, low = bottom, second_low
        else:
            far, high = ceiling, second_high
    lowest, highest = _ZERO, _ZERO
    if low <= high:
        lowest = min(max(float_of_key(low), -_LARGEST_NEAR), _LARGEST_NEAR)
        highest = min(max(float_of_key(high), -_LARGEST_NEAR), _LARGEST_NEAR)
    most = (np.int64(1) << bit_width) - 2
    middle = _median_magnitude(x, count, far, has_missing, i32_at(steps))

    octave = max(np.int64(bit_width) - 4, np.int64(0))
    form, step, smallest = np.int64(0), _ONE, _INFINITY
    for spacing in range(7 if bit_width >= 4 else 0):
        own_form, own_step, gap = _octaves(lowest, highest, most, np.int64(spacing), octave, middle)
        if gap <= smallest * np.float32(1.25):
            form, step = own_form, own_step
        smallest = min(smallest, gap)
    exponent = np.int32(bits_of(max(abs(lowest), abs(highest))) & _SPECIAL)
    own_step = float_of(max(np.int32(exponent - np.int32(9 << 23)), np.int32(1 << 23)))
    own_step = _stored(max((highest - lowest) / np.float32(most - 1), own_step))
    first = np.int64(np.floor(lowest / own_step))
    gap = own_step if lowest > _ZERO or highest < _ZERO else _INFINITY
    if gap <= smallest * np.float32(2.0):
        form, step = np.int64(0x800) | ((first + 1024) & 0x7FF), own_step
    smallest = min(smallest, gap)
    own_form, own_step, gap = _octaves(lowest, highest, most, np.int64(7), octave, middle)
    if gap <= smallest * np.float32(2.0):
        form, step = own_form, own_step

    bits = _far_bits(x, count, far, has_missing)
    store(f32_at(minimum), group, float_of(np.int32(np.int32(bits & np.int32(-4096)) | np.int32(form))))
    word = np.int32(np.int32(np.int32(bits_of(step) >> np.int32(16)) & np.int32(0x7FF0)) | np.int32(0x8000))
    word = np.int32(word | np.int32(np.int32(bits >> np.int32(8)) & np.int32(0xF)))
    store(u16_at(scale), group, np.uint16(word))

    inverse, top = _ONE / step, np.float32(most)
    if form >= 0x800:
        shift = np.float32(first)
        for e in range(count):
            t = max(load(x, e) * inverse - shift, _ZERO)
            store(steps, e, t if t < top else top)
    else:
        zero, even = np.float32(form & 0xFF), np.float32(_evenly(form >> 8, octave))
        one = np.int32((octave + 127) << 23)
        start, unit = float_of(one), float_of(np.int32((octave + 104) << 23))
        for e in range(count):
            v = load(x, e)
            size = abs(v) * inverse
            beyond = np.int32(bits_of(max(size - even, _ZERO) + start) - one)
            reached = min(size, even) + np.float32(beyond) * unit
            t = max(zero + float_of(np.int32(bits_of(reached) | np.int32(bits_of(v) & _SIGN))), _ZERO)
            store(steps, e, t if t < top else top)
    if has_missing:
        for e in range(count):
            store(steps, e, load(steps, e) if is_finite(load(x, e)) else top + _ONE)
    else:
        for e in range(count):
            store(steps, e, top + _ONE if load(x, e) == far else load(steps, e))


@inlined
def uneven_levels(m, s, bit_width, limit, levels):
    """Write the values of codes, within the limit of a type unless it is infinite; see `quantizers.uneven.values`."""
    top = np.int64((1 << bit_width) - 1)
    for q in range(top + 1):
        store(levels, q, _value(q, m, s, top, max(np.int64(bit_width) - 4, np.int64(0)), limit))


@inlined
def _value(q, m, s, top, octave, limit):
    form, word = np.int32(bits_of(m) & np.int32(0xFFF)), np.int32(bits_of(s) >> np.int32(16))
    if q == top:
        far = np.int32(np.int32(bits_of(m) & np.int32(-4096)) | np.int32(np.int32(word & np.int32(0xF)) << np.int32(8)))
        size = np.int32(far & _MAGNITUDE)
        value = np.float32(np.nan) if size > _SPECIAL else min(float_of(size), limit)
        if size == np.int32(_QUIET | np.int32(1 << 8)):
            value = _INFINITY
        pattern = np.int32(_QUIET | np.int32(2 << 8))
        for sentinel in _SENTINELS:
            if size == pattern:
                value = min(sentinel, limit)
            pattern = np.int32(pattern + np.int32(1 << 8))
        return -value if far < np.int32(0) else value
    step = float_of(np.int32(np.int32(word & np.int32(0x7FF0)) << np.int32(16)))
    if form >= np.int32(0x800):
        y = np.float32(np.int32(q + np.int64(form & np.int32(0x7FF)) - 1024)) * step
    else:
        count = np.int64(q) - np.int64(form & np.int32(0xFF))
        size_of = _reach(abs(count), np.int64(form >> np.int32(8)), octave) * step
        y = -size_of if count < 0 else size_of
    y = limit if y > limit else y
    return -limit if y < -limit else y
