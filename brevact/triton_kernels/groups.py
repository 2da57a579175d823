"""Groups of elements that share metadata: ranges, stored minima and scales, and which group an element is in.

A flat tensor of n elements is [O, G, I]: O repetitions of G groups of I = inner consecutive elements; where every group
is one run, O = 1 and the last group is short. Ranges are int32 keys (`floats.key_of`).
"""

import triton
import triton.language as tl

from brevact.triton_kernels.floats import cut, float_of_key, key_of, round_up

LOWEST_KEY, HIGHEST_KEY = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
"""Keys of an empty range; see `floats.key_of`."""
_MINUS_INFINITY_KEY, _INFINITY_KEY = tl.constexpr(-0x7F800001), tl.constexpr(0x7F800000)
_SMALLEST_SCALE = tl.constexpr(2.0**-126)
_LARGEST_RANGE, _LARGEST_END = tl.constexpr(2.0**128 - 2.0**122), tl.constexpr(2.0**125)
_LARGEST_ALIGNED = tl.constexpr(2.0**126)
_LOWEST = tl.constexpr(-(2.0**128 - 2.0**104))
_SIGN = tl.constexpr(-(2**31))


@triton.jit
def is_finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def is_flagged(scale):
    """Whether a float32 scale, or its inverse, has its sign bit set, that of 0 as well."""
    return scale.to(tl.int32, bitcast=True) < 0


@triton.jit
def _with_sign(x, flagged):
    """Float32 without a sign bit, with one where flagged: the `-` operator leaves 0 alone."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(flagged, bits ^ _SIGN, bits).to(tl.float32, bitcast=True)


@triton.jit
def has_missing(low_key, high_key):
    return (low_key <= _MINUS_INFINITY_KEY) | (high_key >= _INFINITY_KEY)


@triton.jit
def finite_keys(x, valid):
    """Keys that widen a range by finite, valid elements: to go into its lower end, and into its upper one."""
    key = key_of(x)
    inside = valid & is_finite(x)
    return tl.where(inside, key, HIGHEST_KEY), tl.where(inside, key, LOWEST_KEY)


@triton.jit
def _aligned(low, high, levels):
    """Code of zero, and scale, of grids with a level at zero; see `reference.aligned`."""
    UNIT: tl.constexpr = 1 << 8
    most = tl.maximum(cut(tl.where(high > 0.0, levels - 1.0, levels), UNIT), 1.0)
    width = tl.where(high > low, high - low, 1.0)
    lower = tl.minimum(tl.maximum(cut(tl.floor(tl.div_rn(-low, width) * levels), UNIT), 1.0), most)
    above = (lower.to(tl.int32, bitcast=True) + UNIT).to(tl.float32, bitcast=True)
    upper = tl.minimum(tl.maximum(lower + 1.0, above), most)
    of_lower = tl.maximum(tl.div_rn(-low, lower), tl.div_rn(high, tl.maximum(levels - lower, 1.0)))
    of_upper = tl.maximum(tl.div_rn(-low, upper), tl.div_rn(high, tl.maximum(levels - upper, 1.0)))
    scale = tl.maximum(round_up(tl.minimum(of_lower, of_upper), 1 << 16), _SMALLEST_SCALE)
    return tl.where(of_upper < of_lower, upper, lower), scale


@triton.jit
def calibrate(low_key, high_key, flagged, zero, BIT_WIDTH: tl.constexpr):
    """Minimum and scale, exact in their types, and inverse scale with its sign bit; see `reference.calibrate`.

    The inverse is 0 for constant groups and for empty ones: low_key is above high_key, minimum and scale are NaN.
    """
    some = low_key <= high_key
    low = tl.where(some, float_of_key(low_key), 0.0) + 0.0  # + 0.0 turns -0.0 into 0.0
    high = tl.where(some, float_of_key(high_key), 0.0)
    TOP: tl.constexpr = (1 << BIT_WIDTH) - 1
    aligned = zero & (low < 0.0)
    if TOP == 1:
        aligned = aligned & (high <= 0.0)
    wide = high - low >= tl.where(aligned, _LARGEST_ALIGNED, _LARGEST_RANGE)  # see `reference.bounded`
    low = tl.where(wide, tl.maximum(low, -_LARGEST_END), low)
    high = tl.where(wide, tl.minimum(high, _LARGEST_END), high)
    levels = tl.where(flagged, (TOP - 1 if TOP > 1 else 1) * 1.0, TOP * 1.0)
    code, aligned_scale = _aligned(low, high, levels)
    width = high - low
    scale = round_up(tl.div_rn(width, levels), 1 << 16)
    scale = tl.where(width > 0.0, tl.maximum(scale, _SMALLEST_SCALE), 0.0)
    low, scale = tl.where(aligned, -(aligned_scale * code), low), tl.where(aligned, aligned_scale, scale)
    if TOP == 1:
        low, scale = tl.where(flagged & zero, 0.0, low), tl.where(flagged & zero, 0.0, scale)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), tl.where(scale > 0.0, scale, 1.0))
    inverse = tl.where(some & (scale > 0.0), inverse, 0.0)
    low, scale = tl.where(some, low, float("nan")), tl.where(some, scale, float("nan"))
    return low, _with_sign(scale, flagged & some), _with_sign(inverse, flagged & some)


@triton.jit
def shifted_minimum(low, scale, shift):
    """Minima of groups whose levels are shifted by a part of a step."""
    return tl.maximum(low - shift * scale, _LOWEST)


@triton.jit
def store_metadata(pointer, value, mask):
    """Store values that the pointer's type holds exactly, NaNs with torch's bits."""
    if pointer.dtype.element_ty == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True) >> 16
        tl.store(pointer, bits.to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=mask)
    else:
        tl.store(pointer, value, mask=mask)


@triton.jit
def quotient(x, inner):
    """x // inner for 0 <= x < 2^14 and inner >= 1, by one multiplication.

    M = ceil(2^31 / inner) is off by less than 1, so x * M / 2^31 by less than 2^-17 <= 1 / inner, which is allowed
    where inner < 2^17. Where inner is larger, M <= 2^14 and x * M < 2^28.
    """
    magic = (0x7FFFFFFF // tl.minimum(inner, 1 << 30).to(tl.int32)).to(tl.uint32) + 1
    return ((x.to(tl.uint64) * magic.to(tl.uint64)) >> 31).to(tl.int32)


@triton.jit
def group_of(first, offset, inner, groups):
    """Group of element first (int64) + offset (int32, below 2^14)."""
    first_group = first // inner % groups
    beyond = offset - _within_tile(inner - first % inner)  # elements after the first group's end
    runs = tl.where(beyond < 0, 0, 1 + quotient(tl.maximum(beyond, 0), inner))
    beyond = runs - _within_tile(groups - first_group)  # groups after the last
    wrapped = beyond - quotient(tl.maximum(beyond, 0), groups) * groups.to(tl.int32)
    return tl.where(beyond < 0, first_group + runs, wrapped.to(tl.int64))


@triton.jit
def _within_tile(distance):
    """A distance (int64) as int32; distances beyond every tile may become nearer."""
    return tl.minimum(distance, 1 << 20).to(tl.int32)
