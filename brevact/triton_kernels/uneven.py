"""Buckets whose range a few values take: levels and positions of `quantizers.uneven`. G groups of I elements."""

import triton
import triton.language as tl

from brevact.geometry import SENTINELS
from brevact.triton_kernels.floats import float_of_key, maximum, minimum, round_up, widen
from brevact.triton_kernels.groups import has_missing, is_finite

_LARGEST_NEAR = tl.constexpr(2.0**126)
_SENTINELS = tl.constexpr(SENTINELS)
_STEP_UNIT = tl.constexpr(1 << 20)
_SPECIAL, _QUIET, _SIGN = tl.constexpr(0x7F800000), tl.constexpr(0x7FC00000), tl.constexpr(-(2**31))
_SMALLEST = tl.constexpr(2.0**-126)
_MARGIN, _SMALL = tl.constexpr(2.0**-20), tl.constexpr(2.0**-90)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def reach(count, spacing, BIT_WIDTH: tl.constexpr):
    """Value of the level that lies `count` (int32) levels above zero, in steps."""
    OCTAVE: tl.constexpr = BIT_WIDTH - 4 if BIT_WIDTH > 4 else 0
    ONE: tl.constexpr = (OCTAVE + 127) << 23  # bits of 2^OCTAVE
    beyond = tl.maximum(count - _evenly(spacing, BIT_WIDTH), 0)
    return (count - beyond).to(tl.float32) + (_float((beyond << (23 - OCTAVE)) + ONE) - (1 << OCTAVE) * 1.0)


@triton.jit
def _evenly(spacing, BIT_WIDTH: tl.constexpr):
    OCTAVE: tl.constexpr = BIT_WIDTH - 4 if BIT_WIDTH > 4 else 0
    return (spacing << OCTAVE) + tl.where(spacing == 7, 256, 0)


@triton.jit
def _ends(x, inside):
    """[G] least and largest value of elements inside, and those above the former and below the latter."""
    low, high = tl.min(tl.where(inside, x, _INFINITY), axis=1), tl.max(tl.where(inside, x, -_INFINITY), axis=1)
    second_low = tl.min(tl.where(inside & (x > low[:, None]), x, _INFINITY), axis=1)
    return low, high, second_low, tl.max(tl.where(inside & (x < high[:, None]), x, -_INFINITY), axis=1)


@triton.jit
def is_uneven(x, valid):
    inside = valid & is_finite(x)
    low, high, second_low, second_high = _ends(x, inside)
    size, largest = tl.abs(x), tl.maximum(-low, high)
    nonzero = tl.sum((inside & (size > 0.0)).to(tl.int32), axis=1)
    small = tl.sum((inside & (size > 0.0) & (size <= (largest * 0.125)[:, None])).to(tl.int32), axis=1)
    near = tl.minimum(high - second_low, second_high - low)
    far = (near < (high - low) * 0.5) | (small * 5 >= nonzero * 4)
    missing = tl.max((valid & ~is_finite(x)).to(tl.int32), axis=1)
    return (missing > 0) | ((high > low) & far)


@triton.jit
def may_be_uneven(
    planes, low_key, high_key, start: tl.constexpr, stop: tl.constexpr,
    GROUPS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """[GROUPS] false only for groups within +-MOST, 2^125 or less, that are not uneven, and which groups have zeros.

    A group is not if elements are nearer to the centres of both halves of the range than a quarter of it, and if more
    than a fifth of its elements that are not 0 are larger than an eighth of the largest. Margins cover rounding.
    """
    COUNT: tl.constexpr = LANES * (stop - start)
    STEP: tl.constexpr = (stop - start + 1) // 2  # two planes usually do
    low, high = float_of_key(low_key), float_of_key(high_key)
    largest = maximum(-low, high)
    quarter, bound = (high - low) * 0.25, largest * 0.125
    # A power of two by which numbers above the bound exceed it by at least 1.
    unit = _float((277 - tl.maximum((_bits(bound) >> 23) & 0xFF, 23)) << 23)
    near_low = tl.reshape(tl.broadcast_to((low + quarter)[:, None], (GROUPS, LANES)), (ROWS, W))
    near_high = tl.reshape(tl.broadcast_to((high - quarter)[:, None], (GROUPS, LANES)), (ROWS, W))
    offset = tl.reshape(tl.broadcast_to((-bound * unit)[:, None], (GROUPS, LANES)), (ROWS, W))
    unit = tl.reshape(tl.broadcast_to(unit[:, None], (GROUPS, LANES)), (ROWS, W))
    x = widen(planes[start])
    size, lower, upper = tl.abs(x), tl.abs(x - near_low), tl.abs(x - near_high)
    least, large = size, tl.minimum(tl.maximum(tl.fma(size, unit, offset), 0.0), 1.0)
    for i in tl.static_range(start + 1, stop):
        x = widen(planes[i])
        size = tl.abs(x)
        least = tl.minimum(least, size)
        large += tl.minimum(tl.maximum(tl.fma(size, unit, offset), 0.0), 1.0)
        if (i - start) % STEP == 0:
            lower, upper = tl.minimum(lower, tl.abs(x - near_low)), tl.minimum(upper, tl.abs(x - near_high))
    lower = tl.min(tl.reshape(lower, (GROUPS, LANES)), axis=1)
    upper = tl.min(tl.reshape(upper, (GROUPS, LANES)), axis=1)
    zero = tl.min(tl.reshape(least, (GROUPS, LANES)), axis=1) == 0.0
    large = tl.sum(tl.reshape(large, (GROUPS, LANES)), axis=1).to(tl.int32)
    is_common = large * 5 > COUNT
    if tl.min((is_common | ~zero).to(tl.int32), axis=0) == 0:
        nonzero = tl.zeros((ROWS, W), tl.int32)
        for i in tl.static_range(start, stop):
            nonzero += (widen(planes[i]) != 0.0).to(tl.int32)
        is_common = large * 5 > tl.sum(tl.reshape(nonzero, (GROUPS, LANES)), axis=1)
    within = maximum(lower, upper) < quarter - largest * _MARGIN
    is_common = within & is_common & (largest > _SMALL)
    return has_missing(low_key, high_key) | ((high > low) & ~is_common) | (largest >= MOST), zero


@triton.jit
def fit(x, valid, BIT_WIDTH: tl.constexpr):
    """[G] minimum (int32 bits), scale (int32, 16 bits), step, and far value: NaN if only non-finite are far."""
    finite = is_finite(x)
    inside = valid & finite
    low, high, second_low, second_high = _ends(x, inside)
    missing = tl.sum((valid & ~finite).to(tl.int32), axis=1)
    has_missing = missing > 0
    drops_low = high - second_low <= second_high - low
    far = tl.where(drops_low, low, high) + 0.0  # + 0.0 turns -0.0 into 0.0
    far = tl.where(~has_missing & (low < high), far, float("nan"))
    low = tl.where(~has_missing & drops_low, second_low, low)
    high = tl.where(~has_missing & ~drops_low, second_high, high)
    empty = low > high
    low, high = tl.where(empty, 0.0, low), tl.where(empty, 0.0, high)
    low = tl.minimum(tl.maximum(low, -_LARGEST_NEAR), _LARGEST_NEAR)
    high = tl.minimum(tl.maximum(high, -_LARGEST_NEAR), _LARGEST_NEAR)
    MOST: tl.constexpr = (1 << BIT_WIDTH) - 2  # highest code of the others
    middle = _median_magnitude(x, inside & (x != far[:, None]) & (x != 0.0))

    form, step, smallest = tl.zeros(low.shape, tl.int32), low, low * 0.0 + _INFINITY
    if BIT_WIDTH >= 4:
        for spacing in range(7):
            own_form, own_step, gap = _octaves(low, high, spacing, middle, BIT_WIDTH)
            closer = gap <= smallest * 1.25
            form, step = tl.where(closer, own_form, form), tl.where(closer, own_step, step)
            smallest = tl.minimum(smallest, gap)
    own_form, own_step, gap = _offsets(low, high, MOST)
    closer = gap <= smallest * 2.0
    form, step, smallest = tl.where(closer, own_form, form), tl.where(closer, own_step, step), tl.minimum(smallest, gap)
    own_form, own_step, gap = _octaves(low, high, 7, middle, BIT_WIDTH)
    closer = gap <= smallest * 2.0
    form, step = tl.where(closer, own_form, form), tl.where(closer, own_step, step)

    plus = tl.sum((valid & (x == _INFINITY)).to(tl.int32), axis=1) == missing
    minus = tl.sum((valid & (x == -_INFINITY)).to(tl.int32), axis=1) == missing
    far_bits = _far_bits(tl.where(far == far, far, 0.0), has_missing, plus, minus)
    scale = -(1 << 15) | ((_bits(step) >> 16) & 0x7FF0) | ((far_bits >> 8) & 0xF)
    return (far_bits & ~0xFFF) | form, scale, step, far


@triton.jit
def _median_magnitude(x, counts):
    exponent = tl.where(counts, (_bits(x) >> 23) & 0xFF, -1)
    total = tl.sum(counts.to(tl.int32), axis=1)
    found = total * 0
    for place in tl.static_range(8):
        tried = found | (128 >> place)
        found = tl.where(tl.sum((exponent >= tried[:, None]).to(tl.int32), axis=1) * 2 >= total, tried, found)
    return tl.where(total > 0, _float((found << 23) | (1 << 22)), 0.0)


@triton.jit
def _octaves(low, high, spacing, middle, BIT_WIDTH: tl.constexpr):
    MOST: tl.constexpr = (1 << BIT_WIDTH) - 2
    OCTAVE: tl.constexpr = BIT_WIDTH - 4 if BIT_WIDTH > 4 else 0
    below, above = tl.maximum(-low, 0.0), tl.maximum(high, 0.0)
    zero = tl.zeros(low.shape, tl.int32)
    for place in range(8):
        tried = zero | (128 >> place)
        beneath, over = reach(tried, spacing, BIT_WIDTH), reach(tl.maximum(MOST - tried, 0), spacing, BIT_WIDTH)
        zero = tl.where((tried < MOST) & (beneath * above <= over * below), tried, zero)
    step = _covering(below, above, zero, spacing, BIT_WIDTH)
    next_step = _covering(below, above, zero + 1, spacing, BIT_WIDTH)
    zero = tl.where(next_step < step, zero + 1, zero)
    step = tl.maximum(round_up(tl.minimum(step, next_step), _STEP_UNIT), _SMALLEST)
    even = low * 0.0 + _evenly(spacing, BIT_WIDTH)
    beyond = tl.maximum(middle * inverse_of(step) - even, 0.0)
    exponent = _bits(beyond + (1 << OCTAVE) * 1.0) >> 23
    return zero | (spacing << 8), step, step * _float((exponent - OCTAVE) << 23)


@triton.jit
def _covering(below, above, zero, spacing, BIT_WIDTH: tl.constexpr):
    of_low = _quotient(below, reach(zero, spacing, BIT_WIDTH))
    return tl.maximum(of_low, _quotient(above, reach((1 << BIT_WIDTH) - 2 - zero, spacing, BIT_WIDTH)))


@triton.jit
def _quotient(part, reached):
    """0 for a part of 0, infinity where nothing is reached."""
    quotient = tl.where(reached > 0.0, tl.div_rn(part, tl.where(reached > 0.0, reached, 1.0)), _INFINITY)
    return tl.where(part > 0.0, quotient, 0.0)


@triton.jit
def inverse_of(step):
    return tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)


@triton.jit
def _offsets(low, high, MOST: tl.constexpr):
    """Form, step and gap of even levels (q + K) * s."""
    exponent = _bits(tl.maximum(tl.abs(low), tl.abs(high))) & _SPECIAL
    step = tl.div_rn(high - low, tl.full(low.shape, MOST - 1.0, tl.float32))
    step = tl.maximum(step, _float(tl.maximum(exponent - (9 << 23), 1 << 23)))
    step = tl.maximum(round_up(step, _STEP_UNIT), _SMALLEST)
    first = tl.floor(tl.div_rn(low, step)).to(tl.int32)
    gap = tl.where((low > 0.0) | (high < 0.0), step, _INFINITY)
    return ((first + 1024) & 0x7FF) | 0x800, step, gap


@triton.jit
def _far_bits(value, has_missing, plus, minus):
    bits = _bits(value)
    rounded = (bits + 0x7F + ((bits >> 8) & 1)) & ~0xFF
    for place in tl.static_range(8):
        pattern = (bits & _SIGN) | (_QUIET | ((2 + place) << 8))
        rounded = tl.where(tl.abs(value) == _SENTINELS[place], pattern, rounded)
    infinity = tl.where(plus, 0, _SIGN) | (_QUIET | (1 << 8))
    return tl.where(has_missing, tl.where(plus | minus, infinity, _QUIET), rounded)


@triton.jit
def positions(x, form, inverse, far, BIT_WIDTH: tl.constexpr):
    """Positions on uneven levels, from the form in the low 12 bits of a minimum, the inverse step and the far value."""
    form = form & 0xFFF
    MOST: tl.constexpr = (1 << BIT_WIDTH) - 2.0
    offset = x * inverse - ((form & 0x7FF) - 1024).to(tl.float32)
    OCTAVE: tl.constexpr = BIT_WIDTH - 4 if BIT_WIDTH > 4 else 0
    size, even = tl.abs(x) * inverse, _evenly(form >> 8, BIT_WIDTH).to(tl.float32)
    beyond = _bits(tl.maximum(size - even, 0.0) + (1 << OCTAVE) * 1.0) - ((OCTAVE + 127) << 23)
    count = tl.minimum(size, even) + beyond.to(tl.float32) * 2.0 ** (OCTAVE - 23)
    zero = (form & 0xFF).to(tl.float32)
    octave = tl.where(x < 0.0, zero - count, zero + count)
    near = tl.minimum(tl.maximum(tl.where(form >= 0x800, offset, octave), 0.0), MOST)
    return tl.where(is_finite(x) & (x != far), near, MOST + 1.0)


@triton.jit
def values(q, minimum_bits, scale, limit, BIT_WIDTH: tl.constexpr):
    """Values of codes (uint32) of uneven buckets, within +-limit, from stored minimum and scale in float32."""
    form, scale_bits = minimum_bits & 0xFFF, _bits(scale) >> 16
    step = _float((scale_bits & 0x7FF0) << 16)
    code = q.to(tl.int32)
    even = (code + ((form & 0x7FF) - 1024)).to(tl.float32) * step
    count = code - (form & 0xFF)
    size = reach(tl.abs(count), form >> 8, BIT_WIDTH) * step
    near = tl.where(form >= 0x800, even, tl.where(count < 0, -size, size))
    near = maximum(minimum(near, limit), -limit)
    far = _far_value((minimum_bits & ~0xFFF) | ((scale_bits & 0xF) << 8), limit)
    return tl.where(code == (1 << BIT_WIDTH) - 1, far, near)


@triton.jit
def _far_value(far, limit):
    size = far & 0x7FFFFFFF
    value = tl.where(size > _SPECIAL, float("nan"), tl.minimum(_float(size), limit))
    value = tl.where(size == _QUIET | (1 << 8), _INFINITY, value)
    for place in tl.static_range(8):
        value = tl.where(size == _QUIET | ((2 + place) << 8), tl.minimum(_SENTINELS[place], limit), value)
    return tl.where(far < 0, -value, value)
