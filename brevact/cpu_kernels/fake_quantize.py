"""Kernel of fake quantization to integers: `integer_ops.fake_quantize`'s bytes, in one pass over float32 elements."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.grids import place
from brevact.cpu_kernels.memory import (
    advance,
    f32_at,
    f32_scratch,
    i64_at,
    inlined,
    kernel,
    load,
    rint,
    store,
    u8_at,
    u8_scratch,
    u32_scratch,
)
from brevact.cpu_kernels.packing import bits_to_bytes
from brevact.cpu_kernels.rounding import halves_of, write_codes
from brevact.cpu_kernels.teams import share
from brevact.geometry import IntegerPlan

BLOCK = 512

NUMEL, BIT_WIDTH, LOWEST, HIGHEST, RECTIFIES, CLIPS, HAS_SPARE, INNER, GROUPS = range(9)
"""Fields of the words of a call: those of `IntegerPlan`."""

SCALE, SCALES, ZERO_POINT, ZERO_POINTS = range(9, 13)
"""Addresses and numbers of float32 scales and zero points: one, or one per group."""

X, OUT, VALUES, CODES, MASK, RESIDUAL, MISSING, LEVELS, STEPS, WIDTH, SEED = range(13, 24)
"""Addresses of arrays, 0 for none; bits of a residual; the key of random bits."""


@inlined
def _fill_groups(words, source, count_of, first, count, out):
    numbers, inner, groups = f32_at(load(words, source)), load(words, INNER), load(words, GROUPS)
    if load(words, count_of) == 1:
        number = load(numbers, 0)
        for e in range(count):
            store(out, e, number)
        return
    e = 0
    while e < count:
        group = (first + e) // inner % groups
        if inner == 1:
            run = min(groups - group, count - e)
            for g in range(run):
                store(out, e + g, load(numbers, group + g))
        else:
            run = min(inner - (first + e) % inner, count - e)
            number = load(numbers, group)
            for g in range(e, e + run):
                store(out, g, number)
        e += run


@inlined
def fill_numbers(words, first, count, scales, zero_points):
    """Write scale and zero point of each element of a block."""
    _fill_groups(words, SCALE, SCALES, first, count, scales)
    _fill_groups(words, ZERO_POINT, ZERO_POINTS, first, count, zero_points)


@inlined
def _quantize(x, scales, zero_points, count, lowest, highest, spare, rectifies, values, shifted, rounded, out, numbers):
    """Write x / s + z, this rounded, (q - z) s, and numbers of codes q - lowest; return how many q are NaN.

    `values` receive x, or the output of a ReLU in front if it rectifies.
    """
    missing, floor = np.int32(0), np.float32(0.0) if rectifies else np.float32(np.nan)
    for e in range(count):
        v, s, z = load(x, e), load(scales, e), load(zero_points, e)
        v = np.float32(0.0) if v < floor else v
        store(values, e, v)
        t = v / s + z
        q = rint(t)
        store(shifted, e, t)
        store(rounded, e, q)
        q = highest if q > highest else q
        q = lowest if q < lowest else q
        store(out, e, (q - z) * s)
        missing = np.int32(missing + np.int32(q != q))
        store(numbers, e, q - lowest if q == q else spare)
    return missing


@inlined
def pass_mask(x, rounded, count, lowest, highest, rectifies, clips, bits):
    """Bytes, 1 per element that has a gradient, else 0; nothing is beyond a bound that is NaN."""
    floor = np.float32(0.0) if rectifies else np.float32(np.nan)
    bottom = lowest if clips else np.float32(np.nan)
    top = highest if clips else np.float32(np.nan)
    for e in range(count):
        r = load(rounded, e)
        is_cut = (r > top) | (r < bottom) | (load(x, e) <= floor)
        store(bits, e, np.uint8(np.uint8(is_cut) ^ np.uint8(1)))


@inlined
def _keep_residuals(shifted, rounded, count, bits, low, high):
    """Write x / s + z - round(x / s + z) over the first, within bounds, and where there is no gradient low - 1."""
    for e in range(count):
        r = load(shifted, e) - load(rounded, e)
        r = low if r < low else r
        r = high if r > high else r
        store(shifted, e, r if load(bits, e) else low - np.float32(1.0))


@inlined
def _place_two_bits(x, shifted, rounded, count, lowest, highest, rectifies, levels, steps, numbers):
    """Positions of float32 residuals on their levels of two bits, all in one loop: see `pass_mask` and `place`."""
    floor = np.float32(0.0) if rectifies else np.float32(np.nan)
    first, second, third = load(levels, 1), load(levels, 2), load(levels, 3)
    per_first, per_second = load(steps, 1), load(steps, 2)
    for e in range(count):
        q = load(rounded, e)
        left = load(shifted, e) - q
        left = first if left < first else left
        left = third if left > third else left
        below, above = (left - first) * per_first, (left - second) * per_second
        below = below if below < np.float32(1.0) else np.float32(1.0)
        above = above if above < np.float32(1.0) else np.float32(1.0)
        t = np.float32(2.0) + above if left >= second else np.float32(1.0) + below
        t = t if left == left else np.float32(3.0)
        is_cut = (q > highest) | (q < lowest) | (load(x, e) <= floor)
        store(numbers, e, np.float32(0.0) if is_cut else t)


@kernel
def fake_quantize_blocks(words_at, start, stop):
    words = i64_at(words_at)
    numel, bit_width = load(words, NUMEL), load(words, BIT_WIDTH)
    lowest, highest = np.float32(load(words, LOWEST)), np.float32(load(words, HIGHEST))
    rectifies, clips, has_spare = load(words, RECTIFIES), load(words, CLIPS), load(words, HAS_SPARE)
    spare = np.float32((np.int64(1) << bit_width) - 1) if has_spare else np.float32(0.0)
    width, k = load(words, WIDTH), halves_of(load(words, SEED))
    scales, zero_points = f32_scratch(BLOCK), f32_scratch(BLOCK)
    shifted, rounded, numbers, spent = f32_scratch(BLOCK), f32_scratch(BLOCK), f32_scratch(BLOCK), f32_scratch(BLOCK)
    bits = u8_scratch(BLOCK)
    columns = BLOCK // 8
    random = u32_scratch(columns), u32_scratch(columns), u32_scratch(columns), u32_scratch(columns)
    joined = u32_scratch(columns), u32_scratch(columns)
    single = load(words, SCALES) == 1 and load(words, ZERO_POINTS) == 1
    fill_numbers(words, 0, BLOCK if single else 0, scales, zero_points)
    for index in range(start, stop):
        first = index * BLOCK
        count = min(BLOCK, numel - first)
        columns = (count + 7) // 8
        if not single:
            fill_numbers(words, first, count, scales, zero_points)
        x, out = advance(f32_at(load(words, X)), first), advance(f32_at(load(words, OUT)), first)
        values = advance(f32_at(load(words, VALUES)), first) if load(words, VALUES) else spent
        missing = _quantize(
            x, scales, zero_points, count, lowest, highest, spare, rectifies, values, shifted, rounded, out, numbers
        )
        if missing != np.int32(0) and load(words, MISSING):
            store(u8_at(load(words, MISSING)), 0, np.uint8(1))
        if load(words, CODES):
            codes = u8_at(load(words, CODES))
            write_codes(numbers, first, count, bit_width, False, k, random, joined, codes)
        is_quick = width == 2 and clips and load(words, RESIDUAL)
        if load(words, MASK) or (load(words, RESIDUAL) and not is_quick):
            pass_mask(x, rounded, count, lowest, highest, rectifies, clips, bits)
            for e in range(count, 8 * columns):
                store(bits, e, np.uint8(0))
        if load(words, MASK):
            bits_to_bytes(bits, columns, advance(u8_at(load(words, MASK)), first // 8))
        if load(words, RESIDUAL):
            levels, size = f32_at(load(words, LEVELS)), (np.int64(1) << width)
            steps = f32_at(load(words, STEPS))
            if is_quick:
                _place_two_bits(x, shifted, rounded, count, lowest, highest, rectifies, levels, steps, numbers)
            else:
                _keep_residuals(shifted, rounded, count, bits, load(levels, 1), load(levels, size - 1))
                place(shifted, count, levels, steps, size, True, numbers, spent)
                top = np.float32(size - 1)
                for e in range(count):
                    store(numbers, e, load(numbers, e) if load(shifted, e) == load(shifted, e) else top)
            residuals = u8_at(load(words, RESIDUAL))
            write_codes(numbers, first, count, width, True, k, random, joined, residuals)


def are_float32(*arrays: Tensor | None) -> bool:
    return all(x is None or x.dtype is torch.float32 for x in arrays)


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def fake_quantize(
    x: Tensor,
    plan: IntegerPlan,
    scale: Tensor,
    zero_point: Tensor,
    residual_of: Any,
    seed: int | Tensor | None,
    out: Tensor,
    values: Tensor | None,
    codes: Tensor | None,
    mask: Tensor | None,
    residual: Tensor | None,
    missing: Tensor | None,
) -> None:
    if not are_float32(x, scale, zero_point, out, values) or (codes is not None and plan.bit_width > 8):
        return NotImplemented
    of_residual, rows = (0, 0, 0, 0), None
    if residual is not None and seed is not None:
        rows = residual_of.rows(x.device)
        of_residual = (rows[0].data_ptr(), rows[1].data_ptr(), residual_of.bit_width, int(seed))
    arrays = x, out, values, codes, mask, residual, missing
    run(fake_quantize_blocks, plan, scale, zero_point, arrays, *of_residual)


def run(
    kernel: Any,
    plan: IntegerPlan,
    scale: Tensor,
    zero_point: Tensor,
    arrays: tuple[Tensor | None, ...],
    *words: int,
) -> None:
    numbers = scale.data_ptr(), scale.numel(), zero_point.data_ptr(), zero_point.numel()
    given = array("q", (*plan, *numbers, *map(address, arrays), *words))  # ctypes takes twice the time
    share(kernel, given.buffer_info()[:1], -(-plan.numel // BLOCK), BLOCK, torch.get_num_threads())
