"""Buckets whose range a few values take: the reference of their levels, in plain torch.

A *far value* (an outlier, the value of a mask, an infinity) gets the last code, and the other elements the levels below
it: evenly spaced, or, where magnitudes differ by orders, spaced in octaves around zero, as mu-law companding (ITU-T
G.711) does. Shapes: R buckets of I elements; arithmetic is float32 with one rounding an operation.

The minimum of such a bucket holds the far value and the form of its levels, the scale its sign bit, the step and four
more bits of the far value: the bytes are those of every bucket. See `PackedActivation`.
"""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_COUNT = 8
"""Elements from which on buckets may be uneven."""
LARGEST_NEAR = 2.0**126
"""Largest magnitude that levels reach."""
SENTINELS = (1e7, 1e8, 1e9, 1e10, 1e12, 1e15, 1e20, 1e30)
"""Far values with a code of their own: more than the 16 significant bits that others keep."""
LINEAR = 8
"""Octave bits of evenly spaced levels: 256 of them lie in the first octave."""
_STEP_UNIT = 1 << 20  # steps have four significant bits
_SPECIAL, _QUIET = 0x7F800000, 0x7FC00000


def reach(count: Tensor, octave_bits: int) -> Tensor:
    """Value of the level that lies `count` levels above zero, in steps: 2^m levels an octave, from one step apart on.

    T(n) = v - 2^m, where the bits of the float32 v are those of 2^m plus n * 2^(23 - m).
    """
    one = torch.tensor(float(1 << octave_bits), device=count.device)
    return ((count.to(torch.int32) << (23 - octave_bits)) + one.view(torch.int32)).view(torch.float32) - one


def is_uneven(x: Tensor) -> Tensor:
    """(R,) whether buckets take uneven levels.

    They do if an element is not finite; if the range without the elements of the least or the largest value is less
    than half of it; or if half of the elements that are not 0 are at most 1/32 of the largest magnitude.
    """
    finite = x.isfinite()
    low, high, second_low, second_high = _ends(x, finite)
    size = x.abs()
    largest = torch.maximum(-low, high)
    small = (size <= (largest * 0.03125)[:, None]) & (size > 0)
    near = torch.minimum(high - second_low, second_high - low)
    far = (near < (high - low) * 0.5) | (small.sum(1) * 2 >= (size > 0).sum(1))
    return ~finite.all(1) | ((high > low) & far)


def _ends(x: Tensor, finite: Tensor) -> tuple[Tensor, ...]:
    """(R,) least and largest finite value, and those of the elements above the former and below the latter."""
    low, high = x.masked_fill(~finite, torch.inf).amin(1) + 0.0, x.masked_fill(~finite, -torch.inf).amax(1) + 0.0
    second_low = x.masked_fill(~finite | (x <= low[:, None]), torch.inf).amin(1)
    second_high = x.masked_fill(~finite | (x >= high[:, None]), -torch.inf).amax(1)
    return low, high, second_low, second_high


def fit(x: Tensor, bit_width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Metadata of buckets as uneven ones: (R,) minimum (int32 bits), (R,) scale (int16 bits), (R, I) what is far.

    *Far* are the elements that are not finite, else those of the least value or of the largest, whichever leaves the
    smaller range. Of the forms below, in this order, the levels have the first whose gap at the median magnitude of the
    others is at most twice the smallest one:

    0. even levels k * s with one at zero (m = 8);
    1. even levels (q + K) * s, where all others are of one sign;
    2. octaves of 2^m levels, m = b - 3, then m = b - 4, from 4 bits on.
    """
    finite = x.isfinite()
    low, high, second_low, second_high = _ends(x, finite)
    has_missing = ~finite.all(1)
    drops_low = high - second_low <= second_high - low
    is_far = ~finite | (~has_missing & (low < high))[:, None] & (x == torch.where(drops_low, low, high)[:, None])
    low = torch.where(~has_missing & drops_low, second_low, low)
    high = torch.where(~has_missing & ~drops_low, second_high, high)
    low, high = (torch.where(low > high, 0.0, end).clamp(-LARGEST_NEAR, LARGEST_NEAR) for end in (low, high))
    most = (1 << bit_width) - 2  # highest code of the others
    middle = _median_magnitude(x, ~is_far & (x != 0))

    forms = [_octaves(low, high, most, LINEAR, middle), _offsets(low, high, most)]
    if bit_width >= 4:
        forms += [_octaves(low, high, most, m, middle) for m in (bit_width - 3, bit_width - 4)]
    smallest = torch.stack([gap for _, _, gap in forms]).amin(0)
    form, step, taken = torch.zeros_like(low, dtype=torch.int32), torch.zeros_like(low), torch.zeros_like(low).bool()
    for own_form, own_step, gap in forms:
        takes = ~taken & (gap <= smallest * 2.0)
        form, step, taken = torch.where(takes, own_form, form), torch.where(takes, own_step, step), taken | takes
    far = _far_bits(x, finite, is_far)
    minimum = (far & ~0xFFF) | form
    scale = -(1 << 15) | (step.view(torch.int32) >> 16) & 0x7FF0 | far >> 8 & 0xF
    return minimum, scale.to(torch.int16), is_far


def _median_magnitude(x: Tensor, counts: Tensor) -> Tensor:
    """(R,) 1.5 * 2^E with the largest E such that half of the elements that count are at least 2^E; 0 for none."""
    exponent = x.contiguous().view(torch.int32) >> 23 & 0xFF
    found, total = torch.zeros(len(x), dtype=torch.int32, device=x.device), counts.sum(1)
    for bit in reversed(range(8)):
        tried = found | 1 << bit
        found = torch.where(((exponent >= tried[:, None]) & counts).sum(1) * 2 >= total, tried, found)
    return torch.where(total > 0, (found << 23 | 1 << 22).view(torch.float32), 0.0)


def _rounded_up(step: Tensor) -> Tensor:
    bits = (step.view(torch.int32) + (_STEP_UNIT - 1)) & -_STEP_UNIT
    return bits.view(torch.float32).clamp(min=2.0**-126)


def _octaves(low: Tensor, high: Tensor, most: int, octave_bits: int, middle: Tensor) -> tuple[Tensor, ...]:
    """Form, step and gap at the median magnitude, of levels in octaves around the code of zero, z.

    z is one of the two codes at which both sides of zero need about the same step: the one with the smaller step.
    """
    below, above = (-low).clamp(min=0.0), high.clamp(min=0.0)
    zero = torch.zeros_like(low, dtype=torch.int32)
    for bit in reversed(range(8)):
        tried = zero | 1 << bit
        ends = reach(tried, octave_bits) * above <= reach((most - tried).clamp(min=0), octave_bits) * below
        zero = torch.where((tried < most) & ends, tried, zero)
    step = _covering(below, above, zero, most, octave_bits)
    next_step = _covering(below, above, zero + 1, most, octave_bits)
    zero, step = torch.where(next_step < step, zero + 1, zero), _rounded_up(torch.minimum(step, next_step))
    octave = (middle * (torch.ones_like(step) / step) + float(1 << octave_bits)).view(torch.int32) >> 23
    gap = step * ((octave - octave_bits) << 23).view(torch.float32)
    return min(octave_bits, 7) << 8 | zero, step, gap


def _covering(below: Tensor, above: Tensor, zero: Tensor, most: int, octave_bits: int) -> Tensor:
    """The step with which levels cover what lies below zero and above it."""
    low_reach, high_reach = reach(zero, octave_bits), reach(most - zero, octave_bits)
    return torch.maximum(
        torch.where(below > 0, below / low_reach, 0.0), torch.where(above > 0, above / high_reach, 0.0)
    )


def _offsets(low: Tensor, high: Tensor, most: int) -> tuple[Tensor, ...]:
    """Form, step and gap of even levels (q + K) * s; K has 11 bits, for which s is at least 2^-9 of the largest."""
    largest = torch.maximum(low.abs(), high.abs())
    exponent = largest.view(torch.int32) & _SPECIAL
    even = (high - low) / torch.full_like(low, most - 1.0)  # a tensor: CUDA multiplies by a scalar's inverse
    step = torch.maximum(even, (exponent - (9 << 23)).clamp(min=1 << 23).view(torch.float32))
    step = _rounded_up(step)
    first = (low / step).floor().to(torch.int32)
    gap = torch.where((low > 0) | (high < 0), step, torch.inf)
    return 0x800 | (first + 1024 & 0x7FF), step, gap


def _far_bits(x: Tensor, finite: Tensor, is_far: Tensor) -> Tensor:
    """(R,) int32: the far value in float32 with 16 significant bits; a pattern of an infinity or a NaN for others.

    The 15 bits behind its exponent are then 0 for the largest float, and 2^14 (a quiet NaN) plus 0 for NaN, 1 for
    infinity, 2 and up for `SENTINELS`.
    """
    missing = ~finite
    has_missing = missing.any(1)
    value = torch.where(is_far & finite, x, -torch.inf).amax(1) + 0.0
    value = torch.where(has_missing | ~value.isfinite(), 0.0, value)
    bits = value.view(torch.int32)
    rounded = (bits + 0x7F + (bits >> 8 & 1)) & ~0xFF
    for place, sentinel in enumerate(SENTINELS):
        rounded = torch.where(value.abs() == sentinel, (bits & -(2**31)) | _QUIET | 2 + place << 8, rounded)
    plus, minus = (((x == end) | ~missing).all(1) for end in (torch.inf, -torch.inf))
    infinity = torch.where(plus, _QUIET | 1 << 8, (_QUIET | 1 << 8) - 2**31)
    return torch.where(has_missing, torch.where(plus | minus, infinity, _QUIET), rounded).to(torch.int32)


def positions(x: Tensor, minimum: Tensor, scale: Tensor, is_far: Tensor, bit_width: int) -> Tensor:
    """(R, I) float32 positions on the levels that `fit` gave: a code, and the part of the way to the next one."""
    form, step, _ = _parts(minimum[:, None], scale[:, None])
    most = float((1 << bit_width) - 2)
    steps = x.abs() * (torch.ones_like(step) / step)
    offset = x * (torch.ones_like(step) / step) - ((form & 0x7FF) - 1024).float()
    octave_bits = torch.where(form >> 8 & 7 == 7, LINEAR, form >> 8 & 7)
    one = (octave_bits + 127) << 23
    count = ((steps + one.view(torch.float32)).view(torch.int32) - one).float()
    count = count * ((octave_bits + (127 - 23)) << 23).view(torch.float32)
    zero = (form & 0xFF).float()
    octave = torch.where(torch.signbit(x), zero - count, zero + count)
    near = torch.where(form >= 0x800, offset, octave).clamp(0.0, most)
    return torch.where(is_far, most + 1.0, near)


def values(q: Tensor, minimum: Tensor, scale: Tensor, bit_width: int, limit: float) -> Tensor:
    """What codes stand for, in float32 within the limit of a type; shapes broadcast."""
    form, step, far = _parts(minimum, scale)
    q = q.to(torch.int32)
    even = (q + ((form & 0x7FF) - 1024)).float() * step
    octave_bits = torch.where(form >> 8 & 7 == 7, LINEAR, form >> 8 & 7)
    one = (octave_bits + 127) << 23
    count = q - (form & 0xFF)
    size = ((count.abs() << (23 - octave_bits)) + one).view(torch.float32) - one.view(torch.float32)
    octave = torch.where(count < 0, -(size * step), size * step)
    near = torch.where(form >= 0x800, even, octave).clamp(-limit, limit)
    return torch.where(q == (1 << bit_width) - 1, _far_value(far, limit), near)


def _parts(minimum: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Form, step and far bits from the int32 bits of minima and the int16 bits of scales."""
    scale = scale.to(torch.int32)
    return minimum & 0xFFF, ((scale & 0x7FF0) << 16).view(torch.float32), (minimum & ~0xFFF) | (scale & 0xF) << 8


def _far_value(far: Tensor, limit: float) -> Tensor:
    """The value of far bits."""
    size = far & 0x7FFFFFFF
    value = torch.where(size > _SPECIAL, torch.nan, size.view(torch.float32).clamp(max=limit))
    for place, special in enumerate((torch.inf, *(min(sentinel, limit) for sentinel in SENTINELS)), 1):
        value = torch.where(size == _QUIET | place << 8, special, value)
    return torch.where(far < 0, -value, value)
