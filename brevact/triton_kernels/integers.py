"""Fake quantization to integers, one read of the elements forward, one of the gradient backward; as `integer_ops`.

Brevitas' ops are computed in their order, each rounded once to the elements' dtype. Pointers of unwanted arrays are
None. Scales and zero points are one number, or one per group. With NUMBERS_ROUND they are first rounded to the
elements' dtype: CUDA does so with 0-d tensors of another dtype, the CPU does not.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from brevact.geometry import DEFAULT_BLOCK, Geometry, IntegerPlan
from brevact.triton_kernels.floats import (
    cast,
    float_of_code,
    maximum,
    minimum,
    nearest_int,
    parts_of,
    quotient_to_clip,
    rint,
    settle,
    widen,
)
from brevact.triton_kernels.grids import codes_on_row
from brevact.triton_kernels.groups import group_of, is_finite
from brevact.triton_kernels.launch import Program, over_blocks, seed_on
from brevact.triton_kernels.philox import seed_words
from brevact.triton_kernels.tiles import element_mask, load_bytes, load_planes, plane_of, store_codes, tile, unpack_code

BLOCK = tl.constexpr(512)
_COLUMNS = tl.constexpr(64)
_UNALIGNED = ["scale_ptr", "zero_ptr", "levels_ptr", "steps_ptr", "seed_ptr", "missing_ptr"]
_SIZES = ["numel", "inner", "groups"]


@triton.jit
def _numbers(
    i: tl.constexpr, tile, scale_ptr, zero_ptr, inner, groups, valid, dtype: tl.constexpr,
    NUMBERS_ROUND: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, BY_ROW: tl.constexpr,
):  # fmt: skip
    """Scales and zero points of plane i of a tile, per row if BY_ROW, else per element, or those of all."""
    first, row, column, stride, _ = tile
    group = 0
    if SCALES or ZEROS:
        offset = row * BLOCK + i * stride
        if not BY_ROW:
            offset += column
        group = group_of(first, offset, inner, groups)
    scale = _number(scale_ptr, group, valid, dtype, NUMBERS_ROUND, SCALES)
    return scale, _number(zero_ptr, group, valid, dtype, NUMBERS_ROUND, ZEROS)


@triton.jit
def _number(pointer, group, valid, dtype: tl.constexpr, NUMBERS_ROUND: tl.constexpr, GROUPED: tl.constexpr):
    if GROUPED:
        number = widen(tl.load(pointer + group, mask=valid, other=1.0))
    else:
        number = widen(tl.load(pointer))
    if NUMBERS_ROUND:
        number = settle(number, dtype)
    return number


@triton.jit
def _shifted(x, scale, zero, dtype: tl.constexpr):
    return settle(settle(tl.div_rn(x, tl.zeros_like(x) + scale), dtype) + zero, dtype)


@triton.jit
def _clipped(r, lowest, highest):
    r = minimum(r, highest)
    return tl.where(r < lowest, lowest, r)  # the larger of two zeros would lose a sign


@triton.jit
def _passes(x, r, q, RECTIFIES: tl.constexpr, CLIPS: tl.constexpr):
    if CLIPS and RECTIFIES:
        cut = (q < r) | (q > r) | (x <= 0.0)
    elif CLIPS:
        cut = (q < r) | (q > r)
    elif RECTIFIES:
        cut = x <= 0.0
    else:
        cut = tl.zeros_like(x) != 0.0
    return cut == 0


@triton.jit
def _integer(codes, i: tl.constexpr, lowest, BIT_WIDTH: tl.constexpr, HAS_SPARE: tl.constexpr):
    """Integers of plane i, NaN for the spare code."""
    code = unpack_code(codes, i, BIT_WIDTH)
    q = float_of_code(code) + lowest
    if HAS_SPARE:
        q = tl.where(code == (1 << BIT_WIDTH) - 1, float("nan"), q)
    return q


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_UNALIGNED)
def fake_quantize_kernel(
    x_ptr, scale_ptr, zero_ptr, levels_ptr, steps_ptr, seed_ptr,
    out_ptr, values_ptr, codes_ptr, mask_ptr, residual_ptr, missing_ptr,
    lowest, highest, numel, inner, groups,
    BIT_WIDTH: tl.constexpr, WIDTH: tl.constexpr, RECTIFIES: tl.constexpr,
    CLIPS: tl.constexpr, HAS_SPARE: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
    NUMBERS_ROUND: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    TOP: tl.constexpr = (1 << WIDTH) - 1
    FEW_SCALES: tl.constexpr = CLIPS and BIT_WIDTH <= 16 and (ALIGNED or not SCALES)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    parts_of_one = parts_of(_number(scale_ptr, 0, True, dtype, NUMBERS_ROUND, False))
    if residual_ptr is not None:
        beyond, least, most = tl.load(levels_ptr), tl.load(levels_ptr + 1), tl.load(levels_ptr + TOP)
    for RAGGED in tl.static_range(2):
        at = tile(numel, BLOCK, ROWS, _COLUMNS, RAGGED, IN_INT64=True)
        if at[4] > 0:
            planes = load_planes(x_ptr, at, BLOCK, RAGGED)
            words = seed_words(at, seed_ptr, BLOCK, seed_ptr is not None)
            spare = (1 << BIT_WIDTH) - 1.0 if HAS_SPARE else 0.0
            codes, bits, residuals, missing = (), (), (), 0.0
            for i in tl.static_range(8):
                valid = element_mask(i, at, RAGGED)
                scale, zero = _numbers(
                    i, at, scale_ptr, zero_ptr, inner, groups, valid, dtype,
                    NUMBERS_ROUND, SCALES, ZEROS, ALIGNED and not RAGGED,
                )  # fmt: skip
                x = widen(planes[i])
                v = x
                if RECTIFIES:
                    v = tl.where(x < 0.0, 0.0, x)
                if FEW_SCALES:
                    power, divisor, inverse = parts_of(scale) if SCALES else parts_of_one
                    t = settle(settle(quotient_to_clip(x, power, divisor, inverse, RECTIFIES), dtype) + zero, dtype)
                    r = rint(t, IS_CLIPPED=True)
                else:
                    t = _shifted(v, scale, zero, dtype)
                    r = rint(t)
                q = _clipped(r, lowest, highest)
                if codes_ptr is not None:
                    code = nearest_int(tl.where(q == q, q - lowest, spare))
                    if RAGGED:
                        code = tl.where(valid, code, 0)
                    codes += (code,)
                if missing_ptr is not None:
                    missing += (tl.where(valid, q, 0.0) if RAGGED else q) * 0.0  # NaN where one is
                if mask_ptr is not None or residual_ptr is not None:
                    passes = _passes(x, r, q, RECTIFIES, CLIPS)
                    if RAGGED:
                        passes = passes & valid
                if mask_ptr is not None:
                    bits += (passes.to(tl.int32),)
                if residual_ptr is not None:
                    left = settle(t - r, dtype)
                    left = tl.where(passes, maximum(minimum(left, most), least), beyond)
                    code = codes_on_row(left, words, levels_ptr, steps_ptr, i, TOP + 1, WIDTH, True)
                    code = tl.where(is_finite(left), code, TOP)
                    if RAGGED:
                        code = tl.where(valid, code, 0)
                    residuals += (code,)
                tl.store(plane_of(out_ptr, i, at, BLOCK), cast(settle(q - zero, dtype) * scale, dtype), mask=valid)
                if values_ptr is not None:
                    tl.store(plane_of(values_ptr, i, at, BLOCK), cast(v, dtype), mask=valid)
            if codes_ptr is not None:
                store_codes(codes_ptr, codes, at, BLOCK, BIT_WIDTH, RAGGED)
            if mask_ptr is not None:
                store_codes(mask_ptr, bits, at, BLOCK, 1, RAGGED)
            if residual_ptr is not None:
                store_codes(residual_ptr, residuals, at, BLOCK, WIDTH, RAGGED)
            if missing_ptr is not None:
                tl.store(missing_ptr + (at[1] * 0 + at[2] * 0), 1, mask=missing != missing)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_UNALIGNED)
def fake_quantize_backward_kernel(
    g_ptr, scale_ptr, zero_ptr, levels_ptr, codes_ptr, mask_ptr, values_ptr, residual_ptr,
    target_ptr, terms_ptr, more_terms_ptr, zero_terms_ptr, more_zero_terms_ptr,
    parts_ptr, more_parts_ptr, zero_parts_ptr, more_zero_parts_ptr,
    lowest, highest, numel, inner, groups,
    BIT_WIDTH: tl.constexpr, WIDTH: tl.constexpr, RECTIFIES: tl.constexpr,
    CLIPS: tl.constexpr, HAS_SPARE: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
    NUMBERS_ROUND: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = g_ptr.dtype.element_ty
    AGAIN: tl.constexpr = values_ptr is not None
    LEARNS: tl.constexpr = (terms_ptr is not None or parts_ptr is not None) and (AGAIN or codes_ptr is not None)
    ZERO_LEARNS: tl.constexpr = zero_terms_ptr is not None or zero_parts_ptr is not None
    for RAGGED in tl.static_range(2):
        at = tile(numel, BLOCK, ROWS, _COLUMNS, RAGGED, IN_INT64=True)
        first, row, column, stride, limit = at
        if limit > 0:
            grads = load_planes(g_ptr, at, BLOCK, RAGGED)
            if AGAIN:
                values = load_planes(values_ptr, at, BLOCK, RAGGED)
            if codes_ptr is not None:
                codes = load_bytes(codes_ptr, at, BLOCK, BIT_WIDTH, RAGGED)
            if mask_ptr is not None:
                bits = load_bytes(mask_ptr, at, BLOCK, 1, RAGGED)
            if residual_ptr is not None:
                residuals = load_bytes(residual_ptr, at, BLOCK, WIDTH, RAGGED)
            if parts_ptr is not None:
                sums = tl.zeros((row.shape[0], column.shape[1]), tl.float32)
                more_sums, zero_sums, more_zero_sums = sums, sums, sums
            for i in tl.static_range(8):
                valid, pointers = element_mask(i, at, RAGGED), first + (row * BLOCK + i * stride + column)
                scale, zero = _numbers(
                    i, at, scale_ptr, zero_ptr, inner, groups, valid, dtype,
                    NUMBERS_ROUND, SCALES, ZEROS, ALIGNED and not RAGGED,
                )  # fmt: skip
                g = widen(grads[i])
                through = settle(g * scale, dtype)
                clipped = through
                if AGAIN:
                    x = widen(values[i])
                    v = x
                    if RECTIFIES:
                        v = tl.where(x < 0.0, 0.0, x)
                    r = rint(_shifted(v, scale, zero, dtype))
                    integer = _clipped(r, lowest, highest)
                    clipped = tl.where(_passes(x, r, integer, RECTIFIES, CLIPS), through, 0.0)
                elif residual_ptr is not None:
                    code_of_residual = unpack_code(residuals, i, WIDTH).to(tl.int32)
                    left = settle(tl.load(levels_ptr + code_of_residual), dtype)
                    clipped = tl.where(code_of_residual != 0, clipped, 0.0)
                elif mask_ptr is not None:
                    clipped = tl.where(unpack_code(bits, i, 1) != 0, clipped, 0.0)
                quotient = tl.div_rn(clipped, tl.zeros_like(clipped) + scale)
                tl.store(target_ptr + pointers, cast(quotient, dtype), mask=valid)
                if LEARNS:
                    if AGAIN:
                        q = settle(integer - zero, dtype)
                        steps = settle(tl.div_rn(x, tl.zeros_like(x) + scale), dtype)
                    else:  # where not clipped, x / s - q in place of x / s, and NaN or 0 in place of q
                        q = settle(_integer(codes, i, lowest, BIT_WIDTH, HAS_SPARE) - zero, dtype)
                        q = tl.where(code_of_residual != 0, q * 0.0, q)
                        steps = left
                    slope = settle(tl.div_rn(steps, tl.zeros_like(steps) + scale), dtype)
                    term, more = cast(g * q, dtype), cast(clipped * -1.0 * slope, dtype)
                    if terms_ptr is not None:
                        tl.store(terms_ptr + pointers, term, mask=valid)
                        tl.store(more_terms_ptr + pointers, more, mask=valid)
                    if parts_ptr is not None:
                        sums += tl.where(valid, widen(term), 0.0)
                        more_sums += tl.where(valid, widen(more), 0.0)
                if ZERO_LEARNS:
                    if AGAIN and RECTIFIES:
                        clipped = tl.where(_passes(x, r, integer, False, CLIPS), through, 0.0)
                    if zero_terms_ptr is not None:
                        tl.store(zero_terms_ptr + pointers, cast(through * -1.0, dtype), mask=valid)
                        tl.store(more_zero_terms_ptr + pointers, cast(clipped, dtype), mask=valid)
                    if zero_parts_ptr is not None:
                        zero_sums += tl.where(valid, through * -1.0, 0.0)
                        more_zero_sums += tl.where(valid, clipped, 0.0)
            if parts_ptr is not None:
                pointers = first // 8 + (row * _COLUMNS + column)
                exists = row < (1 if RAGGED else limit)
                tl.store(parts_ptr + pointers, sums, mask=exists)
                tl.store(more_parts_ptr + pointers, more_sums, mask=exists)
                if zero_parts_ptr is not None:
                    tl.store(zero_parts_ptr + pointers, zero_sums, mask=exists)
                    tl.store(more_zero_parts_ptr + pointers, more_zero_sums, mask=exists)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_UNALIGNED)
def decode_integers_kernel(
    codes_ptr, scale_ptr, zero_ptr, target_ptr, lowest, numel, inner, groups,
    BIT_WIDTH: tl.constexpr, HAS_SPARE: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
    NUMBERS_ROUND: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = target_ptr.dtype.element_ty
    for RAGGED in tl.static_range(2):
        at = tile(numel, BLOCK, ROWS, _COLUMNS, RAGGED, IN_INT64=True)
        if at[4] > 0:
            codes = load_bytes(codes_ptr, at, BLOCK, BIT_WIDTH, RAGGED)
            for i in tl.static_range(8):
                valid = element_mask(i, at, RAGGED)
                scale, zero = _numbers(
                    i, at, scale_ptr, zero_ptr, inner, groups, valid, dtype,
                    NUMBERS_ROUND, SCALES, ZEROS, ALIGNED and not RAGGED,
                )  # fmt: skip
                q = _integer(codes, i, lowest, BIT_WIDTH, HAS_SPARE)
                y = cast(settle(q - zero, dtype) * scale, dtype)
                tl.store(plane_of(target_ptr, i, at, BLOCK), y, mask=valid)


_SIXTEEN = (torch.bfloat16, torch.float16)
_LARGEST_CODE = 8
"""Bits."""


def fake_quantize(x, plan, scale, zero_point, residual_of, seed, out, values, codes, mask, residual, missing):
    if not _reads(x, scale, zero_point, out, values) or (codes is not None and plan.bit_width > _LARGEST_CODE):
        return NotImplemented
    packs = residual is not None and seed is not None
    levels, steps = residual_of.rows(x.device) if packs else (None, None)
    numbers = scale.numel() > 1, zero_point.numel() > 1
    width = residual_of.bit_width if packs else 1
    program = _program(fake_quantize_kernel, plan, x.dtype, x.is_cuda, numbers, width)
    key = seed_on(x.device, seed) if packs else None
    program.run(x, scale, zero_point, levels, steps, key, out, values, codes, mask, residual, missing)


def fake_quantize_backward(
    grad, plan, scale, zero_point, residual_of, codes, mask, values, residual, target, terms, parts
):
    if not _reads(grad, scale, zero_point, values, target, terms):
        return NotImplemented
    if codes is not None and plan.bit_width > _LARGEST_CODE:
        return NotImplemented
    numbers = scale.numel() > 1, zero_point.numel() > 1
    levels, width = (None, 1) if residual is None else (residual_of.rows(grad.device)[0], residual_of.bit_width)
    program = _program(fake_quantize_backward_kernel, plan, grad.dtype, grad.is_cuda, numbers, width)
    program.run(*(grad, scale, zero_point, levels, codes, mask, values, residual, target), *_four(terms), *_four(parts))


def decode_integers(codes: Tensor, plan: IntegerPlan, scale: Tensor, zero_point: Tensor, target: Tensor) -> None:
    if plan.bit_width > _LARGEST_CODE or not _reads(target, scale, zero_point):
        return NotImplemented
    numbers = scale.numel() > 1, zero_point.numel() > 1
    program = _program(decode_integers_kernel, plan, target.dtype, target.is_cuda, numbers)
    program.run(codes, scale, zero_point, target)


def _reads(x: Tensor, scale: Tensor, zero_point: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels read and write these tensors, as on the CPU: of 16 bits several scales are of that type."""
    if any(each is not None and each.dtype is not x.dtype for each in others):
        return False
    if x.dtype is torch.float32:
        return scale.dtype is zero_point.dtype is torch.float32
    return x.dtype in _SIXTEEN and all(each.numel() == 1 or each.dtype is x.dtype for each in (scale, zero_point))


@functools.lru_cache(maxsize=4096)
def _program(
    kernel: Any, plan: IntegerPlan, dtype: torch.dtype, on_gpu: bool, numbers: tuple[bool, bool], width: int = 1
) -> Program:
    """The program for elements of a type; `numbers`: several scales, zero points; `width`: of a residual."""
    aligned = plan.inner % (DEFAULT_BLOCK // 8) == 0
    itemsize = dtype.itemsize if kernel is decode_integers_kernel else 4  # more elements a thread take 200 registers
    if any(numbers) and not aligned:
        itemsize = 8  # the groups of more elements a thread spill
    values = {
        **plan._asdict(),
        **{name.upper(): getattr(plan, name) for name in ("rectifies", "clips", "has_spare")},
        "lowest": float(plan.lowest),
        "highest": float(plan.highest),
        "WIDTH": width,
        "SCALES": numbers[0],
        "ZEROS": numbers[1],
        "NUMBERS_ROUND": on_gpu and dtype is not torch.float32,
        "ALIGNED": aligned,
    }
    geometry = Geometry(plan.numel, plan.bit_width, DEFAULT_BLOCK, plan.inner, plan.groups, True)
    return over_blocks(kernel, geometry, itemsize, **values)


def _four(rows: Tensor | None) -> tuple[Tensor | None, ...]:
    """Rows, None for those that there are not: those of a zero point that does not learn."""
    return tuple(rows[place] if rows is not None and place < len(rows) else None for place in range(4))
