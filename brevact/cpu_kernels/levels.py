"""Where values lie among levels of any spacing, see `quantizers.kernel_ops.positions`."""

from __future__ import annotations

import numpy as np

from brevact.cpu_kernels.memory import advance, as_i32, inlined, load, store

_MOST_COMPARED = 32
"""Numbers that are all compared with; among more, every 2nd, 4th ..., and halving finds the place between two."""
_MOST_BLENDED = 8
"""Levels whose distances are all taken, which is faster than looking up each value's own."""


@inlined
def _number(row, k, size):
    """Number k of a row, and beyond its end NaN, which no value reaches."""
    return load(row, k) if k < size else np.float32(np.nan)


@inlined
def _compare(z, count, row, unit, size, q):
    """q = how many z reaches among every unit-th of the ascending numbers."""
    for e in range(count):
        store(q, e, np.int32(0))
    for k in range(unit - 1, size, 4 * unit):
        b0, b1 = load(row, k), _number(row, k + unit, size)
        b2, b3 = _number(row, k + 2 * unit, size), _number(row, k + 3 * unit, size)
        for e in range(count):
            v = load(z, e)
            low, high = np.int32(v >= b0) + np.int32(v >= b1), np.int32(v >= b2) + np.int32(v >= b3)
            store(q, e, np.int32(load(q, e) + np.int32(low + high)))


@inlined
def _halve(z, count, row, size, q):
    """Add to q how many of the `size` ascending numbers from row + q on z reaches."""
    while size > 0:
        half = (size + 1) >> 1
        middle, step = advance(row, half - 1), np.int32(half)
        for e in range(count):
            place = load(q, e)
            store(q, e, np.int32(place + (step if load(z, e) >= load(middle, np.int64(place)) else np.int32(0))))
        size -= half


@inlined
def _count(z, count, row, size, q):
    """q = how many of the ascending numbers z reaches; none if it is NaN."""
    unit = 1
    while size >= _MOST_COMPARED * unit:
        unit *= 2
    _compare(z, count, row, unit, size, q)
    if unit > 1:
        factor, last = np.int32(unit), np.int32(size - (unit - 1))  # from a lower start the numbers suffice
        for e in range(count):
            place = np.int32(load(q, e) * factor)
            store(q, e, place if place < last else last)
        _halve(z, count, row, unit - 1, q)


@inlined
def _clip(fraction):
    """clip(fraction, 0, 1); 0 for NaN."""
    fraction = fraction if fraction > np.float32(0.0) else np.float32(0.0)
    return fraction if fraction < np.float32(1.0) else np.float32(1.0)


@inlined
def _blend(z, count, levels, steps, size, t):
    low, inverse = load(levels, 0), load(steps, 0)
    for e in range(count):
        store(t, e, _clip((load(z, e) - low) * inverse))
    for k in range(1, size - 1):
        low, inverse, base = load(levels, k), load(steps, k), np.float32(k)
        for e in range(count):
            reached = base + _clip((load(z, e) - low) * inverse)
            store(t, e, reached if load(z, e) >= low else load(t, e))


@inlined
def place(z, count, levels, steps, size, stochastic, t, scratch):
    """Write positions on a row of levels to `t`; rounding needs `steps`, too. Scratch: `count` numbers."""
    q = as_i32(t)
    if not stochastic:
        _count(z, count, steps, size - 1, q)
        for e in range(count):
            store(t, e, np.float32(load(q, e)))
    elif size <= _MOST_BLENDED:
        _blend(z, count, levels, steps, size, t)
    else:
        _count(z, count, advance(levels, 1), size - 2, q)
        for e in range(count):
            index = np.int64(load(q, e))
            store(scratch, e, (load(z, e) - load(levels, index)) * load(steps, index))
        for e in range(count):
            store(t, e, np.float32(load(q, e)) + _clip(load(scratch, e)))
