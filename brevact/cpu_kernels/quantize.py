"""Kernel that quantizes: positions on each group's grid, rounding, packing; `passes.quantize_uniform`'s bytes."""

from __future__ import annotations

import numpy as np

from brevact.cpu_kernels.groups import (
    BIT_WIDTH,
    BLOCK,
    DITHERED,
    FUSED,
    GROUPS,
    HIGHEST_KEY,
    INNER,
    LOWEST_KEY,
    MINIMUM_KIND,
    NUMEL,
    ROUNDING,
    SCALE_KIND,
    STOCHASTIC,
    any_flagged,
    calibrate,
    extend,
    extend_finite,
    inverse_of,
    is_finite,
    is_finite_range,
    is_flagged,
    read_metadata,
    stage_rows,
    store_shifted,
)
from brevact.cpu_kernels.memory import (
    advance,
    as_u32,
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
from brevact.cpu_kernels.normalize import SCRATCH, normalize
from brevact.cpu_kernels.philox import column_words, halves_of, shift_of
from brevact.cpu_kernels.planes import codes_to_bytes, words_to_bytes

_LEAST_SPREAD, _MOST_ALIKE = np.int64(8192), np.int64(6)


@inlined
def _to_steps(x, count, m, inverse, levels, steps):
    """Positions on the grid, t = clip((x - m) / s), of elements of one group; zeros if the inverse is 0."""
    if inverse > np.float32(0.0):
        for e in range(count):
            t = max((load(x, e) - m) * inverse, np.float32(0.0))
            store(steps, e, t if t < levels else levels)
    else:
        for e in range(count):
            store(steps, e, np.float32(0.0))


@inlined
def _to_flagged_steps(x, count, m, inverse, levels, steps):
    """The same in a flagged group: finite elements below the last level, which stands for the others."""
    below = levels - np.float32(1.0)
    for e in range(count):
        v = load(x, e)
        t = max((v - m) * inverse, np.float32(0.0))
        t = t if t < below else below
        store(steps, e, t if is_finite(v) else levels)


@inlined
def _to_steps_of_group(x, count, m, s, levels, steps):
    """Positions on the grid of elements of one group with this minimum and scale."""
    if is_flagged(s):
        _to_flagged_steps(x, count, m, inverse_of(s), levels, steps)
    else:
        _to_steps(x, count, m, inverse_of(s), levels, steps)


@inlined
def _to_steps_of_each(x, count, group, scale, minimum, levels, table, steps):
    """Positions on the grid of elements that are each in a group of their own."""
    scale_kind, minimum_kind = load(table, SCALE_KIND), load(table, MINIMUM_KIND)
    flags = any_flagged(scale, scale_kind, group, count)
    for g in range(count):
        inverse = inverse_of(read_metadata(scale, scale_kind, group + g))
        t = max((load(x, g) - read_metadata(minimum, minimum_kind, group + g)) * inverse, np.float32(0.0))
        t = t if t < levels else levels
        store(steps, g, t if inverse > np.float32(0.0) else np.float32(0.0))
    if flags:
        for g in range(count):
            if is_flagged(read_metadata(scale, scale_kind, group + g)):
                below = min(load(steps, g), levels - np.float32(1.0))
                store(steps, g, below if is_finite(load(x, g)) else levels)


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
            _to_steps_of_each(advance(x, e), run, group, scale, minimum, levels, table, advance(steps, e))
        else:
            run = min(inner - (first + e) % inner, count - e)
            s, m = read_metadata(scale, scale_kind, group), read_metadata(minimum, minimum_kind, group)
            _to_steps_of_group(advance(x, e), run, m, s, levels, advance(steps, e))
        e += run


@inlined
def _is_spread(steps, count):
    """Whether the levels of a group are shifted; see `reference.spreads`."""
    spread, upper, outer = np.int32(0), np.int32(0), np.int32(0)
    for e in range(count):
        t = load(steps, e)
        part = np.int32(rint((t - np.float32(np.floor(t))) * np.float32(256.0)))
        spread = np.int32(spread + np.int32(part * np.int32(np.int32(256) - part)))
        upper = np.int32(upper + np.int32(np.int32(part >> np.int32(7)) & np.int32(1)))
        outer = np.int32(outer + np.int32(np.int32(np.int32(part + np.int32(64)) >> np.int32(7)) & np.int32(1)))
    n = np.int64(count)
    a, b = n - 2 * np.int64(upper), n - 2 * np.int64(outer)
    return np.int64(spread) >= n * _LEAST_SPREAD and a * a + b * b <= n * _MOST_ALIKE


@inlined
def _shift(steps, count, shift, top):
    """The closest of shifted levels, for each position."""
    for e in range(count):
        t = max(load(steps, e) + shift, np.float32(0.0))
        store(steps, e, rint(t if t < top else top))


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
def round_narrow(t, columns, bit_width, stochastic, w0, w1, w2, w3, low, high):
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
def round_wide(t, columns, top, stochastic, w0, w1, w2, w3, codes):
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
def quantize_blocks(source, codes, scale, minimum, seed, table_at, norm_at, start, stop):
    """Quantize blocks start to stop. Groups that are not inside blocks must have been calibrated.

    Args:
        source: Address of the elements.
        codes: Address of the packed codes.
        scale: Address of the scales.
        minimum: Address of the minima.
        seed: Key of the random bits.
        table_at: Address of the table.
        norm_at: Address of the words of a normalization, see `normalize`; 0 for none.
        start: First block.
        stop: One past the last block.
    """
    table = i64_at(table_at)
    numel, bit_width, block, inner = load(table, NUMEL), load(table, BIT_WIDTH), load(table, BLOCK), load(table, INNER)
    fused, dithered = load(table, FUSED) != 0, load(table, ROUNDING) == DITHERED
    stochastic = load(table, ROUNDING) == STOCHASTIC
    k0, k1 = halves_of(seed)
    top = (np.int64(1) << bit_width) - 1
    steps, scratch = f32_scratch(block), f32_scratch(block)
    mean_of, scale_of = f32_scratch(SCRATCH), f32_scratch(SCRATCH)
    wide = as_u32(scratch)  # codes come when the elements in it have become steps
    columns = block // 8
    w0, w1, w2, w3 = u32_scratch(columns), u32_scratch(columns), u32_scratch(columns), u32_scratch(columns)
    low, high = u32_scratch(columns), u32_scratch(columns)
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        columns = (count + 7) // 8
        x = stage_rows(source, first, count, steps if norm_at else scratch, table)
        if norm_at:  # from one memory to another, or LLVM would not vectorize it
            normalize(x, first, count, norm_at, mean_of, scale_of, scratch)
            x = scratch
        if dithered:
            stochastic = False  # unless there are groups that do not shift their levels
        if fused:
            e = 0
            while e < count:
                run = min(inner, count - e)
                low_key, high_key = extend(advance(x, e), run, HIGHEST_KEY, LOWEST_KEY)
                flagged = not is_finite_range(low_key, high_key)
                if flagged:
                    low_key, high_key = extend_finite(advance(x, e), run, HIGHEST_KEY, LOWEST_KEY)
                m, s = calibrate(low_key, high_key, flagged, (first + e) // inner, scale, minimum, table)
                at = advance(steps, e)
                _to_steps_of_group(advance(x, e), run, m, s, np.float32(top), at)
                if dithered:
                    if not flagged and _is_spread(at, run):
                        group = (first + e) // inner
                        shift = shift_of(group, k0, k1)
                        _shift(at, run, shift, np.float32(top))
                        store_shifted(m, s, shift, group, minimum, table)
                    else:
                        stochastic = True
                e += run
        else:
            _steps_of_segments(x, first, count, scale, minimum, table, steps)
        for e in range(count, 8 * columns):
            store(steps, e, np.float32(0.0))
        if stochastic:
            column_words(first // 8, columns, k0, k1, w0, w1, w2, w3)
        out = advance(u8_at(codes), first // 8 * bit_width)
        if bit_width < 8:
            round_narrow(steps, columns, bit_width, stochastic, w0, w1, w2, w3, low, high)
            words_to_bytes(low, high, columns, bit_width, out)
        else:
            round_wide(steps, columns, top, stochastic, w0, w1, w2, w3, wide)
            codes_to_bytes(wide, columns, bit_width, out)
