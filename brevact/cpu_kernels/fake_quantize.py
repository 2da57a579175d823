"""Kernels of fake quantization to integers and of its gradient: `integer_ops`' bytes, in one pass over float32."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.intrinsics import (
    advance,
    f32_at,
    f32_scratch,
    i64_at,
    inlined,
    kernel,
    load,
    store,
    u8_at,
    u8_scratch,
    u32_scratch,
)
from brevact.cpu_kernels.levels import place
from brevact.cpu_kernels.packing import (
    BLOCK,
    bytes_to_codes,
    codes_to_bytes,
    halves_of,
    look_up_row,
    spread_bits,
    write_codes,
)
from brevact.cpu_kernels.teams import share
from brevact.geometry import IntegerPlan

NUMEL, BIT_WIDTH, LOWEST, HIGHEST, RECTIFIES, CLIPS, HAS_SPARE, INNER, GROUPS = range(9)
"""Fields of the words of a call: those of `IntegerPlan`."""

SCALE, SCALES, ZERO_POINT, ZERO_POINTS = range(9, 13)
"""Addresses and numbers of float32 scales and zero points: one, or one per group."""

X, OUT, VALUES, CODES, MASK, RESIDUAL, MISSING, LEVELS, STEPS, WIDTH, SEED = range(13, 24)
"""Addresses of arrays, 0 for none; bits of a residual; the key of random bits. Backward, X is the gradient, OUT that of
the tensor."""

TERMS, PARTS, ROWS = range(24, 27)
"""Backward, addresses, 0 for none, of (k, n) terms and of (k, 64 * blocks) sums of columns; k, 4 where the zero point
learns, else 2."""

_COLUMNS = BLOCK // 8


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
        q = np.rint(t)
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
    bits, q, random = u8_scratch(BLOCK), u8_scratch(BLOCK), u32_scratch(BLOCK // 2)
    single = load(words, SCALES) == 1 and load(words, ZERO_POINTS) == 1
    for index in range(start, stop):
        first = index * BLOCK
        count = min(BLOCK, numel - first)
        columns = (count + 7) // 8
        if index == start or not single:
            fill_numbers(words, first, count, scales, zero_points)
        x, out = advance(f32_at(load(words, X)), first), advance(f32_at(load(words, OUT)), first)
        values = advance(f32_at(load(words, VALUES)), first) if load(words, VALUES) else spent
        missing = _quantize(
            x, scales, zero_points, count, lowest, highest, spare, rectifies, values, shifted, rounded, out, numbers
        )
        if missing != np.int32(0) and load(words, MISSING):
            store(u8_at(load(words, MISSING)), 0, np.uint8(1))
        if load(words, CODES):
            write_codes(numbers, first, count, bit_width, False, k, random, q, u8_at(load(words, CODES)))
        if load(words, MASK) or load(words, RESIDUAL):
            pass_mask(x, rounded, count, lowest, highest, rectifies, clips, bits)
        if load(words, MASK):
            for e in range(count, 8 * columns):
                store(bits, e, np.uint8(0))
            codes_to_bytes(bits, columns, 1, advance(u8_at(load(words, MASK)), first // 8))
        if load(words, RESIDUAL):  # x / s + z - round(x / s + z), within bounds; code 0 where there is no gradient
            levels, size = f32_at(load(words, LEVELS)), (np.int64(1) << width)
            low, high, top = load(levels, 1), load(levels, size - 1), np.float32(size - 1)
            for e in range(count):
                r = load(shifted, e) - load(rounded, e)
                r = low if r < low else r
                store(shifted, e, high if r > high else r)
            place(shifted, count, levels, f32_at(load(words, STEPS)), size, True, numbers)
            for e in range(count):
                t = load(numbers, e) if load(shifted, e) == load(shifted, e) else top
                store(numbers, e, t if load(bits, e) else np.float32(0.0))
            write_codes(numbers, first, count, width, True, k, random, q, u8_at(load(words, RESIDUAL)))


@inlined
def _of_values(g, x, scales, zero_points, count, lowest, highest, rectifies, clips, rounded, target, first, second):
    """Gradients and terms of the scale from the quantized values; nothing is beyond a bound that is NaN."""
    floor = np.float32(0.0) if rectifies else np.float32(np.nan)
    bottom = lowest if clips else np.float32(np.nan)
    top = highest if clips else np.float32(np.nan)
    for e in range(count):
        v, s, z = load(x, e), load(scales, e), load(zero_points, e)
        v = np.float32(0.0) if v < floor else v
        step = v / s
        r = np.rint(step + z)
        store(rounded, e, r)
        through = load(g, e) * s
        through = np.float32(0.0) if (r > top) | (r < bottom) | (v <= floor) else through
        store(target, e, through / s)
        r = highest if r > highest else r
        r = lowest if r < lowest else r
        store(first, e, load(g, e) * (r - z))
        store(second, e, -through * (step / s))


@inlined
def _of_residuals(g, codes, residuals, steps, scales, zero_points, count, lowest, spare, target, first, second):
    """Gradients and terms of the scale. Code 0 means clipped; others have x / s - q for x / s, and NaN or 0 for q."""
    for e in range(count):
        s, code = load(scales, e), np.uint32(load(codes, e))
        number = np.float32(np.int32(code)) + lowest
        q = (np.float32(np.nan) if code == spare else number) - load(zero_points, e)
        through, is_clipped = load(g, e) * s, load(residuals, e) == np.uint8(0)
        through = np.float32(0.0) if is_clipped else through
        store(target, e, through / s)
        store(first, e, load(g, e) * (q if is_clipped else q * np.float32(0.0)))
        store(second, e, -through * (load(steps, e) / s))


@inlined
def _of_zero_point(g, scales, bits, count, first, second):
    """Terms -g s, and g s where nothing was clipped."""
    for e in range(count):
        through = load(g, e) * load(scales, e)
        store(first, e, -through)
        store(second, e, through if load(bits, e) else np.float32(0.0))


@inlined
def _place(words, index, count, row, terms):
    """Write the terms of a row, or the sums of their columns."""
    numel, first = load(words, NUMEL), index * BLOCK
    if load(words, TERMS):
        out = advance(f32_at(load(words, TERMS)), row * numel + first)
        for e in range(count):
            store(out, e, load(terms, e))
    else:
        columns, blocks = (count + 7) // 8, (numel + BLOCK - 1) // BLOCK
        out = advance(f32_at(load(words, PARTS)), (row * blocks + index) * _COLUMNS)
        for e in range(count, 8 * columns):
            store(terms, e, np.float32(0.0))
        for c in range(_COLUMNS):
            store(out, c, load(terms, c) if c < columns else np.float32(0.0))
        for plane in range(1, 8):
            for c in range(columns):
                store(out, c, load(out, c) + load(terms, plane * columns + c))


@kernel
def fake_quantize_backward_blocks(words_at, start, stop):
    words = i64_at(words_at)
    numel, bit_width, has_spare = load(words, NUMEL), load(words, BIT_WIDTH), load(words, HAS_SPARE)
    lowest, highest = np.float32(load(words, LOWEST)), np.float32(load(words, HIGHEST))
    width, rectifies, clips = load(words, WIDTH), load(words, RECTIFIES), load(words, CLIPS)
    of_values, of_residuals = load(words, VALUES) != 0, load(words, RESIDUAL) != 0
    learns = load(words, ROWS) == 4
    scales, zero_points, steps, rounded = f32_scratch(BLOCK), f32_scratch(BLOCK), f32_scratch(BLOCK), f32_scratch(BLOCK)
    one, other = f32_scratch(BLOCK), f32_scratch(BLOCK)
    bits, codes, numbers, row = u8_scratch(BLOCK), u8_scratch(BLOCK), u8_scratch(BLOCK), f32_scratch(256)
    spare = np.uint32((np.int64(1) << bit_width) - 1) if has_spare else np.uint32(0xFFFFFFFF)
    single = load(words, SCALES) == 1 and load(words, ZERO_POINTS) == 1
    for e in range(BLOCK):
        store(bits, e, np.uint8(1))
    for e in range(np.int64(1) << width if of_residuals else 0):
        store(row, e, load(f32_at(load(words, LEVELS)), e))
    for index in range(start, stop):
        first = index * BLOCK
        count = min(BLOCK, numel - first)
        columns = (count + 7) // 8
        if index == start or not single:
            fill_numbers(words, first, count, scales, zero_points)
        g, target = advance(f32_at(load(words, X)), first), advance(f32_at(load(words, OUT)), first)
        if of_values:
            x = advance(f32_at(load(words, VALUES)), first)
            _of_values(g, x, scales, zero_points, count, lowest, highest, rectifies, clips, rounded, target, one, other)
            if learns:
                pass_mask(x, rounded, count, lowest, highest, 0, clips, bits)
        elif of_residuals:
            bytes_to_codes(advance(u8_at(load(words, CODES)), first // 8 * bit_width), columns, bit_width, codes)
            bytes_to_codes(advance(u8_at(load(words, RESIDUAL)), first // 8 * width), columns, width, numbers)
            look_up_row(numbers, count, row, steps)
            _of_residuals(g, codes, numbers, steps, scales, zero_points, count, lowest, spare, target, one, other)
            for e in range(count if learns else 0):
                store(bits, e, np.uint8(load(numbers, e) != np.uint8(0)))
        else:
            if load(words, MASK):
                spread_bits(load(words, MASK), first, count, bits)
            for e in range(count):
                through = load(g, e) * load(scales, e)
                through = through if load(bits, e) else np.float32(0.0)
                store(target, e, through / load(scales, e))
        if of_values or of_residuals:
            _place(words, index, count, 0, one)
            _place(words, index, count, 1, other)
        if learns:
            _of_zero_point(g, scales, bits, count, one, other)
            _place(words, index, count, 2, one)
            _place(words, index, count, 3, other)


@kernel
def decode_integers_blocks(words_at, start, stop):
    words = i64_at(words_at)
    numel, bit_width, lowest = load(words, NUMEL), load(words, BIT_WIDTH), np.float32(load(words, LOWEST))
    spare = (np.int64(1) << bit_width) - 1 if load(words, HAS_SPARE) else np.int64(-1)
    scales, zero_points, codes = f32_scratch(BLOCK), f32_scratch(BLOCK), u8_scratch(BLOCK)
    single = load(words, SCALES) == 1 and load(words, ZERO_POINTS) == 1
    for index in range(start, stop):
        first = index * BLOCK
        count = min(BLOCK, numel - first)
        if index == start or not single:
            fill_numbers(words, first, count, scales, zero_points)
        packed = advance(u8_at(load(words, CODES)), first // 8 * bit_width)
        out = advance(f32_at(load(words, OUT)), first)
        bytes_to_codes(packed, (count + 7) // 8, bit_width, codes)
        for e in range(count):
            code = np.int32(load(codes, e))
            q = np.float32(np.nan) if code == np.int32(spare) else np.float32(code) + lowest
            store(out, e, (q - load(zero_points, e)) * load(scales, e))


def decode_integers(codes: Tensor, plan: IntegerPlan, scale: Tensor, zero_point: Tensor, target: Tensor) -> None:
    if plan.bit_width > 8 or not are_float32(target, scale, zero_point):
        return NotImplemented
    arrays = None, target, None, codes, None, None, None
    run(decode_integers_blocks, plan, scale, zero_point, arrays, 0, 0, 0, 0)


def fake_quantize_backward(
    grad, plan, scale, zero_point, residual_of, codes, mask, values, residual, target, terms, parts
):
    if not are_float32(grad, scale, zero_point, values, target, terms) or (codes is not None and plan.bit_width > 8):
        return NotImplemented
    counted = terms if parts is None else parts
    rows = 0 if counted is None else counted.shape[0]
    levels, width = (None, 0) if residual is None else (residual_of.rows(grad.device)[0], residual_of.bit_width)
    arrays = grad, target, values, codes, mask, residual, None
    words = address(levels), 0, width, 0, address(terms), address(parts), rows
    run(fake_quantize_backward_blocks, plan, scale, zero_point, arrays, *words)


def are_float32(*arrays: Tensor | None) -> bool:
    return all(x is None or x.dtype is torch.float32 for x in arrays)


def address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def fake_quantize(x, plan, scale, zero_point, residual_of, seed, out, values, codes, mask, residual, missing):
    if not are_float32(x, scale, zero_point, out, values) or (codes is not None and plan.bit_width > 8):
        return NotImplemented
    of_residual, rows = (0, 0, 0, 0), None
    if residual is not None and seed is not None:
        rows = residual_of.rows(x.device)
        of_residual = (rows[0].data_ptr(), rows[1].data_ptr(), residual_of.bit_width, int(seed))
    arrays = x, out, values, codes, mask, residual, missing
    run(fake_quantize_blocks, plan, scale, zero_point, arrays, *of_residual)


def run(
    kernel: Any, plan: IntegerPlan, scale: Tensor, zero_point: Tensor, arrays: tuple[Tensor | None, ...], *words: int
) -> None:
    numbers = scale.data_ptr(), scale.numel(), zero_point.data_ptr(), zero_point.numel()
    given = array("q", (*plan, *numbers, *map(address, arrays), *words))  # ctypes takes twice the time
    share(kernel, given.buffer_info()[:1], -(-plan.numel // BLOCK), BLOCK)
