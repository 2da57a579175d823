"""Rounding of positions on a grid to codes: to nearest, stochastically, or on shifted levels; and Philox4x32."""

from __future__ import annotations

import numpy as np

from brevact.cpu_kernels.memory import advance, inlined, load, rint, store
from brevact.cpu_kernels.packing import words_to_bytes

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_ROUNDS = 7
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


@inlined
def _round(c0, c1, c2, c3, k0, k1):
    """One round on 32-bit words held in uint64."""
    p0, p1 = c0 * _M0, c2 * _M1
    return (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW


@inlined
def _bump(key, step):
    return (key + step) & _LOW


@inlined
def halves_of(seed):
    """The low and the high half of a seed, each in a uint64."""
    return np.uint64(seed) & _LOW, np.uint64(seed) >> _32


@inlined
def shift_of(group, k0, k1):
    """The shift of a group's levels; see `reference.shifts`."""
    counter = np.uint64(group)
    c0, c1, c2, c3 = counter & _LOW, counter >> _32, np.uint64(1), np.uint64(0)
    for _ in range(_ROUNDS):
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
        k0, k1 = _bump(k0, _W0), _bump(k1, _W1)
    return np.float32(c0 >> np.uint64(8)) * np.float32(2.0**-24) - np.float32(0.5)


@inlined
def column_words(first, columns, k0, k1, w0, w1, w2, w3):
    """Write random words w0 to w3 of columns, whose indices are the counters; k0 is the low half of the seed."""
    a1, b1 = _bump(k0, _W0), _bump(k1, _W1)
    a2, b2 = _bump(a1, _W0), _bump(b1, _W1)
    a3, b3 = _bump(a2, _W0), _bump(b2, _W1)
    a4, b4 = _bump(a3, _W0), _bump(b3, _W1)
    a5, b5 = _bump(a4, _W0), _bump(b4, _W1)
    a6, b6 = _bump(a5, _W0), _bump(b5, _W1)
    zero = np.uint64(0)
    for j in range(columns):
        c = np.uint64(first + j)
        c0, c1, c2, c3 = _round(c & _LOW, c >> _32, zero, zero, k0, k1)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a1, b1)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a2, b2)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a3, b3)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a4, b4)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a5, b5)
        c0, c1, c2, c3 = _round(c0, c1, c2, c3, a6, b6)
        store(w0, j, np.uint32(c0))
        store(w1, j, np.uint32(c1))
        store(w2, j, np.uint32(c2))
        store(w3, j, np.uint32(c3))


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
def _half(word, shift):
    return np.uint32(np.uint32(word >> shift) & np.uint32(0xFFFF))


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
        else:
            shift = np.uint32(16 * half)
            for j in range(columns):
                q0 = _stochastic(load(th, j), _half(load(w0, j), shift))
                q1 = _stochastic(load(t1, j), _half(load(w1, j), shift))
                q2 = _stochastic(load(t2, j), _half(load(w2, j), shift))
                q3 = _stochastic(load(t3, j), _half(load(w3, j), shift))
                store(out, j, _join(q0, q1, q2, q3, bit_width))


@inlined
def round_bytes(t, columns, stochastic, w0, w1, w2, w3, out):
    """Round positions to codes of 8 bits, the bytes."""
    for i in range(8):
        word = w0 if i & 3 == 0 else w1 if i & 3 == 1 else w2 if i & 3 == 2 else w3
        shift = np.uint32(16 * (i >> 2))
        plane, codes = advance(t, i * columns), advance(out, i * columns)
        if not stochastic:
            for j in range(columns):
                store(codes, j, np.uint8(_nearest(load(plane, j))))
        else:
            for j in range(columns):
                store(codes, j, np.uint8(_stochastic(load(plane, j), _half(load(word, j), shift))))


@inlined
def write_codes(t, first, count, bit_width, stochastic, k, random, joined, codes):
    """Round, and write bytes of codes of at most 8 bits. Scratch: a word per column in `random` and `joined`."""
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
        round_bytes(t, columns, stochastic, *random, out)
