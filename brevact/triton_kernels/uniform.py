"""The uniform quantizer: one pass over x, as programs hold whole groups; and decoding.

R blocks, W columns, Q or G groups. `stored` is a tuple of pointers to codes, scales and minima; `tiles` explains `at`,
`normalize` explains `norm`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton import next_power_of_2

from brevact.geometry import DEFAULT_BLOCK, FAR, Place, UniformPlan
from brevact.triton_kernels.floats import (
    MAGIC,
    cast,
    float_of_code,
    greatest_of,
    key_of,
    least_of,
    maximum,
    minimum,
    nearest_int,
    round_stochastic,
    shrink,
    stretch,
    widen,
)
from brevact.triton_kernels.groups import (
    calibrate,
    finite_keys,
    has_missing,
    is_finite,
    is_flagged,
    shifted_minimum,
    store_metadata,
)
from brevact.triton_kernels.launch import Program, over_blocks, parts_of, seed_on
from brevact.triton_kernels.normalize import (
    denormalize_elements,
    fits,
    load_statistics,
    load_statistics_of_plane,
    near_of,
    normalize_elements,
    normalize_planes,
    values_of,
)
from brevact.triton_kernels.packing import mask_multiply
from brevact.triton_kernels.philox import element_bits, seed_words, shifts
from brevact.triton_kernels.tiles import (
    element_mask,
    load_bytes,
    load_planes,
    single_block,
    store_codes,
    unpack_code,
    whole_blocks,
)
from brevact.triton_kernels.uneven import fit, inverse_of, is_uneven, may_be_uneven, positions, values


@triton.jit
def load_grid(scale_ptr, minimum_ptr, valid, BIT_WIDTH: tl.constexpr):
    """Stored minimum and scale, and whether a group is flagged: then, at 1 bit, code 0 is in the middle."""
    scale = widen(tl.load(scale_ptr, mask=valid))
    base, flagged = widen(tl.load(minimum_ptr, mask=valid)), is_flagged(scale)
    if BIT_WIDTH == 1:
        base = tl.where(flagged, base + tl.abs(scale) * 0.5, base)
    return base, scale, flagged


@triton.jit
def value_of(q, base, scale, flagged, largest, BIT_WIDTH: tl.constexpr, UNEVEN: tl.constexpr, FLAGGED: tl.constexpr):
    """Values of codes (uint32), within +-largest; FLAGGED: groups may be, with NaN last, or uneven ones if UNEVEN."""
    y = base + tl.abs(scale) * float_of_code(q)
    y = maximum(minimum(y, largest), -largest)
    if FLAGGED and UNEVEN:
        own = values(q, base.to(tl.int32, bitcast=True), scale, largest, BIT_WIDTH)
        y = tl.where(flagged, own, y)
    elif FLAGGED:
        y = tl.where(flagged & (q == (1 << BIT_WIDTH) - 1), float("nan"), y)
    return y


@triton.jit
def dequantize_blocks(
    stored, other_ptr, target_ptr, at, largest, norm,
    BIT_WIDTH: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr, ALIGNED: tl.constexpr, PLACE: tl.constexpr,
    RAGGED: tl.constexpr, UNEVEN: tl.constexpr, FLAGGED: tl.constexpr,
):  # fmt: skip
    """ALIGNED: a row of a whole block's plane lies in one group. With a PLACE, undo a normalization and add `other`;
    with one of -1, shrink elements."""
    PLANES: tl.constexpr = INNER // (BLOCK // 8) if INNER > BLOCK // 8 else 1  # with the same groups
    dtype: tl.constexpr = target_ptr.dtype.element_ty
    codes_ptr, scale_ptr, minimum_ptr = stored
    first, row, column, stride, _ = at
    packed = load_bytes(codes_ptr, at, BLOCK, BIT_WIDTH, RAGGED)
    for i in tl.static_range(8):
        valid = element_mask(i, at, RAGGED)
        offset = row * BLOCK + i * stride
        if RAGGED or not ALIGNED:
            offset += column
        if RAGGED or not ALIGNED or i % PLANES == 0:
            group = first // INNER + offset.to(tl.uint32) // INNER
            base, scale, flagged = load_grid(scale_ptr + group, minimum_ptr + group, valid, BIT_WIDTH)
        y = value_of(unpack_code(packed, i, BIT_WIDTH), base, scale, flagged, largest, BIT_WIDTH, UNEVEN, FLAGGED)
        if PLACE < 0:
            y = shrink(y)
        elif PLACE:
            mean, factor = load_statistics_of_plane(norm, at, i, valid, BLOCK, PLACE, RAGGED, near_of(dtype))
            y = denormalize_elements(y, norm, mean, factor, dtype)
        y, pointers = cast(y, dtype), first + (row * BLOCK + i * stride + column)
        if other_ptr is not None:
            other = widen(tl.load(other_ptr + pointers, mask=valid))
            y = cast(widen(y) + other if PLACE > 0 else widen(y) * other, dtype)
        tl.store(target_ptr + pointers, y, mask=valid)


@triton.jit
def _some_flagged(scale_ptr, count, MOST: tl.constexpr):
    group = tl.arange(0, MOST)
    scale = widen(tl.load(scale_ptr + group, mask=group < count, other=0.0))
    return tl.min(scale.to(tl.int32, bitcast=True), axis=0) < 0


@triton.jit
def dequantize_whole_blocks(
    stored, other_ptr, target_ptr, at, largest, norm,
    BIT_WIDTH: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr, ALIGNED: tl.constexpr, PLACE: tl.constexpr,
    UNEVEN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The same for ROWS whole blocks; if one has an uneven group, a few blocks at a time, which takes few registers."""
    first, _, column, stride, limit = at
    some_uneven = False
    if UNEVEN:
        some_uneven = _some_flagged(stored[1] + first // INNER, limit * (BLOCK // INNER), ROWS * BLOCK // INNER)
    if some_uneven:
        CHUNK: tl.constexpr = max(ROWS // 4, 1)
        for start in range(0, limit, CHUNK):
            few = first + start * BLOCK, tl.arange(0, CHUNK)[:, None], column, stride, limit - start
            dequantize_blocks(
                stored, other_ptr, target_ptr, few, largest, norm,
                BIT_WIDTH, BLOCK, INNER, ALIGNED, PLACE, False, UNEVEN, FLAGGED=True,
            )  # fmt: skip
    else:
        dequantize_blocks(
            stored, other_ptr, target_ptr, at, largest, norm,
            BIT_WIDTH, BLOCK, INNER, ALIGNED, PLACE, False, UNEVEN, FLAGGED=not UNEVEN,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["numel", "outer", "places", "span", "run"],
    do_not_specialize_on_alignment=["scale_ptr", "minimum_ptr"],
)
def dequantize_kernel(
    codes_ptr, scale_ptr, minimum_ptr, other_ptr, target_ptr, numel, largest,
    mean_ptr, factor_ptr, outer, places, span, run,
    BIT_WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS_2: tl.constexpr,
    INNER: tl.constexpr, ALIGNED: tl.constexpr, PLACE: tl.constexpr, UNEVEN: tl.constexpr,
):  # fmt: skip
    stored, norm = (codes_ptr, scale_ptr, minimum_ptr), (mean_ptr, factor_ptr, outer, places, span, run)
    if ROWS > 0:
        dequantize_whole_blocks(
            stored, other_ptr, target_ptr, whole_blocks(numel, BLOCK, ROWS), largest, norm,
            BIT_WIDTH, BLOCK, INNER, ALIGNED, PLACE, UNEVEN, ROWS,
        )  # fmt: skip
    at = single_block(numel, BLOCK, ROWS, COLUMNS_2)
    if at[4] > 0:
        dequantize_blocks(
            stored, other_ptr, target_ptr, at, largest, norm,
            BIT_WIDTH, BLOCK, INNER, ALIGNED, PLACE, True, UNEVEN, FLAGGED=True,
        )  # fmt: skip


_UNEVEN_TILE = tl.constexpr(2048)
"""Elements of whole blocks that are quantized at a time where a bucket may be uneven."""
_LEAST_SPREAD, _MOST_ALIKE = tl.constexpr(8192), tl.constexpr(6)
"""See `reference.spreads`."""
_LARGEST_SHIFT, _LARGEST, _FAR = tl.constexpr(0.5 - 2.0**-15), tl.constexpr(2.0**125), tl.constexpr(FAR)
"""Shifts beyond the first, one in 2^14, elements beyond the second, stretched ones beyond the third: rare groups."""


@triton.jit
def _positions(
    x, base, inverse, valid, BIT_WIDTH: tl.constexpr, STOCHASTIC: tl.constexpr, MISSING: tl.constexpr = True
):  # fmt: skip
    """clip((x - m) / s): 0 in constant and empty groups and where not valid.

    Unless MISSING all is finite, valid and within the range, up to four roundings of 2^-24 each. They are less than
    half of 2^-16 steps up to 5 bits, so that rounding absorbs them, with random bits as well.
    """
    TOP: tl.constexpr = (1 << BIT_WIDTH) - 1.0
    x, flagged, most = widen(x), is_flagged(inverse), TOP
    if MISSING:
        base = tl.where(inverse != 0.0, base, 0.0)  # NaN in empty groups
        inverse = tl.abs(inverse)
        most = tl.where(flagged, TOP - 1.0, TOP)
    t = (x - base) * inverse
    if MISSING or (BIT_WIDTH > 5 and STOCHASTIC):
        t = tl.minimum(tl.maximum(t, 0.0), most)
    if BIT_WIDTH > 5 and STOCHASTIC:  # see `reference.positions_of_zeros`
        whole = ((t.to(tl.int32, bitcast=True) + 0x80) & -256).to(tl.float32, bitcast=True)
        t = tl.where(x == 0.0, whole, t)
    if MISSING:
        t = tl.where(valid & is_finite(x), t, tl.where(valid & flagged, TOP, 0.0))
    return t


@triton.jit
def _parts_of_steps(t):
    """Where positions lie between two levels, in 256ths of a step from its middle, and in which halves: float32.

    Halves: whether they are in the upper half of a step, plus 2^15 times whether they are in its middle half. Whole
    numbers in float arithmetic, which runs at full rate.
    """
    part = tl.fma(t, 256.0, MAGIC).to(tl.int32, bitcast=True) & ~0x3FFF00  # without whole steps
    part = part.to(tl.float32, bitcast=True) - (MAGIC + 128.0)
    upper = tl.minimum(tl.maximum(part + 1.0, 0.0), 1.0)
    middle = tl.minimum(tl.maximum(64.5 - tl.abs(part + 0.5), 0.0), 1.0)
    return part, tl.fma(middle, 32768.0, upper)


@triton.jit
def _spreads(spread, halves, size, inverse):
    """Whether groups shift their levels, from sums over their elements; see `reference.spreads`."""
    a, b = size - 2 * (halves & 0x7FFF), size - 2 * (halves >> 15)
    return (spread >= size * _LEAST_SPREAD) & (a * a + b * b <= size * _MOST_ALIKE) & ~is_flagged(inverse)


@triton.jit
def _closest_shifted(t, shift, magic, BIT_WIDTH: tl.constexpr, CLAMPED: tl.constexpr):
    """The closest of shifted levels, for each position; a shift of 0 and a magic number of 0 change none."""
    t = t + shift
    if CLAMPED:
        t = tl.minimum(tl.maximum(t, 0.0), (1 << BIT_WIDTH) - 1.0)
    return (t + magic) - magic


@triton.jit
def _codes(t, words, i: tl.constexpr, BIT_WIDTH: tl.constexpr, STOCHASTIC: tl.constexpr):
    return round_stochastic(t, element_bits(words, i), BIT_WIDTH) if STOCHASTIC else nearest_int(t)


@triton.jit
def _range_of_planes(planes, start: tl.constexpr, stop: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """Ranges of keys, [GROUPS] each, of groups that lie in planes start to stop; NaN wins."""
    low = widen(planes[start])
    high = low
    for i in tl.static_range(start + 1, stop):
        x = widen(planes[i])
        low, high = minimum(low, x), maximum(high, x)
    low_Q = key_of(least_of(tl.reshape(low, (GROUPS, LANES))))
    return low_Q, key_of(greatest_of(tl.reshape(high, (GROUPS, LANES))))


@triton.jit
def quantize_whole_blocks(
    x_ptr, stored, seed_ptr, norm, at,
    BIT_WIDTH: tl.constexpr, STOCHASTIC: tl.constexpr, DITHERED: tl.constexpr,
    INNER: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    """Range, round and pack whole blocks, reading x once. INNER and BLOCK are powers of two.

    Groups may be uneven; blocks that seem to have such a one are written again.
    """
    W: tl.constexpr = BLOCK // 8
    PLANES: tl.constexpr = max(INNER // W, 1)  # in which a group lies
    LANES: tl.constexpr = min(INNER, W)  # elements of one of these planes that are in one group
    GROUPS: tl.constexpr = ROWS * W // LANES  # in PLANES planes
    NEAR: tl.constexpr = min(LANES, 8)
    MOST: tl.constexpr = _FAR if PLACE < 0 else _LARGEST
    codes_ptr, scale_ptr, minimum_ptr = stored
    first, _, _, _, rows = at
    planes = load_planes(x_ptr, at, BLOCK, RAGGED=False)
    if PLACE:
        planes = normalize_planes(planes, norm, at, BLOCK, PLACE, False, MAY_BE_FAR=False)
    q_row, q_column = tl.arange(0, GROUPS) * LANES // W, tl.arange(0, GROUPS) * LANES % W  # a group's first element
    codes, uneven_Q = (), tl.zeros((GROUPS,), tl.int32)
    for start in tl.static_range(0, 8, PLANES):
        low_Q, high_Q = _range_of_planes(planes, start, start + PLANES, GROUPS, LANES)
        may_Q, zero_Q = may_be_uneven(planes, low_Q, high_Q, start, start + PLANES, GROUPS, LANES, ROWS, W, MOST)
        uneven_Q |= may_Q.to(tl.int32)
        base_Q, scale_Q, inverse_Q = calibrate(low_Q, high_Q, has_missing(low_Q, high_Q), zero_Q, BIT_WIDTH)
        group = first // INNER + (q_row * BLOCK + start * W + q_column) // INNER
        base = tl.reshape(tl.broadcast_to(base_Q[:, None], (GROUPS, LANES)), (ROWS, W))
        inverse = tl.reshape(tl.broadcast_to(inverse_Q[:, None], (GROUPS, LANES)), (ROWS, W))
        if DITHERED:
            # Sums of 64 whole numbers below 2^22, exact in any order: those of one thread first, so that they are few.
            spread = tl.zeros((ROWS, W), tl.float32)
            halves = tl.zeros((GROUPS, LANES // NEAR), tl.float32)
            for i in tl.static_range(start, start + PLANES):
                t = _positions(planes[i], base, inverse, True, BIT_WIDTH, STOCHASTIC, MISSING=False)
                part, half = _parts_of_steps(t)
                spread = tl.fma(part, part, spread)
                halves += tl.sum(tl.reshape(half, (GROUPS, LANES // NEAR, NEAR)), axis=2)
            spread = nearest_int(tl.sum(tl.reshape(spread, (GROUPS, LANES // NEAR, NEAR)), axis=2))
            halves = nearest_int(halves)
            spread_Q, halves_Q = INNER * 16384 - tl.sum(spread, axis=1), tl.sum(halves, axis=1)
            shift_Q = shifts(group, tl.load(seed_ptr + group * 0))
            is_shifted = _spreads(spread_Q, halves_Q, INNER, inverse_Q) & ~zero_Q
            base_Q = tl.where(is_shifted, shifted_minimum(base_Q, scale_Q, shift_Q), base_Q)
            # Positions are not clipped, so shifts must not take the end of a range beyond half a step.
            uneven_Q |= (tl.abs(shift_Q) > _LARGEST_SHIFT).to(tl.int32)
            shift_Q, magic_Q = tl.where(is_shifted, shift_Q, 0.0), tl.where(is_shifted, MAGIC, 0.0)
            shift = tl.reshape(tl.broadcast_to(shift_Q[:, None], (GROUPS, LANES)), (ROWS, W))
            magic = tl.reshape(tl.broadcast_to(magic_Q[:, None], (GROUPS, LANES)), (ROWS, W))
        store_metadata(scale_ptr + group, scale_Q, q_row < rows)
        store_metadata(minimum_ptr + group, base_Q, q_row < rows)
        if start == 0:  # not before, to hold them in registers for a short time
            words = seed_words(at, seed_ptr, BLOCK, STOCHASTIC)
        for i in tl.static_range(start, start + PLANES):
            t = _positions(planes[i], base, inverse, True, BIT_WIDTH, STOCHASTIC, MISSING=False)
            if DITHERED:
                t = _closest_shifted(t, shift, magic, BIT_WIDTH, CLAMPED=BIT_WIDTH > 5)
            codes += (_codes(t, words, i, BIT_WIDTH, STOCHASTIC),)
    store_codes(codes_ptr, codes, at, BLOCK, BIT_WIDTH, RAGGED=False)
    if tl.max(uneven_Q, axis=0) > 0:
        CHUNK: tl.constexpr = min(max(_UNEVEN_TILE // BLOCK, 1), ROWS)  # rows
        for row_0 in range(0, rows, CHUNK):
            if tl.max(tl.where(q_row // CHUNK * CHUNK == row_0, uneven_Q, 0), axis=0) > 0:
                tl.debug_barrier()  # behind the stores above
                quantize_blocks(
                    x_ptr, stored, seed_ptr, norm, first + row_0 * BLOCK, tl.minimum(rows - row_0, CHUNK) * BLOCK,
                    BIT_WIDTH, STOCHASTIC, DITHERED, True, INNER, BLOCK,
                    CHUNK * BLOCK // INNER, INNER, W, CHUNK, PLACE, RAGGED=False,
                )  # fmt: skip


@triton.jit
def gathered(values, index):
    """Values of a 1-D tensor at the places of a 2-D one."""
    found = tl.gather(values, tl.reshape(index, (index.shape[0] * index.shape[1],)), 0)
    return tl.reshape(found, index.shape)


@triton.jit
def quantize_blocks(
    x_ptr, stored, seed_ptr, norm, first, count,
    BIT_WIDTH: tl.constexpr, STOCHASTIC: tl.constexpr, DITHERED: tl.constexpr, UNEVEN: tl.constexpr,
    INNER: tl.constexpr, BLOCK: tl.constexpr,
    GROUPS_2: tl.constexpr, INNER_2: tl.constexpr, COLUMNS_2: tl.constexpr, ROWS: tl.constexpr, PLACE: tl.constexpr,
    RAGGED: tl.constexpr,
):  # fmt: skip
    """Range, round and pack `count` (int32) elements of whole groups, of any size. The cache gives x once more.

    Blocks are whole if there are several; INNER is any divisor of BLOCK. GROUPS_2, INNER_2 and COLUMNS_2 are powers of
    two of at least ROWS * BLOCK // INNER, INNER and BLOCK // 8.
    """
    codes_ptr, scale_ptr, minimum_ptr = stored
    lane = tl.arange(0, INNER_2)[None, :]
    element = tl.arange(0, GROUPS_2)[:, None] * INNER + lane
    valid = (lane < INNER) & (element < count)
    x_GI = widen(tl.load(x_ptr + first + element, mask=valid))
    if PLACE < 0:
        x_GI = stretch(x_GI)
    elif PLACE:
        mean, factor = load_statistics(norm, first, element, valid, PLACE)
        x_GI = normalize_elements(x_GI, norm, mean, factor)
    low_GI, high_GI = finite_keys(x_GI, valid)
    missing_G = tl.max((valid & ~is_finite(x_GI)).to(tl.int32), axis=1) > 0
    zero_G = tl.max((valid & (x_GI == 0.0)).to(tl.int32), axis=1) > 0
    low_G, high_G = tl.min(low_GI, axis=1), tl.max(high_GI, axis=1)
    base_G, scale_G, inverse_G = calibrate(low_G, high_G, missing_G, zero_G, BIT_WIDTH)
    group = tl.arange(0, GROUPS_2)
    stored_G, shift_G, magic_G, far_G, some_uneven = base_G, scale_G, scale_G, scale_G, False
    if DITHERED:
        t = _positions(x_GI, base_G[:, None], inverse_G[:, None], valid, BIT_WIDTH, STOCHASTIC)
        part, half = _parts_of_steps(t)
        spread_G = tl.sum(tl.where(valid, 16384 - nearest_int(part * part), 0), axis=1)
        halves_G = tl.sum(tl.where(valid, nearest_int(half), 0), axis=1)
        size_G = tl.minimum(tl.maximum(count - group * INNER, 0), INNER)
        shift_G = shifts(first // INNER + group, tl.load(seed_ptr + group * 0))
        is_shifted = _spreads(spread_G, halves_G, size_G, inverse_G) & ~zero_G
        stored_G = tl.where(is_shifted, shifted_minimum(base_G, scale_G, shift_G), base_G)
        shift_G, magic_G = tl.where(is_shifted, shift_G, 0.0), tl.where(is_shifted, MAGIC, 0.0)
    if UNEVEN:  # then the inverse has its sign bit set, and the minimum is the base
        uneven_G = is_uneven(x_GI, valid)
        some_uneven = tl.max(uneven_G.to(tl.int32), axis=0) > 0
        if some_uneven:
            minimum_G, scale_bits_G, step_G, own_far_G = fit(x_GI, valid, BIT_WIDTH)
            stored_G = tl.where(uneven_G, minimum_G.to(tl.float32, bitcast=True), stored_G)
            base_G = tl.where(uneven_G, minimum_G.to(tl.float32, bitcast=True), base_G)
            scale_G = tl.where(uneven_G, (scale_bits_G << 16).to(tl.float32, bitcast=True), scale_G)
            inverse_G = tl.where(uneven_G, -inverse_of(step_G), inverse_G)
            magic_G = tl.where(uneven_G, 0.0, magic_G)
            far_G = own_far_G
    store_metadata(scale_ptr + first // INNER + group, scale_G, group * INNER < count)
    store_metadata(minimum_ptr + first // INNER + group, stored_G, group * INNER < count)
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS_2)[None, :]
    if RAGGED:
        columns, limit = (count + 7) // 8, count
    else:
        columns, limit = BLOCK // 8, count // BLOCK
    at = first, row, column, columns, limit
    planes = load_planes(x_ptr, at, BLOCK, RAGGED)
    if PLACE:
        planes = normalize_planes(planes, norm, at, BLOCK, PLACE, RAGGED)
    words = seed_words(at, seed_ptr, BLOCK, STOCHASTIC)
    codes = ()
    for i in tl.static_range(8):
        group = tl.minimum((row * BLOCK + i * columns + column) // INNER, GROUPS_2 - 1)
        base, inverse = gathered(base_G, group), gathered(inverse_G, group)
        valid = element_mask(i, at, RAGGED)
        t = _positions(planes[i], base, inverse, valid, BIT_WIDTH, STOCHASTIC)
        if DITHERED:
            t = _closest_shifted(t, gathered(shift_G, group), gathered(magic_G, group), BIT_WIDTH, CLAMPED=True)
        if UNEVEN:
            if some_uneven:
                form, far = base.to(tl.int32, bitcast=True), gathered(far_G, group)
                own = positions(widen(planes[i]), form, tl.abs(inverse), far, BIT_WIDTH)
                t = tl.where(valid & is_flagged(inverse), own, t)
        codes += (_codes(t, words, i, BIT_WIDTH, STOCHASTIC),)
    store_codes(codes_ptr, codes, at, BLOCK, BIT_WIDTH, RAGGED)


@triton.jit(
    do_not_specialize=["numel", "outer", "places", "span", "run"],
    do_not_specialize_on_alignment=["scale_ptr", "minimum_ptr", "seed_ptr"],
)
def quantize_kernel(
    x_ptr, codes_ptr, scale_ptr, minimum_ptr, seed_ptr, numel, mean_ptr, factor_ptr, outer, places, span, run,
    BIT_WIDTH: tl.constexpr, STOCHASTIC: tl.constexpr, DITHERED: tl.constexpr, UNEVEN: tl.constexpr,
    INNER: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    GROUPS_2: tl.constexpr, INNER_2: tl.constexpr, COLUMNS_2: tl.constexpr, PLACE: tl.constexpr,
):  # fmt: skip
    """Quantize in one pass. With a PLACE, elements are normalized (-1: stretched) as they are loaded. With ROWS, groups
    are UNEVEN."""
    stored, norm = (codes_ptr, scale_ptr, minimum_ptr), (mean_ptr, factor_ptr, outer, places, span, run)
    if ROWS > 0:
        quantize_whole_blocks(
            x_ptr, stored, seed_ptr, norm, whole_blocks(numel, BLOCK, ROWS),
            BIT_WIDTH, STOCHASTIC, DITHERED, INNER, BLOCK, ROWS, PLACE,
        )  # fmt: skip
    first, _, _, _, count = single_block(numel, BLOCK, ROWS, COLUMNS_2)
    if count > 0:
        quantize_blocks(
            x_ptr, stored, seed_ptr, norm, first, count,
            BIT_WIDTH, STOCHASTIC, DITHERED, UNEVEN, INNER, BLOCK, GROUPS_2, INNER_2, COLUMNS_2, 1, PLACE,
            RAGGED=True,
        )  # fmt: skip


FEW_REGISTERS, SOME_REGISTERS, MOST_REGISTERS = 128, 168, 255
"""Registers of a thread that leave room for four programs on a processor of a GPU, three, or two, and spill none.

Without a number, CUDA's assembler may spill some to make room for one more.
"""


def quantize_uniform(x, plan, seed, mean, factor, place, buffer):
    program = _quantizing(plan, x.itemsize, seed is not None, place)
    if program is None:
        return NotImplemented
    program.run(x, buffer, buffer, buffer, seed_on(x.device, seed), mean, factor)


@functools.lru_cache(maxsize=4096)
def _quantizing(plan: UniformPlan, itemsize: int, stochastic: bool, place: Place | None) -> Program | None:
    """The program of one read, if any. Its tensors: elements, buffer (codes, scales, minima), seed, means, factors."""
    geometry = plan.geometry
    if not plan.has_kernels or not fits(place, plan):
        return None
    constants = {
        "STOCHASTIC": stochastic,
        "DITHERED": plan.dithered,
        "UNEVEN": plan.uneven,
        "INNER": geometry.inner,
        "GROUPS_2": next_power_of_2(max(geometry.block_size // geometry.inner, 1)),
        "INNER_2": next_power_of_2(geometry.inner),
    }
    constants |= parts_of(plan) | values_of(place, geometry, plan.stretched)
    registers = None
    if geometry.block_size == DEFAULT_BLOCK:
        is_few = plan.uneven and itemsize == 2 and geometry.inner == DEFAULT_BLOCK and geometry.bit_width >= 4
        few = SOME_REGISTERS if plan.dithered and geometry.bit_width == 5 else FEW_REGISTERS  # it would spill
        registers = few if is_few else MOST_REGISTERS
    return over_blocks(quantize_kernel, geometry, itemsize, plan.uneven, registers=registers, **constants)


def dequantize_uniform(buffer, plan, mean, factor, place, other, mask, target):
    """Where the kernels' integers reach; a mask is applied in a pass of its own."""
    program = _decoding(plan, target.dtype, place)
    if program is None:
        return NotImplemented
    program.run(buffer, buffer, buffer, other, target, mean, factor)
    if mask is not None:
        mask_multiply(mask, plan.geometry.numel, target, 0.0, target)


@functools.lru_cache(maxsize=4096)
def _decoding(plan: UniformPlan, dtype: torch.dtype, place: Place | None) -> Program | None:
    """Its tensors: buffer (codes, scales, minima), factor or addend, target, means, factors. None if out of reach."""
    geometry = plan.geometry
    if not plan.has_kernels or not fits(place, plan):
        return None
    values: dict[str, Any] = {
        "largest": torch.finfo(dtype if place is None else torch.float32).max,
        "UNEVEN": plan.uneven,
        "INNER": geometry.inner,
        "ALIGNED": geometry.inner % (geometry.block_size // 8) == 0,
    }
    values |= parts_of(plan) | values_of(place, geometry, plan.stretched)
    return over_blocks(dequantize_kernel, geometry, dtype.itemsize, **values)
