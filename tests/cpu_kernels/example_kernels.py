"""Kernels that tests compile."""

from __future__ import annotations

import numpy as np

from brevact.cpu_kernels.memory import advance, i64_at, kernel, load, store, u32_at
from brevact.cpu_kernels.rounding import column_words


@kernel
def count(target, amount, start, stop):
    for block in range(start, stop):
        place = advance(i64_at(target), block)
        store(place, 0, load(place, 0) + amount)


@kernel
def draw_words(columns, k0, k1, out, start, stop):
    w0, w1, w2, w3 = u32_at(out), u32_at(out + 4 * columns), u32_at(out + 8 * columns), u32_at(out + 12 * columns)
    column_words(start, columns, np.uint64(k0), np.uint64(k1), w0, w1, w2, w3)


@kernel
def divide(target, amount, start, stop):
    """Raise an error where the amount is 0: none that may be compiled."""
    for block in range(start, stop, amount):
        store(advance(i64_at(target), block), 0, amount)
