"""Where values lie among levels of any spacing, see `grid_reference.positions`."""

from __future__ import annotations

import numpy as np

from brevact.cpu_kernels.memory import advance, as_i32, inlined, load, store

_MOST_COMPARED = 32
"""Levels that are counted one by one: comparing is eight times as fast as halving, which gathers."""
_MOST_BLENDED = 16
"""Levels whose distances are taken one by one, which is faster than gathering a value's own level."""


@inlined
def _compare(z, count, row, unit, bounds, q):
    """q = unit times the numbers that z reaches among every unit-th of the ascending ones, four in a pass."""
    step, k = np.int32(unit), unit - 1
    for e in range(count):
        store(q, e, np.int32(0))
    while k + 3 * unit < bounds:
        b0, b1, b2, b3 = load(row, k), load(row, k + unit), load(row, k + 2 * unit), load(row, k + 3 * unit)
        for e in range(count):
            v = load(z, e)
            reached = np.int32(np.int32(v >= b0) + np.int32(v >= b1) + np.int32(v >= b2) + np.int32(v >= b3))
            store(q, e, np.int32(load(q, e) + np.int32(reached * step)))
        k += 4 * unit
    while k < bounds:
        b0 = load(row, k)
        for e in range(count):
            store(q, e, np.int32(load(q, e) + (step if load(z, e) >= b0 else np.int32(0))))
        k += unit


@inlined
def _halve(z, count, row, stride, half, bounds, q):
    """Add up to 2 half - 1 of the numbers that z reaches beyond the first q, by halving; see `_count`."""
    most, across = np.int32(bounds), np.int32(stride)
    step = np.int32(half)
    while step > np.int32(0):
        for e in range(count):
            probe = np.int32(load(q, e) + step)
            probe = probe if probe < most else most
            bound = load(row, np.int64(np.int32(np.int32(np.int32(e) * across) + probe)) - 1)
            store(q, e, probe if load(z, e) >= bound else load(q, e))
        step = np.int32(step >> np.int32(1))


@inlined
def _count(z, count, row, stride, bounds, q):
    """q = how many ascending numbers z reaches, none if it is NaN; those of value e begin at row + e * stride."""
    most = 1 if stride else _MOST_COMPARED
    unit = 1
    while bounds >= most * unit:
        unit *= 2
    _compare(z, count, row, unit, bounds, q)
    _halve(z, count, row, stride, unit // 2, bounds, q)


@inlined
def _clip(fraction):
    """clip(fraction, 0, 1); 0 for NaN."""
    fraction = fraction if fraction > np.float32(0.0) else np.float32(0.0)
    return fraction if fraction < np.float32(1.0) else np.float32(1.0)


@inlined
def _blend(z, count, levels, steps, size, t):
    """Positions between few levels."""
    low, inverse = load(levels, 0), load(steps, 0)
    for e in range(count):
        store(t, e, _clip((load(z, e) - low) * inverse))
    for k in range(1, size - 1):
        low, inverse, base = load(levels, k), load(steps, k), np.float32(k)
        for e in range(count):
            reached = base + _clip((load(z, e) - low) * inverse)
            store(t, e, reached if load(z, e) >= low else load(t, e))


@inlined
def _interpolate(z, count, levels, steps, stride, size, t):
    """Positions from the numbers of levels but the first that values reach, which are in the memory of t."""
    q, last, across = as_i32(t), np.int32(size - 2), np.int32(stride)
    across_steps = across - np.int32(1) if across > np.int32(0) else np.int32(0)
    for e in range(count):
        index = load(q, e)
        index = index if index < last else last  # a value that reaches the last level lies in the last gap, too
        low = load(levels, np.int64(np.int32(np.int32(np.int32(e) * across) + index)))
        inverse = load(steps, np.int64(np.int32(np.int32(np.int32(e) * np.int32(across_steps)) + index)))
        store(t, e, np.float32(index) + _clip((load(z, e) - low) * inverse))


@inlined
def place(z, count, levels, steps, stride, size, stochastic, t):
    """Positions of values as `grid_reference.positions` defines them.

    Args:
        z: float32 pointer to values.
        count: Number of values.
        levels: float32 pointer to the first value's row of levels.
        steps: float32 pointer to its row of steps.
        stride: 0 where all values share the row, else `size`: value e's row is the e-th.
        size: Levels of a row.
        stochastic: Rounding.
        t: float32 pointer to the positions, written.
    """
    if stochastic and stride == 0 and size <= _MOST_BLENDED:
        _blend(z, count, levels, steps, size, t)
    else:
        numbers, across = (advance(levels, 1), stride) if stochastic else (steps, stride - 1 if stride else 0)
        q = as_i32(t)
        _count(z, count, numbers, across, size - 1, q)
        if stochastic:
            _interpolate(z, count, levels, steps, stride, size, t)
        else:
            for e in range(count):
                store(t, e, np.float32(load(q, e)))
