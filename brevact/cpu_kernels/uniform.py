"""Kernels of uniform codes: groups' ranges and metadata, positions on their grids, codes; and decoding.

Bytes and values are those of `kernel_ops.quantize_uniform` and `dequantize_uniform`. Kernels take integers only:
addresses, counts, and the address of an int64 table with the fields below, so that each is compiled once for all types
and widths.
"""

from __future__ import annotations

import functools
from array import array

import numpy as np
import torch

from brevact.cpu_kernels.floats import (
    FLOAT16,
    FLOAT32,
    KINDS,
    bfloat16_to_float,
    emit,
    emit_product,
    is_finite,
    key_of,
    limit_of,
    limited,
    round_to,
    round_up,
    stage,
)
from brevact.cpu_kernels.intrinsics import (
    advance,
    bits_of,
    f32_at,
    f32_scratch,
    float_of,
    i32_at,
    i64_at,
    inlined,
    kernel,
    load,
    store,
    u8_at,
    u8_scratch,
    u16_at,
    u32_scratch,
)
from brevact.cpu_kernels.normalize import denormalize_elements, normalize_elements, shrink, stretch, words_of
from brevact.cpu_kernels.packing import BLOCK as BITS
from brevact.cpu_kernels.packing import (
    bytes_to_codes,
    halves_of,
    is_spread,
    look_up_row,
    mask_multiply,
    shift_of,
    shift_to_levels,
    spread_bits,
    write_codes,
)
from brevact.cpu_kernels.teams import share
from brevact.cpu_kernels.uneven import canonical, quantize_uneven, second_ends, uneven_levels
from brevact.geometry import Geometry, UniformPlan

NUMEL, BIT_WIDTH, BLOCK, INNER, ROUNDING, KIND, UNEVEN, STRETCHED = range(8)
"""Fields of the table. ROUNDING: see below. UNEVEN, STRETCHED: see `UniformPlan`."""

NEAREST, STOCHASTIC, DITHERED = range(3)
"""Kinds of rounding; groups of tensors that are dithered lie in blocks."""

LOWEST_KEY, HIGHEST_KEY = np.int32(-(2**31)), np.int32(2**31 - 1)
MINUS_INFINITY_KEY, INFINITY_KEY = np.int32(-0x7F800001), np.int32(0x7F800000)
_SMALLEST_SCALE = np.float32(2.0**-126)
_LARGEST_RANGE, _LARGEST_END = np.float32(2.0**128 - 2.0**122), np.float32(2.0**125)
_LARGEST_ALIGNED = np.float32(2.0**126)
_LOWEST = np.float32(-(2.0**128 - 2.0**104))


@inlined
def extend(x, count, of_finite):
    """Least and largest key, of the finite elements or of all; upside down for none."""
    bits, low, high = i32_at(x), HIGHEST_KEY, LOWEST_KEY
    for e in range(count):
        key = key_of(load(bits, e))
        counts = not of_finite or (key > MINUS_INFINITY_KEY and key < INFINITY_KEY)
        low, high = min(low, key if counts else HIGHEST_KEY), max(high, key if counts else LOWEST_KEY)
    return low, high


@inlined
def has_zero(x, count):
    bits = i32_at(x)
    least = np.uint32(0xFFFFFFFF)
    for e in range(count):
        least = min(least, np.uint32(np.uint32(load(bits, e)) << np.uint32(1)))
    return least == np.uint32(0)


@inlined
def zero_in_range(x, count, low, high):
    """The same where the range of keys of the finite values is known: those of zeros are -1 and 0."""
    if low > np.int32(0) or high < np.int32(-1):
        return False
    return low >= np.int32(-1) or high <= np.int32(0) or has_zero(x, count)


@inlined
def read_metadata(scale, minimum, group):
    """Minimum and scale of a group."""
    return load(f32_at(minimum), group), bfloat16_to_float(load(u16_at(scale), group))


@inlined
def _cut(x, unit):
    """Round down in the same way."""
    return float_of(np.int32(bits_of(x) & np.int32(-unit)))


@inlined
def _aligned(low, high, levels):
    """Code of zero, and scale, of a grid with a level at zero; see `reference.aligned`."""
    one, unit = np.float32(1.0), np.int32(1 << 8)
    most = max(_cut(levels - one if high > np.float32(0.0) else levels, unit), one)
    lower = min(max(_cut(np.float32(np.floor(-low / (high - low) * levels)), unit), one), most)
    upper = min(max(lower + one, float_of(np.int32(bits_of(lower) + unit))), most)
    of_lower = max(-low / lower, high / max(levels - lower, one))
    of_upper = max(-low / upper, high / max(levels - upper, one))
    code, step = (upper, of_upper) if of_upper < of_lower else (lower, of_lower)
    return code, max(round_up(step, np.int32(1 << 16)), _SMALLEST_SCALE)


@inlined
def calibrate(low, high, flagged, zero, group, scale, minimum, table):
    """Store and return the minimum and scale of a range of keys, upside down for none; see `reference.calibrate`."""
    m, s = np.float32(np.nan), np.float32(np.nan)
    top = (np.int64(1) << load(table, BIT_WIDTH)) - 1
    levels = np.float32(max(top - 1, np.int64(1)) if flagged else top)
    if low <= high:
        bottom, ceiling = float_of(key_of(low)) + np.float32(0.0), float_of(key_of(high))
        alone = zero and flagged and top == 1
        aligned = zero and not alone and bottom < np.float32(0.0) and (ceiling <= np.float32(0.0) or top > 1)
        if ceiling - bottom >= (_LARGEST_ALIGNED if aligned else _LARGEST_RANGE):  # see `reference.bounded`
            bottom, ceiling = max(bottom, -_LARGEST_END), min(ceiling, _LARGEST_END)
        if aligned:
            code, step = _aligned(bottom, ceiling, levels)
            bottom = -(step * code)
        elif alone:
            bottom, step = np.float32(0.0), np.float32(0.0)
        else:
            width = ceiling - bottom
            step = max(round_up(width / levels, np.int32(1 << 16)), _SMALLEST_SCALE)
            step = step if width > np.float32(0.0) else np.float32(0.0)
        m, s = bottom, -step if flagged else step
    store(f32_at(minimum), group, m)
    store(u16_at(scale), group, np.uint16(np.uint32(bits_of(s)) >> np.uint32(16)))
    return m, s


@inlined
def store_shifted(m, s, shift, group, minimum):
    """Store the minimum of a group whose levels are shifted by a part of a step; see `kernel_ops.quantize_uniform`."""
    store(f32_at(minimum), group, max(m - shift * s, _LOWEST))


@inlined
def is_flagged(scale):
    """Whether a group's scale has its sign bit set, that of 0 as well."""
    return bits_of(scale) < np.int32(0)


@inlined
def inverse_of(scale):
    """1 / |scale|, 0 for 0 and for NaN."""
    step = abs(scale)
    return np.float32(1.0) / step if step > np.float32(0.0) else np.float32(0.0)


@inlined
def place_zeros(x, count, steps):
    """Rid the positions of elements that are 0 of their errors; see `reference.positions_of_zeros`."""
    for e in range(count):
        v, t = load(x, e), load(steps, e)
        whole = float_of(np.int32(np.int32(bits_of(t) + np.int32(0x80)) & np.int32(-256)))
        store(steps, e, whole if v == np.float32(0.0) else t)


@inlined
def shows_errors(table):
    """Whether rounding may show the errors of float32 in the positions of zeros."""
    return load(table, BIT_WIDTH) > 5 and load(table, ROUNDING) != NEAREST


class GroupTable:
    """Blocks, of at most `geometry.LARGEST_BLOCK` elements, and groups in them, for the kernels of quantizers."""

    def __init__(
        self, geometry: Geometry, dtype: torch.dtype, rounding: int, uneven: bool = False, stretched: bool = False
    ) -> None:
        self.geometry = geometry
        self.blocks = -(-geometry.numel // geometry.block_size)
        sizes = geometry.numel, geometry.bit_width, geometry.block_size, geometry.inner
        self.table = array("q", (*sizes, rounding, KINDS[dtype], uneven, stretched))  # owns the memory at the address
        self.address = self.table.buffer_info()[0]


#: Table of a tensor that is quantized to levels.
grid_table = functools.lru_cache(maxsize=4096)(GroupTable)


@functools.lru_cache(maxsize=4096)
def uniform_table(plan: UniformPlan, dtype: torch.dtype, has_seed: bool = False) -> GroupTable:
    """Table of a plan; without a seed it rounds to nearest."""
    at_random = DITHERED if plan.dithered else STOCHASTIC
    return GroupTable(plan.geometry, dtype, at_random if has_seed else NEAREST, plan.uneven, plan.stretched)


@inlined
def _to_steps(x, count, m, s, levels, steps):
    """Positions on the grid, t = clip((x - m) / s), of elements of one group; zeros if the inverse scale is 0.

    Finite elements of a flagged group lie below the last level, which encodes the others.
    """
    inverse, most, missing = inverse_of(s), levels, np.float32(0.0)
    if is_flagged(s):
        most, missing = levels - np.float32(1.0), levels
    for e in range(count):
        v = load(x, e)
        t = max((v - m) * inverse, np.float32(0.0))
        t = t if t < most else most
        store(steps, e, t if is_finite(v) else missing)


@kernel
def quantize_blocks(source, codes, scale, minimum, seed, table_at, norm_at, start, stop):
    """`norm_at` has words of `normalize`, or is 0."""
    table = i64_at(table_at)
    numel, bit_width, block, inner = load(table, NUMEL), load(table, BIT_WIDTH), load(table, BLOCK), load(table, INNER)
    dithered, stochastic = load(table, ROUNDING) == DITHERED, load(table, ROUNDING) == STOCHASTIC
    uneven, stretched = load(table, UNEVEN) != 0, load(table, STRETCHED) != 0
    k = halves_of(seed)
    top = (np.int64(1) << bit_width) - 1
    steps, scratch = f32_scratch(block), f32_scratch(block)
    random, q = u32_scratch(block // 2), u8_scratch(block)
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        x = stage(source, load(table, KIND), first, count, steps if norm_at or stretched else scratch)
        if norm_at:  # from one memory to another, or LLVM would not vectorize it
            normalize_elements(x, first, count, norm_at, scratch)
            x = scratch
        if stretched:
            stretch(x, count, scratch)
            x = scratch
        if dithered:
            stochastic = False  # unless there are groups that do not shift their levels
        e = 0
        while e < count:
            run = min(inner, count - e)
            low_key, high_key = extend(advance(x, e), run, False)
            flagged = low_key <= MINUS_INFINITY_KEY or high_key >= INFINITY_KEY
            if flagged:
                low_key, high_key = extend(advance(x, e), run, True)
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
            _to_steps(advance(x, e), run, m, s, np.float32(top), at)
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
        write_codes(steps, first, count, bit_width, stochastic, k, random, q, u8_at(codes))


def quantize_uniform(x, plan, seed, mean, factor, place, buffer):
    if not plan.has_kernels:
        return NotImplemented
    table, codes = uniform_table(plan, x.dtype, seed is not None), buffer.data_ptr()
    norm_at, _words = (0, None) if place is None else words_of(mean, factor, place)
    metadata, key = (codes + plan.scale_at, codes + plan.minimum_at), 0 if seed is None else int(seed)
    arguments = (x.data_ptr(), codes, *metadata, key, table.address, norm_at)
    share(quantize_blocks, arguments, table.blocks, plan.geometry.block_size)


@inlined
def decoded(q, m, s, top, limit):
    """Value of a code: NaN for the last one of a flagged group, which at 1 bit has one other, for the middle."""
    flagged, step = is_flagged(s), abs(s)
    base = m + step * np.float32(0.5) if flagged and top < np.float32(2.0) else m
    return np.float32(np.nan) if flagged and q == top else limited(base + step * q, limit)


@inlined
def all_levels(m, s, limit, count, levels, table):
    """Write the values of the codes of a group, of `count` at least."""
    top = np.float32((np.int64(1) << load(table, BIT_WIDTH)) - 1)
    if load(table, UNEVEN) != 0 and is_flagged(s):
        uneven_levels(m, s, load(table, BIT_WIDTH), limit, levels)
    else:
        for q in range(count):
            store(levels, q, decoded(np.float32(np.int32(q)), m, s, top, limit))
    if load(table, STRETCHED) != 0:
        shrink(levels, count)


@inlined
def _decode_group(q, count, m, s, limit, levels, table, values):
    """Values of the codes of one group; the levels have room for those of an uneven one."""
    bit_width = load(table, BIT_WIDTH)
    top = np.float32((np.int64(1) << bit_width) - 1)
    if load(table, STRETCHED) != 0 or (load(table, UNEVEN) != 0 and is_flagged(s)):
        all_levels(m, s, limit, np.int64(1) << bit_width, levels, table)
        look_up_row(q, count, levels, values)
    elif not is_flagged(s) and abs(m) + s * top < np.float32(0.5) * limit:  # no value comes near the limit
        for e in range(count):
            store(values, e, m + s * np.float32(np.int32(load(q, e))))
    else:
        for e in range(count):
            store(values, e, decoded(np.float32(np.int32(load(q, e))), m, s, top, limit))


@kernel
def dequantize_blocks(codes, scale, minimum, other, target, table_at, norm_at, mask, start, stop):
    """Multiply by `other`; with `norm_at`, undo a normalization, add float32 `other` and mask, by `masks.BLOCK`."""
    table = i64_at(table_at)
    numel, bit_width, block, kind = load(table, NUMEL), load(table, BIT_WIDTH), load(table, BLOCK), load(table, KIND)
    inner = load(table, INNER)
    limit = limit_of(FLOAT32 if norm_at else kind)
    last_limit = limit_of(FLOAT16) if kind == FLOAT16 else np.float32(np.inf)
    scratch, factors, levels = f32_scratch(block), f32_scratch(block), f32_scratch(256)
    q, bits = u8_scratch(block), u8_scratch(BITS)
    for index in range(start, stop):
        first = index * block
        count = min(block, numel - first)
        bytes_to_codes(advance(u8_at(codes), first // 8 * bit_width), (count + 7) // 8, bit_width, q)
        direct = kind == FLOAT32 and other == 0
        values = advance(f32_at(target), first) if direct else scratch
        e = 0
        while e < count:  # groups lie in blocks
            m, s = read_metadata(scale, minimum, (first + e) // inner)
            run = min(inner, count - e)
            _decode_group(advance(q, e), run, m, s, limit, levels, table, advance(values, e))
            e += run
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
            round_to(kind, values, count)
            emit_product(values, other, kind, target, kind, first, count, factors)
        elif not direct:
            emit(values, target, kind, first, count)


def dequantize_uniform(buffer, plan, mean, factor, place, other, mask, target):
    """The kernel reads masks whose blocks are those of the codes; others are applied in a pass of their own."""
    if not plan.has_kernels:
        return NotImplemented
    table, codes, geometry = uniform_table(plan, target.dtype), buffer.data_ptr(), plan.geometry
    norm_at, _words = (0, None) if place is None else words_of(mean, factor, place)
    bits = 0 if mask is None or geometry.block_size != BITS else mask.data_ptr()
    metadata, factors = (codes + plan.scale_at, codes + plan.minimum_at), 0 if other is None else other.data_ptr()
    arguments = (codes, *metadata, factors, target.data_ptr(), table.address, norm_at, bits)
    share(dequantize_blocks, arguments, table.blocks, geometry.block_size)
    if mask is not None and not bits:
        mask_multiply(mask, geometry.numel, target, 0.0, target)
