"""Normalization on the way: a norm's map of elements before they are quantized, and its inverse."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from torch import Tensor

from brevact.cpu_kernels.floats import limited
from brevact.cpu_kernels.intrinsics import advance, f32_at, i64_at, inlined, load, store
from brevact.geometry import BEND, FAR, STRETCH, Place

MEAN, SCALE, OUTER, ROW, INNER, RUN = range(6)
"""Fields of the words of a normalization: addresses of float32 means (0 for none) and scales, one of each for every
group, and which is whose: that of element e is e // OUTER * ROW + e % INNER // RUN."""


@inlined
def start_of(first, words):
    """Number of the first row's group, and places in the row and in a run of groups, of an element."""
    outer = load(words, OUTER)
    return first // outer * load(words, ROW), first % outer, first % load(words, INNER)


@inlined
def next_of(base, group, in_row, in_inner, run, inner, outer, row):
    """The first four numbers, so many elements later, at the end of a run."""
    group, in_row, in_inner = group + 1, in_row + run, in_inner + run
    if in_inner >= inner:
        group, in_inner = base, 0
    if in_row >= outer:
        base, in_row = base + row, 0
        group = base
    return base, group, in_row, in_inner


@inlined
def _one(v, mean, scale, undoes):
    return v * scale + mean if undoes else (v - mean) * scale


@inlined
def _map_elements(x, first, count, words_at, z, undoes):
    """Normalize elements first to first + count, or undo that; `undoes` is a constant, which LLVM sees."""
    words = i64_at(words_at)
    means, scales, has_mean = f32_at(load(words, MEAN)), f32_at(load(words, SCALE)), load(words, MEAN) != 0
    inner, run, outer, row = load(words, INNER), load(words, RUN), load(words, OUTER), load(words, ROW)
    none = np.float32(-0.0) if undoes else np.float32(0.0)  # which changes nothing, zeros neither
    base, in_row, in_inner = start_of(first, words)
    group, left = base + in_inner // run, run - in_inner % run
    e = 0
    while e < count:
        source, target, s = advance(x, e), advance(z, e), advance(scales, group)
        if run == 1 and inner > 1:  # groups of one element each lie behind each other
            step = min(inner - in_inner, count - e)
            m = advance(means, group) if has_mean else s
            for i in range(step):
                mean = load(m, i) if has_mean else none
                store(target, i, _one(load(source, i), mean, load(s, i), undoes))
        else:
            step = min(left, count - e)
            mean, scale = load(means, group) if has_mean else none, load(s, 0)
            for i in range(step):
                store(target, i, _one(load(source, i), mean, scale, undoes))
        base, group, in_row, in_inner = next_of(base, group, in_row, in_inner, step, inner, outer, row)
        e, left = e + step, run


@inlined
def normalize_elements(x, first, count, words_at, z):
    """(x - mean) * scale, see `normalizing.normalize`; z is not x."""
    _map_elements(x, first, count, words_at, z, False)


@inlined
def denormalize_elements(z, first, count, words_at, limit):
    """clamp(z * scale + mean, -limit, limit) in place, see `normalizing.denormalize`."""
    _map_elements(z, first, count, words_at, z, True)
    if limit < np.float32(np.inf):
        for i in range(count):
            store(z, i, limited(load(z, i), limit))


@inlined
def stretch(x, count, y):
    """See `reference.stretched`."""
    for e in range(count):
        v = load(x, e)
        near = limited(v, np.float32(FAR))
        store(y, e, v + near / (abs(near) + np.float32(BEND)) * np.float32(STRETCH))


@inlined
def shrink(y, count):
    """See `reference.shrunk`; in place."""
    for e in range(count):
        v = load(y, e)
        near = limited(v, np.float32(FAR))
        part = abs(near) - np.float32(STRETCH - BEND)
        divisor = abs(near) + np.sqrt(part * part + np.float32(4 * STRETCH * BEND)) + np.float32(STRETCH + BEND)
        store(y, e, v - near / divisor * np.float32(2 * STRETCH))


def words_of(mean: Tensor | None, factor: Tensor | None, place: Place | None) -> tuple[int, Any]:
    """Address of the words of a normalization, 0 for none, and their owner."""
    if factor is None or place is None:
        return 0, None
    outer, row, inner, run = place
    if row == 1:  # one group from one multiple of `outer` to the next: kernels go through a run at a time
        inner = run = outer
    words = array("q", (0 if mean is None else mean.data_ptr(), factor.data_ptr(), outer, row, inner, run))
    return words.buffer_info()[0], words
