"""Groups of elements that share metadata: the table of a tensor, ranges, and stored minima and scales.

Kernels take integers only: addresses, counts, and the address of an int64 table with the fields below, so that each is
compiled once for all types and widths.
"""

from __future__ import annotations

import dataclasses
import functools
from array import array

import numpy as np
import torch
from torch import Tensor

from brevact.cpu_kernels.floats import FLOAT32, KINDS, bfloat16_to_float, stage
from brevact.cpu_kernels.memory import (
    advance,
    as_i32,
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
    u16_at,
)
from brevact.cpu_kernels.teams import share
from brevact.geometry import Geometry, UniformPlan, ranges_of_keys

NUMEL, BIT_WIDTH, BLOCK, INNER, GROUPS, FUSED, ROUNDING, SCALE_KIND, MINIMUM_KIND, KIND, ROWS, UNEVEN = range(12)
"""Fields of the table. FUSED: every group is one run inside one block. ROUNDING: see below. ROWS: address of int64
indices, or 0 for a whole tensor: the elements are some groups of a tensor, its rows, group g being row ROWS[g] of INNER
elements there. UNEVEN: see `UniformPlan.uneven`."""

NEAREST, STOCHASTIC, DITHERED = range(3)
"""Kinds of rounding; groups of tensors that are dithered lie in blocks."""

LOWEST_KEY, HIGHEST_KEY = np.int32(-(2**31)), np.int32(2**31 - 1)
MINUS_INFINITY_KEY, INFINITY_KEY = np.int32(-0x7F800001), np.int32(0x7F800000)
_SMALLEST_SCALE = np.float32(2.0**-126)
_LARGEST_RANGE, _LARGEST_END = np.float32(2.0**128 - 2.0**122), np.float32(2.0**125)
_LARGEST_ALIGNED = np.float32(2.0**126)
_LOWEST_BFLOAT16 = np.float32(-(2.0**128 - 2.0**120))
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
def read_metadata(address, kind, index):
    if kind == FLOAT32:
        return load(f32_at(address), index)
    return bfloat16_to_float(load(u16_at(address), index))


@inlined
def _write(address, kind, index, value):
    """Store a metadata value that its type holds exactly."""
    if kind == FLOAT32:
        store(f32_at(address), index, value)
    else:
        store(u16_at(address), index, np.uint16(np.uint32(bits_of(value)) >> np.uint32(16)))


@inlined
def round_up(x, unit):
    """Round up to values whose last bit is that of a unit; see `reference.calibrate`."""
    return float_of(np.int32(np.int32(bits_of(x) + np.int32(unit - np.int32(1))) & np.int32(-unit)))


@inlined
def _cut(x, unit):
    """Round down in the same way."""
    return float_of(np.int32(bits_of(x) & np.int32(-unit)))


@inlined
def _aligned(low, high, levels, table):
    """Code of zero, and scale, of a grid with a level at zero; see `reference.aligned`."""
    one = np.float32(1.0)
    unit, scale_unit = np.int32(1 << 8), np.int32(1)
    if load(table, MINIMUM_KIND) != FLOAT32:
        unit, scale_unit = np.int32(1 << 20), np.int32(1 << 20)
    elif load(table, SCALE_KIND) != FLOAT32 or load(table, BIT_WIDTH) > 16:
        scale_unit = np.int32(1 << 16)
    most = max(_cut(levels - one if high > np.float32(0.0) else levels, unit), one)
    lower = min(max(_cut(np.float32(np.floor(-low / (high - low) * levels)), unit), one), most)
    upper = min(max(lower + one, float_of(np.int32(bits_of(lower) + unit))), most)
    of_lower = max(-low / lower, high / max(levels - lower, one))
    of_upper = max(-low / upper, high / max(levels - upper, one))
    code, step = (upper, of_upper) if of_upper < of_lower else (lower, of_lower)
    return code, max(round_up(step, scale_unit), _SMALLEST_SCALE)


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
            code, step = _aligned(bottom, ceiling, levels, table)
            bottom = -(step * code)
        elif alone:
            bottom, step = np.float32(0.0), np.float32(0.0)
        else:
            if load(table, MINIMUM_KIND) != FLOAT32:
                bits = bits_of(bottom)
                up = np.int32(0xFFFF) if bits < 0 else np.int32(0)
                bottom = max(float_of(np.int32(np.int32(bits + up) & np.int32(-65536))), _LOWEST_BFLOAT16)
            width = ceiling - bottom
            step = width / levels
            if load(table, SCALE_KIND) != FLOAT32:
                step = round_up(step, np.int32(1 << 16))
            step = max(step, _SMALLEST_SCALE) if width > np.float32(0.0) else np.float32(0.0)
        m, s = bottom, -step if flagged else step
    _write(minimum, load(table, MINIMUM_KIND), group, m)
    _write(scale, load(table, SCALE_KIND), group, s)
    return m, s


@inlined
def store_shifted(m, s, shift, group, minimum, table):
    """Store the minimum of a group whose levels are shifted by a part of a step; see `kernel_ops.quantize_uniform`."""
    _write(minimum, load(table, MINIMUM_KIND), group, max(m - shift * s, _LOWEST))


@inlined
def is_flagged(scale):
    """Whether a group's scale has its sign bit set, that of 0 as well."""
    return bits_of(scale) < np.int32(0)


@inlined
def any_flagged(address, kind, first, count):
    found = np.int32(0)
    for g in range(first, first + count):
        found = np.int32(found | bits_of(read_metadata(address, kind, g)))
    return found < np.int32(0)


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
    bit_width = load(table, BIT_WIDTH)
    return bit_width > 16 or (bit_width > 5 and load(table, ROUNDING) != NEAREST)


@inlined
def run_of(element, count, table):
    """The group of an element, and how many of `count` elements from it on lie in that group, or one in each group."""
    inner, groups = load(table, INNER), load(table, GROUPS)
    if inner == 1:
        group = element % groups
        return group, min(groups - group, count)
    return element // inner % groups, min(inner - element % inner, count)


@inlined
def place_of(element, table):
    """Where an element of the rows lies in the tensor that holds them."""
    rows, inner = load(table, ROWS), load(table, INNER)
    return load(i64_at(rows), element // inner) * inner + element % inner if rows else element


@inlined
def in_one_run(first, count, table):
    """Whether elements first to first + count lie behind each other."""
    inner = load(table, INNER)
    return load(table, ROWS) == 0 or first % inner + count <= inner


@inlined
def stage_rows(source, first, count, scratch, table):
    """Pointer to elements of the rows as float32 (`floats.stage`): in the scratch unless they are that, in one run."""
    kind, inner = load(table, KIND), load(table, INNER)
    if in_one_run(first, count, table):
        return stage(source, kind, place_of(first, table), count, scratch)
    e = 0
    while e < count:
        run = min(inner - (first + e) % inner, count - e)
        to = advance(scratch, e)
        x = stage(source, kind, place_of(first + e, table), run, to)
        if kind == FLOAT32:
            for i in range(run):
                store(to, i, load(x, i))
        e += run
    return scratch


@kernel
def calibrate_groups(keys_at, parts, scale, minimum, table_at, start, stop):
    """Join the key ranges of parts, see `ranges.extend_ranges`, and store minimum and scale of groups."""
    table = i64_at(table_at)
    groups = load(table, GROUPS)
    keys = i32_at(keys_at)
    for group in range(start, stop):
        low, high, missing, zero = HIGHEST_KEY, LOWEST_KEY, np.int32(0), np.int32(0)
        for part in range(parts):
            low = min(low, load(keys, 4 * part * groups + group))
            high = max(high, load(keys, (4 * part + 1) * groups + group))
            missing = np.int32(missing | load(keys, (4 * part + 2) * groups + group))
            zero = np.int32(zero | load(keys, (4 * part + 3) * groups + group))
        calibrate(low, high, missing != np.int32(0), zero != np.int32(0), group, scale, minimum, table)


class GroupTable:
    """Blocks, of at most `geometry.LARGEST_BLOCK` elements, and groups of a tensor, for the kernels of quantizers.

    ``rows``: 0, or the address of int64 indices, where group g is row rows[g] of `inner` elements of another tensor.
    """

    def __init__(
        self,
        geometry: Geometry,
        dtype: torch.dtype,
        rounding: int,
        scale_dtype: torch.dtype = torch.float32,
        minimum_dtype: torch.dtype = torch.float32,
        rows: int = 0,
        uneven: bool = False,
    ) -> None:
        self.geometry = geometry
        self.blocks = -(-geometry.numel // geometry.block_size)
        self.fused = geometry.one_run and geometry.block_size % geometry.inner == 0
        sizes = geometry.numel, geometry.bit_width, geometry.block_size, geometry.inner, geometry.groups, self.fused
        kinds = KINDS[scale_dtype], KINDS[minimum_dtype], KINDS[dtype]
        self.table = array("q", (*sizes, rounding, *kinds, rows, uneven))  # owns the memory at the address
        self.address = self.table.buffer_info()[0]


@functools.lru_cache(maxsize=4096)
def grid_table(geometry: Geometry, dtype: torch.dtype, rounding: int) -> GroupTable:
    """Table of a tensor that is quantized to levels; a single group is one run."""
    if geometry.groups == 1:
        geometry = dataclasses.replace(geometry, inner=max(geometry.numel, 1))
    return GroupTable(geometry, dtype, rounding)


def table_of(plan: UniformPlan, dtype: torch.dtype, has_seed: bool = False, rows: int = 0) -> GroupTable:
    """Table of a plan, or of some of its groups at the addresses of `rows`; without a seed it rounds to nearest."""
    at_random = DITHERED if plan.dithered else STOCHASTIC
    rounding = at_random if has_seed else NEAREST
    return GroupTable(plan.geometry, dtype, rounding, plan.scale_dtype, plan.minimum_dtype, rows, plan.uneven)


#: The same table for each tensor of these sizes; not where it names rows, whose memory lives no longer than a call.
uniform_table = functools.lru_cache(maxsize=4096)(table_of)


def affine_rows(offset: Tensor | None, factor: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """Both, contiguous, or None for neither: a missing factor is 1, a missing addend -0.0, which changes no zero."""
    if factor is None:
        if offset is None:
            return None
        factor = torch.ones_like(offset)
    elif offset is None:
        offset = torch.full_like(factor, -0.0)
    return offset.contiguous(), factor.contiguous()


@inlined
def _extend(x, first, count, lows, highs, missing, finite, table):
    inner = load(table, INNER)
    e = 0
    while e < count:
        group, run = run_of(first + e, count - e, table)
        low, high = advance(lows, group), advance(highs, group)
        if inner == 1 and not finite:
            bits = as_i32(advance(x, e))
            for g in range(run):
                store(low, g, min(load(low, g), key_of(load(bits, g))))
                store(high, g, max(load(high, g), key_of(load(bits, g))))
        else:
            run = 1 if inner == 1 else run
            if finite:
                low_key, high_key = extend_finite(advance(x, e), run, load(low, 0), load(high, 0))
                store(missing, group, np.int32(load(missing, group) + count_missing(advance(x, e), run)))
            else:
                low_key, high_key = extend(advance(x, e), run, load(low, 0), load(high, 0))
            store(low, 0, low_key)
            store(high, 0, high_key)
        e += run


@inlined
def _mark_zeros(x, first, count, zeros, table):
    e = 0
    while e < count:
        group, run = run_of(first + e, count - e, table)
        zero = advance(zeros, group)
        if load(table, INNER) == 1:
            for g in range(run):
                store(zero, g, np.int32(load(zero, g) | np.int32(load(x, e + g) == np.float32(0.0))))
        else:
            store(zero, 0, np.int32(load(zero, 0) | np.int32(has_zero(advance(x, e), run))))
        e += run


@kernel
def extend_ranges(source, keys_at, finite, table_at, blocks, parts, start, stop):
    """`keys_at`: for each part int32 rows of lowest and highest keys, elements left out if `finite`, marks of zeros."""
    table = i64_at(table_at)
    numel, block, groups = load(table, NUMEL), load(table, BLOCK), load(table, GROUPS)
    scratch = f32_scratch(block)
    for part in range(start, stop):
        lows = advance(i32_at(keys_at), 4 * part * groups)
        highs, missing, marks = advance(lows, groups), advance(lows, 2 * groups), advance(lows, 3 * groups)
        for index in range(blocks * part // parts, blocks * (part + 1) // parts):
            first = index * block
            count = min(block, numel - first)
            x = stage_rows(source, first, count, scratch, table)
            _extend(x, first, count, lows, highs, missing, finite, table)
            if has_zero(x, count):
                _mark_zeros(x, first, count, marks, table)


def ranges(flat: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    table = grid_table(geometry, flat.dtype, NEAREST)
    keys = range_keys(flat.data_ptr(), table, torch.get_num_threads())
    return ranges_of_keys(torch.from_numpy(keys))


def range_keys(source: int, table: GroupTable, threads: int) -> np.ndarray:
    """(parts, 4, G) int32 rows of `extend_ranges`, of finite values; a second pass only where others are found."""
    geometry = table.geometry
    parts = parts_of(geometry, threads)
    keys = np.empty((parts, 4, geometry.groups), dtype=np.int32)
    for finite in (0, 1):
        keys[:, 0], keys[:, 1], keys[:, 2:] = HIGHEST_KEY, LOWEST_KEY, 0
        arguments = (source, keys.ctypes.data, finite, table.address, table.blocks, parts)
        share(extend_ranges, arguments, parts, -(-geometry.numel // parts), threads)
        if (keys[:, 0] > MINUS_INFINITY_KEY).all() and (keys[:, 1] < INFINITY_KEY).all():
            break
    return keys


def parts_of(geometry: Geometry, threads: int) -> int:
    """Parts of a tensor that threads reduce on their own; their results stay small beside the tensor."""
    most = max(geometry.numel // (8 * geometry.groups), 1) if geometry.groups else 1
    return max(min(threads, most, geometry.numel // (1 << 16)), 1)
