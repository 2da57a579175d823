"""Philox4x32 with seven rounds, for a run of packing columns."""

from __future__ import annotations

import numpy as np

from brevact.cpu_kernels.memory import inlined, store

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
