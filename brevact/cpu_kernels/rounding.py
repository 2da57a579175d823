"""Rounding of positions on a grid to codes: to nearest, stochastically, or on shifted levels."""

from __future__ import annotations

import numpy as np

from brevact.cpu_kernels.memory import advance, inlined, load, rint, store
from brevact.cpu_kernels.philox import column_words
from brevact.cpu_kernels.planes import codes_to_bytes, words_to_bytes

_LEAST_SPREAD, _MOST_ALIKE = np.int64(8192), np.int64(6)


@inlined
def is_spread(steps, count):
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
def shift_to_levels(steps, count, shift, top):
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


@inlined
def write_codes(t, first, count, bit_width, stochastic, k, random, joined, wide, codes):
    """Round, write bytes of codes. Scratch: a word per column in `random`, `joined`, per element in `wide`."""
    columns = (count + 7) // 8
    for e in range(count, 8 * columns):
        store(t, e, np.float32(0.0))
    if stochastic:
        column_words(first // 8, columns, k[0], k[1], *random)
    out = advance(codes, first // 8 * bit_width)
    if bit_width < 8:
        round_narrow(t, columns, bit_width, stochastic, *random, *joined)
        words_to_bytes(*joined, columns, bit_width, out)
    else:
        round_wide(t, columns, (np.int64(1) << bit_width) - 1, stochastic, *random, wide)
        codes_to_bytes(wide, columns, bit_width, out)
