"""Groups of elements that share metadata: the table of a tensor, ranges, and stored minima and scales.

Kernels take integers only: addresses, counts, and the address of an int64 table with the fields below, so that each is
compiled once for all types and widths.
"""

from __future__ import annotations

import functools
from array import array

import numpy as np
import torch

from brevact.cpu_kernels.floats import KINDS, bfloat16_to_float
from brevact.cpu_kernels.memory import as_i32, bits_of, f32_at, float_of, inlined, load, store, u16_at
from brevact.geometry import Geometry, UniformPlan

NUMEL, BIT_WIDTH, BLOCK, INNER, ROUNDING, KIND, UNEVEN = range(7)
"""Fields of the table. ROUNDING: see below. UNEVEN: see `UniformPlan.uneven`."""

NEAREST, STOCHASTIC, DITHERED = range(3)
"""Kinds of rounding; groups of tensors that are dithered lie in blocks."""

LOWEST_KEY, HIGHEST_KEY = np.int32(-(2**31)), np.int32(2**31 - 1)
MINUS_INFINITY_KEY, INFINITY_KEY = np.int32(-0x7F800001), np.int32(0x7F800000)
_SMALLEST_SCALE = np.float32(2.0**-126)
_LARGEST_RANGE, _LARGEST_END = np.float32(2.0**128 - 2.0**122), np.float32(2.0**125)
_LARGEST_ALIGNED = np.float32(2.0**126)
_LOWEST = np.float32(-(2.0**128 - 2.0**104))


@inlined
def key_of(bits):
    """Float bits to an integer of the same order, and back. NaNs lie beyond the infinities."""
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inlined
def extend(x, count, low, high):
    bits = as_i32(x)
    for e in range(count):
        key = key_of(load(bits, e))
        low, high = min(low, key), max(high, key)
    return low, high


@inlined
def is_finite_range(low, high):
    return low > MINUS_INFINITY_KEY and high < INFINITY_KEY


@inlined
def is_finite(x):
    return abs(x) < np.float32(np.inf)


@inlined
def extend_finite(x, count, low, high):
    bits = as_i32(x)
    for e in range(count):
        key = key_of(load(bits, e))
        finite = key > MINUS_INFINITY_KEY and key < INFINITY_KEY
        low, high = min(low, key if finite else HIGHEST_KEY), max(high, key if finite else LOWEST_KEY)
    return low, high


@inlined
def count_missing(x, count):
    """How many of `count` values are not finite."""
    missing = np.int32(0)
    for e in range(count):
        missing = np.int32(missing + np.int32(0 if is_finite(load(x, e)) else 1))
    return missing


@inlined
def has_zero(x, count):
    bits = as_i32(x)
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
def round_up(x, unit):
    """Round up to values whose last bit is that of a unit; see `reference.calibrate`."""
    return float_of(np.int32(np.int32(bits_of(x) + np.int32(unit - np.int32(1))) & np.int32(-unit)))


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

    def __init__(self, geometry: Geometry, dtype: torch.dtype, rounding: int, uneven: bool = False) -> None:
        self.geometry = geometry
        self.blocks = -(-geometry.numel // geometry.block_size)
        sizes = geometry.numel, geometry.bit_width, geometry.block_size, geometry.inner
        self.table = array("q", (*sizes, rounding, KINDS[dtype], uneven))  # owns the memory at the address
        self.address = self.table.buffer_info()[0]


#: Table of a tensor that is quantized to levels.
grid_table = functools.lru_cache(maxsize=4096)(GroupTable)


@functools.lru_cache(maxsize=4096)
def uniform_table(plan: UniformPlan, dtype: torch.dtype, has_seed: bool = False) -> GroupTable:
    """Table of a plan; without a seed it rounds to nearest."""
    at_random = DITHERED if plan.dithered else STOCHASTIC
    return GroupTable(plan.geometry, dtype, at_random if has_seed else NEAREST, plan.uneven)
