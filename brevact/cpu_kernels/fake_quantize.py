"""Kernel of fake quantization to integers: `integer_ops.fake_quantize`'s bytes, in one pass over the elements."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.floats import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    KINDS,
    bfloat16_to_float,
    emit,
    float_to_bfloat16,
    float_to_half,
    half_to_float,
    stage,
)
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

NUMEL, BIT_WIDTH, LOWEST, HIGHEST, ROUNDING, RECTIFIES, CLIPS, HAS_SPARE, INNER, GROUPS, REPEATS, ROWS = range(12)
"""Fields of the words of a call: those of `IntegerPlan`."""

SCALE, SCALES, ZERO_POINT, ZERO_POINTS = range(12, 16)
"""Addresses and numbers of float32 scales and zero points: one, or one per group."""

X, OUT, VALUES, CODES, MASK, RESIDUAL, MISSING, LEVELS, STEPS, WIDTH, SEED = range(16, 27)
"""Addresses of arrays, 0 for none; bits of a residual; the key of random bits."""

KIND = 27
"""Code of the type of elements; each op rounds to it."""

_FLOOR, _CEIL, _TO_ZERO, _DPU = range(1, 5)


@inlined
def fill_groups(words, source, count_of, first, count, out):
    numbers, inner, rows = f32_at(load(words, source)), load(words, INNER), load(words, ROWS)
    if load(words, count_of) == 1:
        number = load(numbers, 0)
        for e in range(count):
            store(out, e, number)
        return
    columns = load(words, GROUPS) // rows
    of_row = columns * load(words, REPEATS)
    e = 0
    while e < count:
        place = (first + e) // inner
        column = place % columns
        group = place // of_row % rows * columns + column
        if inner == 1:
            run = min(columns - column, count - e)
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
    fill_groups(words, SCALE, SCALES, first, count, scales)
    fill_groups(words, ZERO_POINT, ZERO_POINTS, first, count, zero_points)


@inlined
def settle(values, kind, count):
    """Round float32 values to a type, as each op of torch does."""
    if kind == BFLOAT16:
        for e in range(count):
            store(values, e, bfloat16_to_float(float_to_bfloat16(load(values, e))))
    elif kind == FLOAT16:
        for e in range(count):
            store(values, e, half_to_float(float_to_half(load(values, e))))


@inlined
def shift_values(x, values, rectifies, count, scales, zero_points, kind, shifted):
    """x / s + z, of the output of a ReLU if it rectifies, which `values` receive unless they are x."""
    for e in range(count):
        v = load(x, e)
        v = np.float32(0.0) if v < np.float32(0.0) and rectifies else v
        store(values, e, v)
        store(shifted, e, v / load(scales, e))
    settle(shifted, kind, count)
    for e in range(count):
        store(shifted, e, load(shifted, e) + load(zero_points, e))
    settle(shifted, kind, count)


@inlined
def round_values(shifted, count, rounding, rounded):
    if rounding == 0:
        for e in range(count):
            store(rounded, e, rint(load(shifted, e)))
    elif rounding == _FLOOR:
        for e in range(count):
            store(rounded, e, np.float32(np.floor(load(shifted, e))))
    elif rounding == _CEIL:
        for e in range(count):
            store(rounded, e, np.float32(np.ceil(load(shifted, e))))
    elif rounding == _TO_ZERO:
        for e in range(count):
            store(rounded, e, np.float32(np.trunc(load(shifted, e))))
    else:
        for e in range(count):
            t = load(shifted, e)
            below = np.float32(np.floor(t))
            is_half = (t < np.float32(0.0)) & (np.float32(t - below) == np.float32(0.5))
            store(rounded, e, np.float32(below + np.float32(1.0)) if is_half else rint(t))


@inlined
def _clip(rounded, count, lowest, highest, spare, scales, zero_points, kind, out, numbers):
    """Write (q - z) s, and numbers of codes q - lowest; return how many q are NaN."""
    missing = np.int32(0)
    for e in range(count):
        q = load(rounded, e)
        q = highest if q > highest else q
        q = lowest if q < lowest else q
        store(out, e, q - load(zero_points, e))
        missing = np.int32(missing + np.int32(q != q))
        store(numbers, e, q - lowest if q == q else spare)
    settle(out, kind, count)
    for e in range(count):
        store(out, e, load(out, e) * load(scales, e))
    return missing


@inlined
def _all_of_nearest(
    x, scales, zero_points, count, lowest, highest, spare, rectifies, values, shifted, rounded, out, numbers
):
    """All in one loop, for float32 rounded to nearest; return how many q are NaN."""
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
    """Bytes, 1 per element that has a gradient, else 0."""
    if clips and rectifies:
        for e in range(count):
            r = load(rounded, e)
            is_cut = (r > highest) | (r < lowest) | (load(x, e) <= np.float32(0.0))
            store(bits, e, np.uint8(np.uint8(is_cut) ^ np.uint8(1)))
    elif clips:
        for e in range(count):
            r = load(rounded, e)
            store(bits, e, np.uint8(np.uint8((r > highest) | (r < lowest)) ^ np.uint8(1)))
    else:
        for e in range(count):
            is_cut = (load(x, e) <= np.float32(0.0)) & (rectifies != 0)
            store(bits, e, np.uint8(np.uint8(is_cut) ^ np.uint8(1)))


@inlined
def _keep_residuals(shifted, rounded, count, bits, low, high, kind):
    """Write x / s + z - round(x / s + z) over the first, within bounds, and where there is no gradient low - 1."""
    for e in range(count):
        store(shifted, e, load(shifted, e) - load(rounded, e))
    settle(shifted, kind, count)
    for e in range(count):
        r = load(shifted, e)
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
    numel, bit_width, rounding = load(words, NUMEL), load(words, BIT_WIDTH), load(words, ROUNDING)
    lowest, highest = np.float32(load(words, LOWEST)), np.float32(load(words, HIGHEST))
    rectifies, clips, has_spare = load(words, RECTIFIES), load(words, CLIPS), load(words, HAS_SPARE)
    spare = np.float32((np.int64(1) << bit_width) - 1) if has_spare else np.float32(0.0)
    width, k = load(words, WIDTH), halves_of(load(words, SEED))
    scales, zero_points = f32_scratch(BLOCK), f32_scratch(BLOCK)
    shifted, rounded, numbers, spent = f32_scratch(BLOCK), f32_scratch(BLOCK), f32_scratch(BLOCK), f32_scratch(BLOCK)
    staged, made, kind = f32_scratch(BLOCK), f32_scratch(BLOCK), load(words, KIND)
    bits = u8_scratch(BLOCK)
    columns = BLOCK // 8
    random = u32_scratch(columns), u32_scratch(columns), u32_scratch(columns), u32_scratch(columns)
    joined = u32_scratch(columns), u32_scratch(columns)
    single = load(words, SCALES) == 1 and load(words, ZERO_POINTS) == 1
    fill_numbers(words, 0, BLOCK if single else 0, scales, zero_points)
    is_fused = kind == FLOAT32 and rounding == 0
    for index in range(start, stop):
        first = index * BLOCK
        count = min(BLOCK, numel - first)
        columns = (count + 7) // 8
        if not single:
            fill_numbers(words, first, count, scales, zero_points)
        x = stage(load(words, X), kind, first, count, staged)
        direct = kind == FLOAT32
        out = advance(f32_at(load(words, OUT)), first) if direct else made
        values = advance(f32_at(load(words, VALUES)), first) if direct and load(words, VALUES) else spent
        if is_fused:
            missing = _all_of_nearest(
                x, scales, zero_points, count, lowest, highest, spare, rectifies, values, shifted, rounded, out, numbers
            )
        else:
            shift_values(x, values, rectifies, count, scales, zero_points, kind, shifted)
            if load(words, VALUES) and not direct:
                emit(spent, load(words, VALUES), kind, first, count)
            round_values(shifted, count, rounding, rounded)
            missing = _clip(rounded, count, lowest, highest, spare, scales, zero_points, kind, out, numbers)
            if not direct:
                emit(made, load(words, OUT), kind, first, count)
        if missing != np.int32(0) and load(words, MISSING):
            store(u8_at(load(words, MISSING)), 0, np.uint8(1))
        if load(words, CODES):
            codes = u8_at(load(words, CODES))
            write_codes(numbers, first, count, bit_width, False, k, random, joined, codes)
        is_quick = is_fused and width == 2 and clips and load(words, RESIDUAL)
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
                _keep_residuals(shifted, rounded, count, bits, load(levels, 1), load(levels, size - 1), kind)
                place(shifted, count, levels, steps, size, True, numbers, spent)
                top = np.float32(size - 1)
                for e in range(count):
                    store(numbers, e, load(numbers, e) if load(shifted, e) == load(shifted, e) else top)
            residuals = u8_at(load(words, RESIDUAL))
            write_codes(numbers, first, count, width, True, k, random, joined, residuals)


def reads(x: Tensor, plan: IntegerPlan, scale: Tensor, zero_point: Tensor, *others: Tensor | None) -> bool:
    """Whether all are float32, or of one 16-bit type, for which a single scale or zero point may be of another."""
    dtype = x.dtype
    for each in others:
        if each is not None and each.dtype is not dtype:
            return False
    if dtype is torch.float32:
        return scale.dtype is zero_point.dtype is torch.float32
    is_known = all(each.numel() == 1 or each.dtype is dtype for each in (scale, zero_point))
    return is_known and dtype in (torch.bfloat16, torch.float16)


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
    if not reads(x, plan, scale, zero_point, out, values) or (codes is not None and plan.bit_width > 8):
        return NotImplemented
    of_residual, rows = (0, 0, 0, 0), None
    if residual is not None and seed is not None:
        rows = residual_of.rows(x.device)
        of_residual = (rows[0].data_ptr(), rows[1].data_ptr(), residual_of.bit_width, int(seed))
    arrays = x, out, values, codes, mask, residual, missing
    run(fake_quantize_blocks, plan, scale, zero_point, arrays, *of_residual, KINDS[x.dtype])


def run(
    kernel: Any,
    plan: IntegerPlan,
    scale: Tensor,
    zero_point: Tensor,
    arrays: tuple[Tensor | None, ...],
    *words: int,
) -> None:
    scale, zero_point = (z if z.dtype is torch.float32 else z.float() for z in (scale, zero_point))  # exact
    numbers = scale.data_ptr(), scale.numel(), zero_point.data_ptr(), zero_point.numel()
    given = array("q", (*plan, *numbers, *map(address, arrays), *words))  # ctypes takes twice the time
    share(kernel, given.buffer_info()[:1], -(-plan.numel // BLOCK), BLOCK, torch.get_num_threads())
