"""Normalization on the way: elements are normalized before they are quantized, and back."""

from __future__ import annotations

import triton
import triton.language as tl

from brevact.geometry import Geometry, Place
from brevact.triton_kernels.floats import maximum, minimum, widen
from brevact.triton_kernels.tiles import element_mask

_PLAIN, _ROWS, _INNER, _ALIGNED = 4, 1, 2, 8
LARGEST_RUN = 1 << 30
"""Elements of a row, and of a run of groups inside of it, that 32-bit places reach."""


def fits(place: Place | None, numel: int) -> bool:
    return place is None or (place.inner <= LARGEST_RUN and (place.outer >= numel or place.outer <= LARGEST_RUN))


def values_of(place: Place | None, geometry: Geometry) -> dict[str, int]:
    """A place by the kernels' parameters, 0 for none. Flags: several rows, groups in a row, one group a plane's row."""
    if place is None:
        return dict.fromkeys(("outer", "places", "span", "run", "PLACE"), 0)
    rows, inner, columns = place.outer < geometry.numel, place.inner > 1, geometry.block_size // 8
    aligned = not (rows and place.outer % columns) and not (inner and place.run % columns)
    flags = _PLAIN + _ROWS * rows + _INNER * inner + _ALIGNED * aligned
    return {"outer": place.outer, "places": place.row, "span": place.inner, "run": place.run, "PLACE": flags}


@triton.jit
def load_statistics(
    mean_ptr, factor_ptr, outer, places, span, run, first, offset, valid, PLACE: tl.constexpr
):  # fmt: skip
    """Means (0 for none) and factors of elements first (int64) + offset (int32)."""
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


@triton.jit
def normalize_elements(
    x, mean_ptr, factor_ptr, outer, places, span, run, first, offset, valid, PLACE: tl.constexpr
):  # fmt: skip
    """(x - mean) * factor, as `normalizing.normalize` defines it; x is float32."""
    mean, factor = load_statistics(mean_ptr, factor_ptr, outer, places, span, run, first, offset, valid, PLACE)
    if mean_ptr is not None:
        x = x - mean
    return x * factor


@triton.jit
def normalize_planes(
    planes, mean_ptr, factor_ptr, outer, places, span, run, first, row, column, stride, limit,
    BLOCK: tl.constexpr, PLACE: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    normalized = ()
    for i in tl.static_range(8):
        offset = row * BLOCK + i * stride
        if RAGGED or PLACE < 8:
            offset += column
        valid = element_mask(i, row, column, stride, limit, RAGGED)
        normalized += (
            normalize_elements(
                widen(planes[i]), mean_ptr, factor_ptr, outer, places, span, run, first, offset, valid, PLACE
            ),
        )  # fmt: skip
    return normalized


@triton.jit
def denormalize_elements(
    z, mean_ptr, factor_ptr, outer, places, span, run, first, offset, valid, dtype: tl.constexpr, PLACE: tl.constexpr
):  # fmt: skip
    """z * factor + mean, as `normalizing.denormalize` defines it, in float32 and within the range of the type."""
    mean, factor = load_statistics(mean_ptr, factor_ptr, outer, places, span, run, first, offset, valid, PLACE)
    x = z * factor
    if mean_ptr is not None:
        x = x + mean
    if dtype == tl.float16:
        x = maximum(minimum(x, 65504.0), -65504.0)
    return x
