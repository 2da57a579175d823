"""Kernel that decodes, and multiplies by the way; `kernel_ops.dequantize_uniform`'s values."""

import triton
import triton.language as tl

from brevact.triton_kernels.floats import cast, float_of_code, maximum, minimum, widen
from brevact.triton_kernels.groups import group_of, is_flagged
from brevact.triton_kernels.normalize import denormalize_elements
from brevact.triton_kernels.tiles import element_mask, load_bytes, single_block, unpack_code, whole_blocks
from brevact.triton_kernels.uneven import values


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
    y = base + tl.abs(scale) * float_of_code(q, BIT_WIDTH)
    y = maximum(minimum(y, largest), -largest)
    if FLAGGED and UNEVEN:
        own = values(q, base.to(tl.int32, bitcast=True), scale, largest, BIT_WIDTH)
        y = tl.where(flagged, own, y)
    elif FLAGGED:
        y = tl.where(flagged & (q == (1 << BIT_WIDTH) - 1), float("nan"), y)
    return y


@triton.jit
def dequantize_blocks(
    codes_ptr, scale_ptr, minimum_ptr, other_ptr, target_ptr, first, row, column, stride, limit, inner, groups, largest,
    mean_ptr, factor_ptr, outer, places, span, run,
    BIT_WIDTH: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr, ALIGNED: tl.constexpr, PLACE: tl.constexpr,
    RAGGED: tl.constexpr, UNEVEN: tl.constexpr, FLAGGED: tl.constexpr,
):  # fmt: skip
    """ALIGNED: a row of a whole block's plane lies in one group. With a PLACE, undo a normalization and add `other`."""
    PLANES: tl.constexpr = INNER // (BLOCK // 8) if INNER > BLOCK // 8 else 1  # with the same groups
    packed = load_bytes(codes_ptr + first // 8 * BIT_WIDTH, row, column, stride, limit, BLOCK, BIT_WIDTH, RAGGED)
    for i in tl.static_range(8):
        valid = element_mask(i, row, column, stride, limit, RAGGED)
        offset = row * BLOCK + i * stride
        if RAGGED or not ALIGNED:
            group = group_of(first, offset + column, inner, groups, INNER)
            base, scale, flagged = load_grid(scale_ptr + group, minimum_ptr + group, valid, BIT_WIDTH)
        elif i % PLANES == 0:
            group = group_of(first, offset, inner, groups, INNER)
            base, scale, flagged = load_grid(scale_ptr + group, minimum_ptr + group, valid, BIT_WIDTH)
        y = value_of(unpack_code(packed, i, BIT_WIDTH), base, scale, flagged, largest, BIT_WIDTH, UNEVEN, FLAGGED)
        if PLACE:
            places_of = offset
            if RAGGED or PLACE < 8:
                places_of += column
            y = denormalize_elements(
                y, mean_ptr, factor_ptr, outer, places, span, run, first, places_of, valid,
                target_ptr.dtype.element_ty, PLACE,
            )  # fmt: skip
        y = cast(y, target_ptr.dtype.element_ty)
        pointers = first + (offset + column)
        if other_ptr is not None:
            other = widen(tl.load(other_ptr + pointers, mask=valid))
            y = cast(widen(y) + other if PLACE else widen(y) * other, target_ptr.dtype.element_ty)
        tl.store(target_ptr + pointers, y, mask=valid)


@triton.jit
def _some_flagged(scale_ptr, count, MOST: tl.constexpr):
    group = tl.arange(0, MOST)
    scale = widen(tl.load(scale_ptr + group, mask=group < count, other=0.0))
    return tl.min(scale.to(tl.int32, bitcast=True), axis=0) < 0


@triton.jit
def dequantize_whole_blocks(
    codes_ptr, scale_ptr, minimum_ptr, other_ptr, target_ptr, first, row, column, stride, limit, inner, groups, largest,
    mean_ptr, factor_ptr, outer, places, span, run,
    BIT_WIDTH: tl.constexpr, BLOCK: tl.constexpr, INNER: tl.constexpr, ALIGNED: tl.constexpr, PLACE: tl.constexpr,
    UNEVEN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The same for ROWS whole blocks; if one has an uneven group, a few blocks at a time, which takes few registers."""
    some_uneven = False
    if UNEVEN:
        some_uneven = _some_flagged(scale_ptr + first // INNER, limit * (BLOCK // INNER), ROWS * BLOCK // INNER)
    if some_uneven:
        CHUNK: tl.constexpr = max(ROWS // 4, 1)
        for start in range(0, limit, CHUNK):
            dequantize_blocks(
                codes_ptr, scale_ptr, minimum_ptr, other_ptr, target_ptr,
                first + start * BLOCK, tl.arange(0, CHUNK)[:, None], column, stride, limit - start,
                inner, groups, largest, mean_ptr, factor_ptr, outer, places, span, run,
                BIT_WIDTH, BLOCK, INNER, ALIGNED, PLACE, False, UNEVEN, FLAGGED=True,
            )  # fmt: skip
    else:
        dequantize_blocks(
            codes_ptr, scale_ptr, minimum_ptr, other_ptr, target_ptr, first, row, column, stride, limit,
            inner, groups, largest, mean_ptr, factor_ptr, outer, places, span, run,
            BIT_WIDTH, BLOCK, INNER, ALIGNED, PLACE, False, UNEVEN, FLAGGED=not UNEVEN,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["numel", "inner", "groups", "outer", "places", "span", "run"],
    do_not_specialize_on_alignment=["scale_ptr", "minimum_ptr", "mean_ptr", "factor_ptr"],
)
def dequantize_kernel(
    codes_ptr, scale_ptr, minimum_ptr, other_ptr, target_ptr, numel, inner, groups, largest,
    mean_ptr, factor_ptr, outer, places, span, run,
    BIT_WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS_2: tl.constexpr,
    INNER: tl.constexpr, ALIGNED: tl.constexpr, PLACE: tl.constexpr, UNEVEN: tl.constexpr,
):  # fmt: skip
    if ROWS > 0:
        first, row, column, stride, rows = whole_blocks(numel, BLOCK, ROWS)
        dequantize_whole_blocks(
            codes_ptr, scale_ptr, minimum_ptr, other_ptr, target_ptr, first, row, column, stride, rows,
            inner, groups, largest, mean_ptr, factor_ptr, outer, places, span, run,
            BIT_WIDTH, BLOCK, INNER, ALIGNED, PLACE, UNEVEN, ROWS,
        )  # fmt: skip
    first, row, column, stride, count = single_block(numel, BLOCK, ROWS, COLUMNS_2)
    if count > 0:
        dequantize_blocks(
            codes_ptr, scale_ptr, minimum_ptr, other_ptr, target_ptr, first, row, column, stride, count,
            inner, groups, largest, mean_ptr, factor_ptr, outer, places, span, run,
            BIT_WIDTH, BLOCK, INNER, ALIGNED, PLACE, True, UNEVEN, FLAGGED=True,
        )  # fmt: skip
