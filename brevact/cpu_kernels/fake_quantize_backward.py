"""Kernel of the gradient of fake quantization: `integer_ops.fake_quantize_backward`'s bytes, in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from brevact.cpu_kernels.fake_quantize import (
    BIT_WIDTH,
    BLOCK,
    CLIPS,
    CODES,
    HAS_SPARE,
    HIGHEST,
    LEVELS,
    LOWEST,
    MASK,
    NUMEL,
    OUT,
    RECTIFIES,
    RESIDUAL,
    SCALES,
    VALUES,
    WIDTH,
    ZERO_POINTS,
    X,
    address,
    are_float32,
    fill_numbers,
    pass_mask,
    run,
)
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
from brevact.cpu_kernels.packing import bytes_to_codes, spread_bits
from brevact.geometry import IntegerPlan

TERMS, PARTS, ROWS = range(24, 27)
"""Addresses, 0 for none, of (k, n) terms and of (k, 64 * blocks) sums of columns; k, 4 where the zero point learns,
else 2. X is the gradient, OUT that of the tensor."""

_COLUMNS = BLOCK // 8


@inlined
def _unpack(codes, count, bit_width, lowest, has_spare, zero_points, q):
    """Integers less zero points, of codes."""
    spare = np.uint32((np.int64(1) << bit_width) - 1) if has_spare else np.uint32(0xFFFFFFFF)
    for e in range(count):
        code = load(codes, e)
        number = np.float32(np.int32(code)) + lowest
        store(q, e, (np.float32(np.nan) if code == spare else number) - load(zero_points, e))


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
        r = rint(step + z)
        store(rounded, e, r)
        through = load(g, e) * s
        through = np.float32(0.0) if (r > top) | (r < bottom) | (v <= floor) else through
        store(target, e, through / s)
        r = highest if r > highest else r
        r = lowest if r < lowest else r
        store(first, e, load(g, e) * (r - z))
        store(second, e, -through * (step / s))


@inlined
def _levels_of(numbers, levels, width, count, out):
    """Residuals of their codes; of two bits by comparisons, which take less than to look them up."""
    if width == 2:
        clipped, first, second, third = load(levels, 0), load(levels, 1), load(levels, 2), load(levels, 3)
        for e in range(count):
            number = load(numbers, e)
            below = clipped if number == np.uint32(0) else first
            above = second if number == np.uint32(2) else third
            store(out, e, below if number < np.uint32(2) else above)
    else:
        for e in range(count):
            store(out, e, load(levels, np.int64(load(numbers, e))))


@inlined
def _of_residuals(g, codes, residuals, steps, scales, zero_points, count, lowest, spare, target, first, second):
    """Gradients and terms of the scale. Code 0 means clipped; others have x / s - q for x / s, and NaN or 0 for q."""
    for e in range(count):
        s, code = load(scales, e), load(codes, e)
        number = np.float32(np.int32(code)) + lowest
        q = (np.float32(np.nan) if code == spare else number) - load(zero_points, e)
        through, is_clipped = load(g, e) * s, load(residuals, e) == np.uint32(0)
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
    bits, codes, numbers = u8_scratch(BLOCK), u32_scratch(BLOCK), u32_scratch(BLOCK)
    spare = np.uint32((np.int64(1) << bit_width) - 1) if has_spare else np.uint32(0xFFFFFFFF)
    single = load(words, SCALES) == 1 and load(words, ZERO_POINTS) == 1
    fill_numbers(words, 0, BLOCK if single else 0, scales, zero_points)
    for e in range(BLOCK):
        store(bits, e, np.uint8(1))
    for index in range(start, stop):
        first = index * BLOCK
        count = min(BLOCK, numel - first)
        columns = (count + 7) // 8
        if not single:
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
            _levels_of(numbers, f32_at(load(words, LEVELS)), width, count, steps)
            _of_residuals(g, codes, numbers, steps, scales, zero_points, count, lowest, spare, target, one, other)
            for e in range(count if learns else 0):
                store(bits, e, np.uint8(load(numbers, e) != np.uint32(0)))
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
    numel, bit_width, has_spare = load(words, NUMEL), load(words, BIT_WIDTH), load(words, HAS_SPARE)
    lowest = np.float32(load(words, LOWEST))
    scales, zero_points, q, codes = f32_scratch(BLOCK), f32_scratch(BLOCK), f32_scratch(BLOCK), u32_scratch(BLOCK)
    single = load(words, SCALES) == 1 and load(words, ZERO_POINTS) == 1
    fill_numbers(words, 0, BLOCK if single else 0, scales, zero_points)
    for index in range(start, stop):
        first = index * BLOCK
        count = min(BLOCK, numel - first)
        if not single:
            fill_numbers(words, first, count, scales, zero_points)
        columns = (count + 7) // 8
        bytes_to_codes(advance(u8_at(load(words, CODES)), first // 8 * bit_width), columns, bit_width, codes)
        _unpack(codes, count, bit_width, lowest, has_spare, zero_points, q)
        out = advance(f32_at(load(words, OUT)), first)
        for e in range(count):
            store(out, e, load(q, e) * load(scales, e))


def decode_integers(codes: Tensor, plan: IntegerPlan, scale: Tensor, zero_point: Tensor, target: Tensor) -> None:
    if plan.bit_width > 8 or not are_float32(target, scale, zero_point):
        return NotImplemented
    arrays = None, target, None, codes, None, None, None
    run(decode_integers_blocks, plan, scale, zero_point, arrays, 0, 0, 0, 0)


def fake_quantize_backward(
    grad: Tensor,
    plan: IntegerPlan,
    scale: Tensor,
    zero_point: Tensor,
    residual_of: Any,
    codes: Tensor | None,
    mask: Tensor | None,
    values: Tensor | None,
    residual: Tensor | None,
    target: Tensor,
    terms: Tensor | None,
    parts: Tensor | None,
) -> None:
    if not are_float32(grad, scale, zero_point, values, target, terms) or (codes is not None and plan.bit_width > 8):
        return NotImplemented
    counted = terms if parts is None else parts
    rows = 0 if counted is None else counted.shape[0]
    levels, width = (None, 0) if residual is None else (residual_of.rows(grad.device)[0], residual_of.bit_width)
    arrays = grad, target, values, codes, mask, residual, None
    words = address(levels), 0, width, 0, address(terms), address(parts), rows
    run(fake_quantize_backward_blocks, plan, scale, zero_point, arrays, *words)
