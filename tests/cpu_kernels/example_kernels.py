"""Kernels that tests compile."""

from __future__ import annotations

import numpy as np

from brevact.cpu_kernels.intrinsics import advance, i64_at, kernel, load, store, u32_at
from brevact.cpu_kernels.kernels import load as load_kernels
from brevact.cpu_kernels.packing import column_words


@kernel
def count(target, amount, start, stop):
    for block in range(start, stop):
        place = advance(i64_at(target), block)
        store(place, 0, load(place, 0) + amount)


@kernel
def draw_words(columns, k0, k1, out, start, stop):
    column_words(start, columns, np.uint64(k0), np.uint64(k1), u32_at(out))


load_kernels(__name__)
