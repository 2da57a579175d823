"""Normalization on the way: what a norm makes of the elements before they are quantized, and back."""

from __future__ import annotations

import numpy as np

from brevact.cpu_kernels.memory import advance, f32_at, i64_at, inlined, load, store

MEAN, SCALE, OUTER, ROW, INNER, RUN = range(6)
"""Fields of the words of a normalization: addresses of float32 means (0 for none) and scales, one of each for every
group, and which is whose: that of element e is e // OUTER * ROW + e % INNER // RUN."""


@inlined
def _start(first, words):
    """Number of the first row's group, and places in the row and in a run of groups, of an element."""
    outer = load(words, OUTER)
    return first // outer * load(words, ROW), first % outer, first % load(words, INNER)


@inlined
def _run_at(in_row, in_inner, words):
    """Elements from a place on that belong to one group; of groups of single elements, to groups behind each other."""
    inner, run = load(words, INNER), load(words, RUN)
    if run > 1:
        return run - in_inner % run
    return inner - in_inner if inner > 1 else load(words, OUTER) - in_row


@inlined
def _advance(base, in_row, in_inner, run, words):
    """The same three numbers, so many elements later; no run goes beyond the end of its row."""
    in_row, in_inner = in_row + run, in_inner + run
    if in_inner >= load(words, INNER):
        in_inner = 0
    if in_row == load(words, OUTER):
        in_row, base = 0, base + load(words, ROW)
    return base, in_row, in_inner


@inlined
def normalize(x, first, count, words_at, z):
    """(x - mean) * scale of elements first to first + count, as `normalizing.normalize` defines it.

    Args:
        x: float32 pointer.
        first: First element.
        count: Number of elements.
        words_at: Address of the words.
        z: float32 pointer, written; not `x`.
    """
    words = i64_at(words_at)
    means, scales = f32_at(load(words, MEAN)), f32_at(load(words, SCALE))
    has_mean = load(words, MEAN) != 0
    single = load(words, RUN) == 1 and load(words, INNER) > 1
    e = 0
    base, in_row, in_inner = _start(first, words)
    while e < count:
        group, run = base + in_inner // load(words, RUN), min(_run_at(in_row, in_inner, words), count - e)
        source, target = advance(x, e), advance(z, e)
        if single:
            s = advance(scales, group)
            if has_mean:
                m = advance(means, group)
                for i in range(run):
                    store(target, i, (load(source, i) - load(m, i)) * load(s, i))
            else:
                for i in range(run):
                    store(target, i, load(source, i) * load(s, i))
        else:
            mean, scale = load(means, group) if has_mean else np.float32(0.0), load(scales, group)
            for i in range(run):
                store(target, i, (load(source, i) - mean) * scale)
        base, in_row, in_inner = _advance(base, in_row, in_inner, run, words)
        e += run


@inlined
def denormalize(z, first, count, words_at, limit):
    """clamp(z * scale + mean, -limit, limit) in place, as `normalizing.denormalize` defines it.

    Args:
        z: float32 pointer.
        first: First element.
        count: Number of elements.
        words_at: Address of the words.
        limit: Largest value, or infinity.
    """
    words = i64_at(words_at)
    means, scales = f32_at(load(words, MEAN)), f32_at(load(words, SCALE))
    has_mean = load(words, MEAN) != 0
    single = load(words, RUN) == 1 and load(words, INNER) > 1
    e = 0
    base, in_row, in_inner = _start(first, words)
    while e < count:
        group, run = base + in_inner // load(words, RUN), min(_run_at(in_row, in_inner, words), count - e)
        target = advance(z, e)
        if single:
            s = advance(scales, group)
            if has_mean:
                m = advance(means, group)
                for i in range(run):
                    store(target, i, load(target, i) * load(s, i) + load(m, i))
            else:
                for i in range(run):
                    store(target, i, load(target, i) * load(s, i))
        elif has_mean:
            mean, scale = load(means, group), load(scales, group)
            for i in range(run):
                store(target, i, load(target, i) * scale + mean)
        else:
            scale = load(scales, group)
            for i in range(run):
                store(target, i, load(target, i) * scale)
        base, in_row, in_inner = _advance(base, in_row, in_inner, run, words)
        e += run
    if limit < np.float32(np.inf):
        for i in range(count):
            y = load(z, i)
            y = limit if y > limit else y
            store(z, i, -limit if y < -limit else y)
