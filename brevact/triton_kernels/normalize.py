"""Normalization on the way: elements are normalized before they are quantized, and back.

`norm` is a tuple: pointers to means, which may be None, and to factors; outer, places, span and run of `values_of`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from brevact.geometry import Geometry, Place, UniformPlan
from brevact.triton_kernels.floats import maximum, minimum, stretch, widen
from brevact.triton_kernels.tiles import element_mask

_PLAIN, _ROWS, _INNER, _ALIGNED, _ALIKE, _CONSECUTIVE, _TWO, _ONE = 4, 1, 2, 8, 16, 32, 64, 128
_NEAR = 8  # elements of a plane that lie behind each other in one thread, at most
LARGEST_RUN = 1 << 30
"""Elements of a row, and of a run of groups inside of it, that 32-bit places reach."""


def fits(place: Place | None, plan: UniformPlan) -> bool:
    if place is None or plan.stretched:  # not both
        return place is None
    return place.inner <= LARGEST_RUN and (place.outer >= plan.geometry.numel or place.outer <= LARGEST_RUN)


def values_of(place: Place | None, geometry: Geometry, stretched: bool = False) -> dict[str, int]:
    """A place by the kernels' parameters, 0 for none, with a PLACE of -1 if elements are stretched instead.

    Flags: several rows, groups in a row, one group a plane's row; and whether each eight elements from a multiple of
    eight on have one group, eight groups in a row, or one or two groups.
    """
    if place is None:
        return dict.fromkeys(("outer", "places", "span", "run"), 0) | {"PLACE": -stretched}
    rows, inner, columns = place.outer < geometry.numel, place.inner > 1, geometry.block_size // 8
    aligned = not (rows and place.outer % columns) and not (inner and place.run % columns)
    flags = _PLAIN + _ROWS * rows + _INNER * inner + _ALIGNED * aligned
    if inner and (place.inner % place.run or (rows and place.outer % place.inner)):
        near = 0
    elif not (rows and place.outer % _NEAR) and not (inner and place.run % _NEAR):
        near = _ALIKE
    elif not (rows and (place.outer % _NEAR or place.row % _NEAR)) and place.run == 1 and place.inner % _NEAR == 0:
        near = _CONSECUTIVE
    else:
        near = _TWO * ((place.run if inner else place.outer) >= _NEAR)
    if columns % _NEAR == 0:
        flags += near * (not aligned) or _ONE * (aligned and near != 0)
    return {"outer": place.outer, "places": place.row, "span": place.inner, "run": place.run, "PLACE": flags}


@triton.jit
def load_statistics(norm, first, offset, valid, PLACE: tl.constexpr):
    """Means (0 for none) and factors of elements first (int64) + offset (int32)."""
    mean_ptr, factor_ptr, outer, places, span, run = norm
    group = offset * 0
    if PLACE % 2 == 1:
        start = first // outer * places
        group += ((first % outer).to(tl.int32) + offset) // outer * places
    else:
        start = first * 0
    if PLACE // 2 % 2 == 1:
        group += ((first % span).to(tl.int32) + offset) % span // run
    factor = tl.load(factor_ptr + start + group, mask=valid, other=0.0)
    mean = 0.0
    if mean_ptr is not None:
        mean = tl.load(mean_ptr + start + group, mask=valid, other=0.0)
    return mean, factor


@triton.constexpr_function
def near_of(dtype):
    """Elements of a plane in one thread."""
    return min(128 // dtype.primitive_bitwidth, 8)


@triton.jit
def runs_before(start, offset, size):
    """(start + offset) // size, 0 <= start < size and offset (int32) at most 2^14, and the rest of the last run.

    By one multiplication: M = ceil(2^31 / size) is off by less than 1, so x * M / 2^31 by less than 2^-15 for x < 2^16.
    Runs longer than 2^15 count as their last 2^15 elements; the returned rest may then be too small, but is at least
    2^14.
    """
    length = tl.minimum(size, 1 << 15).to(tl.int32)
    place = length - tl.minimum(size - start, 1 << 15).to(tl.int32) + offset
    magic = (0x7FFFFFFF // length).to(tl.uint32) + 1
    runs = tl.umulhi((place * 2).to(tl.uint32), magic).to(tl.int32)
    return runs, (runs + 1) * length - place


@triton.jit
def _group_in_row(first, runs, span, run):
    """(first % span // run + runs) % (span // run): the groups of a row begin again."""
    groups, start = span // run, (first % span // run).to(tl.int32)
    wraps, _ = runs_before(start, runs, groups)
    return start + runs - wraps * groups.to(tl.int32)


@triton.jit
def _spread(values, NEAR: tl.constexpr):
    """[R, W / NEAR] values of elements that are near to each other, for each of them."""
    ROWS: tl.constexpr = values.shape[0]
    CHUNKS: tl.constexpr = values.shape[1]
    return tl.reshape(tl.broadcast_to(values[:, :, None], (ROWS, CHUNKS, NEAR)), (ROWS, CHUNKS * NEAR))


@triton.jit
def _load_near(pointer, index, other_index, is_other, valid, PLACE: tl.constexpr, NEAR: tl.constexpr):
    """Statistics of a plane, from the indices of each NEAR elements."""
    if PLACE // 32 % 2 == 1:
        lane = tl.arange(0, NEAR)[None, None, :]
        index = tl.reshape(index[:, :, None] + lane, (index.shape[0], index.shape[1] * NEAR))
        found = tl.load(pointer + tl.max_contiguous(tl.multiple_of(index, (1, NEAR)), (1, NEAR)), mask=valid, other=0.0)
    elif PLACE >= 128:
        found = tl.load(pointer + index, mask=valid, other=0.0)
    else:
        found = _spread(tl.load(pointer + index, mask=valid, other=0.0), NEAR)
        if PLACE // 64 % 2 == 1:
            found = tl.where(is_other, _spread(tl.load(pointer + other_index, mask=valid, other=0.0), NEAR), found)
    return found


@triton.jit
def load_statistics_of_plane(
    norm, tile, i: tl.constexpr, valid,
    BLOCK: tl.constexpr, PLACE: tl.constexpr, RAGGED: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """Means (0 for none) and factors of plane i of a tile; NEAR: consecutive elements of a plane in one thread."""
    mean_ptr, factor_ptr, outer, places, span, run = norm
    first, row, column, stride, _ = tile
    offset = row * BLOCK + i * stride
    if RAGGED or PLACE < 16:
        if RAGGED or PLACE < 8:
            offset += column
        mean, factor = load_statistics(norm, first, offset, valid, PLACE)
    else:
        if PLACE < 128:
            offset += tl.arange(0, column.shape[1] // NEAR)[None, :] * NEAR
        index, other, is_other, start = offset * 0, offset * 0, False, first * 0
        if PLACE // 2 % 2 == 1:
            runs, left = runs_before(first % run, offset, run)
            index = _group_in_row(first, runs, span, run)
            if PLACE // 64 % 2 == 1:
                other = _group_in_row(first, runs + 1, span, run)
        if PLACE % 2 == 1:
            start = first // outer * places
            rows, left_of_row = runs_before(first % outer, offset, outer)
            index += rows * places
            if PLACE // 64 % 2 == 1:
                last_row, _ = runs_before(first % outer, offset + (NEAR - 1), outer)
                other += last_row * places
        if PLACE // 64 % 2 == 1:
            if PLACE // 2 % 2 == 0:
                left = left_of_row
            is_other = tl.arange(0, column.shape[1])[None, :] % NEAR >= _spread(left, NEAR)
        factor = _load_near(factor_ptr + start, index, other, is_other, valid, PLACE, NEAR)
        mean = 0.0
        if mean_ptr is not None:
            mean = _load_near(mean_ptr + start, index, other, is_other, valid, PLACE, NEAR)
    return mean, factor


@triton.jit
def normalize_elements(x, norm, mean, factor):
    """(x - mean) * factor, as `normalizing.normalize` defines it; x is float32."""
    if norm[0] is not None:
        x = x - mean
    return x * factor


@triton.jit
def normalize_planes(
    planes, norm, tile, BLOCK: tl.constexpr, PLACE: tl.constexpr, RAGGED: tl.constexpr, MAY_BE_FAR: tl.constexpr = True
):  # fmt: skip
    """Normalized elements, or, without a place, stretched ones."""
    NEAR: tl.constexpr = near_of(planes[0].dtype)
    normalized = ()
    for i in tl.static_range(8):
        x, valid = widen(planes[i]), element_mask(i, tile, RAGGED)
        if PLACE < 0:
            normalized += (stretch(x, MAY_BE_FAR),)
        else:
            mean, factor = load_statistics_of_plane(norm, tile, i, valid, BLOCK, PLACE, RAGGED, NEAR)
            normalized += (normalize_elements(x, norm, mean, factor),)
    return normalized


@triton.jit
def denormalize_elements(z, norm, mean, factor, dtype: tl.constexpr):
    """z * factor + mean, as `normalizing.denormalize` defines it, in float32 and within the range of the type."""
    x = z * factor
    if norm[0] is not None:
        x = x + mean
    if dtype == tl.float16:
        x = maximum(minimum(x, 65504.0), -65504.0)
    return x
