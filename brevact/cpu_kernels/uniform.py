"""Kernels of uniform codes: positions on each group's grid, rounding and packing; and decoding, multiplying by the way.

Bytes and values are those of `kernel_ops.quantize_uniform` and `dequantize_uniform`.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.floats import FLOAT16, FLOAT32, emit, emit_product, limit_of, limited, stage
from brevact.cpu_kernels.groups import (
    BIT_WIDTH,
    BLOCK,
    DITHERED,
    HIGHEST_KEY,
    INNER,
    KIND,
    LOWEST_KEY,
    NUMEL,
    ROUNDING,
    STOCHASTIC,
    UNEVEN,
    calibrate,
    extend,
    extend_finite,
    inverse_of,
    is_finite,
    is_finite_range,
    is_flagged,
    place_zeros,
    read_metadata,
    shows_errors,
    store_shifted,
    uniform_table,
    zero_in_range,
)
from brevact.cpu_kernels.memory import (
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
from brevact.cpu_kernels.normalize import denormalize_elements, normalize_elements, words_of
from brevact.cpu_kernels.packing import BLOCK as BITS
from brevact.cpu_kernels.packing import bytes_to_codes, bytes_to_words, mask_multiply, spread_bits
from brevact.cpu_kernels.rounding import halves_of, is_spread, shift_of, shift_to_levels, write_codes
from brevact.cpu_kernels.teams import share
from brevact.cpu_kernels.uneven import canonical, quantize_uneven, second_ends, uneven_levels
from brevact.geometry import Place, UniformPlan


@inlined
def _to_steps(x, count, m, inverse, levels, steps):
    """Positions on the grid, t = clip((x - m) / s), of elements of one group; zeros if the inverse is 0."""
    if inverse > np.float32(0.0):
        for e in range(count):
            t = max((load(x, e) - m) * inverse, np.float32(0.0))
            store(steps, e, t if t < levels else levels)
    else:
        for e in range(count):
            store(steps, e, np.float32(0.0))


@inlined
def _to_flagged_steps(x, count, m, inverse, levels, steps):
    """The same in a flagged group: finite elements below the last level, which encodes the others."""
    below = levels - np.float32(1.0)
    for e in range(count):
        v = load(x, e)
        t = max((v - m) * inverse, np.float32(0.0))
        t = t if t < below else below
        store(steps, e, t if is_finite(v) else levels)


@inlined
def _to_steps_of_group(x, count, m, s, levels, steps):
    if is_flagged(s):
        _to_flagged_steps(x, count, m, inverse_of(s), levels, steps)
    else:
        _to_steps(x, count, m, inverse_of(s), levels, steps)


@kernel
def quantize_blocks(source, codes, scale, minimum, seed, table_at, norm_at, start, stop):
    """`norm_at` has words of `normalize`, or is 0."""
    table = i64_at(table_at)
    numel, bit_width, block, inner = load(table, NUMEL), load(table, BIT_WIDTH), load(table, BLOCK), load(table, INNER)
    dithered, stochastic = load(table, ROUNDING) == DITHERED, load(table, ROUNDING) == STOCHASTIC
    uneven = load(table, UNEVEN) != 0
    k = halves_of(seed)
    top = (np.int64(1) << bit_width) - 1
    steps, scratch = f32_scratch(block), f32_scratch(block)
    columns = block // 8
    random = u32_scratch(columns), u32_scratch(columns), u32_scratch(columns), u32_scratch(columns)
    joined = u32_scratch(columns), u32_scratch(columns)
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        x = stage(source, load(table, KIND), first, count, steps if norm_at else scratch)
        if norm_at:  # from one memory to another, or LLVM would not vectorize it
            normalize_elements(x, first, count, norm_at, scratch)
            x = scratch
        if dithered:
            stochastic = False  # unless there are groups that do not shift their levels
        e = 0
        while e < count:
            run = min(inner, count - e)
            low_key, high_key = extend(advance(x, e), run, HIGHEST_KEY, LOWEST_KEY)
            flagged = not is_finite_range(low_key, high_key)
            if flagged:
                low_key, high_key = extend_finite(advance(x, e), run, HIGHEST_KEY, LOWEST_KEY)
            if uneven:
                low_end, high_end = canonical(low_key), canonical(high_key)
                second_low, second_high, takes = HIGHEST_KEY, LOWEST_KEY, flagged
                if not flagged:
                    second_low, second_high, takes = second_ends(advance(x, e), run, low_end, high_end)
                if takes:
                    stochastic = stochastic or dithered
                    quantize_uneven(
                        advance(x, e), run, low_end, high_end, second_low, second_high, flagged,
                        bit_width, (first + e) // inner, scale, minimum, advance(steps, e),
                    )  # fmt: skip
                    e += run
                    continue
            zero = zero_in_range(advance(x, e), run, low_key, high_key)
            m, s = calibrate(low_key, high_key, flagged, zero, (first + e) // inner, scale, minimum, table)
            at = advance(steps, e)
            _to_steps_of_group(advance(x, e), run, m, s, np.float32(top), at)
            if zero and m < np.float32(0.0) and shows_errors(table):
                place_zeros(advance(x, e), run, at)
            if dithered:
                if not flagged and not zero and is_spread(at, run):
                    group = (first + e) // inner
                    shift = shift_of(group, k[0], k[1])
                    shift_to_levels(at, run, shift, np.float32(top))
                    store_shifted(m, s, shift, group, minimum)
                else:
                    stochastic = True
            e += run
        write_codes(steps, first, count, bit_width, stochastic, k, random, joined, u8_at(codes))


def quantize_uniform(
    x: Tensor,
    plan: UniformPlan,
    seed: int | Tensor | None,
    mean: Tensor | None,
    factor: Tensor | None,
    place: Place | None,
    buffer: Tensor,
) -> None:
    if not plan.has_kernels:
        return NotImplemented
    table, codes = uniform_table(plan, x.dtype, seed is not None), buffer.data_ptr()
    words = None if factor is None or place is None else words_of(mean, factor, place)
    metadata = codes + plan.scale_at, codes + plan.minimum_at
    key, norm_at = 0 if seed is None else int(seed), 0 if words is None else ctypes.addressof(words)
    arguments = (x.data_ptr(), codes, *metadata, key, table.address, norm_at)
    share(quantize_blocks, arguments, table.blocks, plan.geometry.block_size, torch.get_num_threads())


@inlined
def is_plain(m, s, top, limit):
    """Whether no value of a group comes near the limit of the result's type, and no code decodes to NaN."""
    return not is_flagged(s) and abs(m) + s * top < np.float32(0.5) * limit


@inlined
def decoded(q, m, s, top, limit):
    """Value of a code: NaN for the last one of a flagged group, which at 1 bit has one other, for the middle."""
    flagged, step = is_flagged(s), abs(s)
    base = m + step * np.float32(0.5) if flagged and top < np.float32(2.0) else m
    return np.float32(np.nan) if flagged and q == top else limited(base + step * q, limit)


@inlined
def _decode_planes(low, high, first, last, columns, bit_width, m, s, limit, levels, table, values):
    """Values of planes first to last of one group, from the joined codes 0 to 3 and 4 to 7 of each column."""
    mask = np.uint32((1 << bit_width) - 1)
    top = np.float32(mask)
    plain, uneven = is_plain(m, s, top, limit), load(table, UNEVEN) != 0 and is_flagged(s)
    if uneven:
        uneven_levels(m, s, bit_width, limit, levels)
    for i in range(first, last):
        shift = np.uint32((i & 3) * bit_width)
        plane = advance(values, i * columns)
        words = high if i & 4 else low
        if plain:
            for j in range(columns):
                store(plane, j, m + s * np.float32(np.int32(np.uint32(load(words, j) >> shift) & mask)))
        elif uneven:
            for j in range(columns):
                store(plane, j, load(levels, np.int64(np.uint32(load(words, j) >> shift) & mask)))
        else:
            for j in range(columns):
                q = np.float32(np.int32(np.uint32(load(words, j) >> shift) & mask))
                store(plane, j, decoded(q, m, s, top, limit))


@inlined
def _decode_segments(q, first, count, scale, minimum, limit, levels, table):
    """Replace float32 codes by their values, in place; the levels have room for those of an uneven group."""
    inner, top = load(table, INNER), np.float32((np.int64(1) << load(table, BIT_WIDTH)) - 1)
    e = 0
    while e < count:
        group, run = (first + e) // inner, min(inner - (first + e) % inner, count - e)
        m, s = read_metadata(scale, minimum, group)
        own = advance(q, e)
        if load(table, UNEVEN) != 0 and is_flagged(s):
            uneven_levels(m, s, load(table, BIT_WIDTH), limit, levels)
            for i in range(run):
                store(own, i, load(levels, np.int64(load(own, i))))
        elif is_plain(m, s, top, limit):
            for i in range(run):
                store(own, i, m + s * load(own, i))
        else:
            for i in range(run):
                store(own, i, decoded(load(own, i), m, s, top, limit))
        e += run


@kernel
def dequantize_blocks(codes, scale, minimum, other, target, table_at, norm_at, mask, start, stop):
    """Multiply by `other`; with `norm_at`, undo a normalization, add float32 `other` and mask, by `masks.BLOCK`."""
    table = i64_at(table_at)
    numel, bit_width, block, kind = load(table, NUMEL), load(table, BIT_WIDTH), load(table, BLOCK), load(table, KIND)
    inner = load(table, INNER)
    limit = limit_of(FLOAT32 if norm_at else kind)
    last_limit = limit_of(FLOAT16) if kind == FLOAT16 else np.float32(np.inf)
    scratch, wide, levels = f32_scratch(block), u32_scratch(block), f32_scratch(256)
    low, high, bits = u32_scratch(block // 8), u32_scratch(block // 8), u8_scratch(BITS)
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        columns = (count + 7) // 8
        packed = advance(u8_at(codes), first // 8 * bit_width)
        direct = kind == FLOAT32 and other == 0 and count == 8 * columns
        values = advance(f32_at(target), first) if direct else scratch
        whole = first % inner + count <= inner  # the block lies in one group
        if bit_width < 8 and (whole or (inner % columns == 0 and count == block)):
            bytes_to_words(packed, columns, bit_width, low, high)
            group = first // inner
            planes = 8 if whole else max(inner // columns, 1)
            for i in range(0, 8, planes):
                m, s = read_metadata(scale, minimum, group)
                _decode_planes(low, high, i, min(i + planes, 8), columns, bit_width, m, s, limit, levels, table, values)
                group += 1
        else:
            if bit_width == 8:
                for e in range(8 * columns):
                    store(values, e, np.float32(np.int32(load(packed, e))))
            else:
                bytes_to_codes(packed, columns, bit_width, wide)
                for e in range(8 * columns):
                    store(values, e, np.float32(np.int32(load(wide, e))))
            _decode_segments(values, first, count, scale, minimum, limit, levels, table)
        if norm_at:
            denormalize_elements(values, first, count, norm_at, last_limit)
            if other:
                addend = advance(f32_at(other), first)
                for e in range(count):
                    store(values, e, load(values, e) + load(addend, e))
            if mask:
                spread_bits(mask, first, count, bits)
                for e in range(count):
                    store(values, e, load(values, e) if load(bits, e) else np.float32(0.0))
        if other and not norm_at:
            emit_product(values, other, target, kind, first, count)
        elif not direct:
            emit(values, target, kind, first, count)


def dequantize_uniform(
    buffer: Tensor,
    plan: UniformPlan,
    mean: Tensor | None,
    factor: Tensor | None,
    place: Place | None,
    other: Tensor | None,
    mask: Tensor | None,
    target: Tensor,
) -> None:
    """The kernel reads masks whose blocks are those of the codes; others are applied in a pass of their own."""
    if not plan.has_kernels:
        return NotImplemented
    table, codes, geometry = uniform_table(plan, target.dtype), buffer.data_ptr(), plan.geometry
    words = None if factor is None or place is None else words_of(mean, factor, place)
    bits = 0 if mask is None or geometry.block_size != BITS else mask.data_ptr()
    metadata, factors = (codes + plan.scale_at, codes + plan.minimum_at), 0 if other is None else other.data_ptr()
    norm_at = 0 if words is None else ctypes.addressof(words)
    arguments = (codes, *metadata, factors, target.data_ptr(), table.address, norm_at, bits)
    share(dequantize_blocks, arguments, table.blocks, geometry.block_size, torch.get_num_threads())
    if mask is not None and not bits:
        mask_multiply(mask, geometry.numel, target, 0.0, target)
