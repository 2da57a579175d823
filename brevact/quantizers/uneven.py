"""Buckets whose range a few values take: the reference of their levels, in plain torch.

A *far value* (an outlier, the value of a mask, an infinity) gets the last code, and the other elements the levels below
it: evenly spaced, or, where magnitudes differ by orders, in octaves around zero, as mu-law companding (ITU-T G.711)
does. Shapes: R buckets of I elements; arithmetic is float32 with one rounding an operation.

The minimum of such a bucket holds the far value and the form of its levels, the scale its sign bit, the step and four
more bits of the far value: the bytes are those of every bucket. See `PackedActivation`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from brevact.geometry import SENTINELS
from brevact.quantizers.reference import SMALLEST_SCALE, finite_range, round_up

LARGEST_NEAR = 2.0**126
"""Largest magnitude that levels reach."""
EVEN = 7
"""Spacing of levels that are all a step apart."""
_SPECIAL, _QUIET = 0x7F800000, 0x7FC00000


def reach(count: Tensor, spacing: Tensor | int, bit_width: int) -> Tensor:
    """Value of the level that lies `count` levels above zero, in steps: T(n) = min(n, e) + v - L.

    The first e = `_evenly` levels are a step apart; then L = 2^(b - 4) levels make an octave, 1 below 5 bits: v is the
    float32 whose bits are those of L plus max(n - e, 0) * 2^23 / L.
    """
    count, octave = count.to(torch.int32), _octave(bit_width)
    first = torch.tensor(float(1 << octave), dtype=torch.float32, device=count.device)
    beyond = (count - _evenly(spacing, bit_width)).clamp(min=0).to(torch.int32)
    octaves = ((beyond << (23 - octave)) + first.view(torch.int32)).view(torch.float32) - first
    return (count - beyond).float() + octaves


def _octave(bit_width: int) -> int:
    return max(bit_width - 4, 0)


def _evenly(spacing: Tensor | int, bit_width: int) -> Any:
    """Levels beside zero that are a step apart: as many as in some octaves, or all."""
    return (spacing << _octave(bit_width)) + (spacing == EVEN) * 256


def is_uneven(x: Tensor) -> Tensor:
    """(R,) whether buckets take uneven levels.

    They do if an element is not finite; if the range without the elements of the least or the largest value is less
    than half of it; or if four of five elements that are not 0 are at most an eighth of the largest magnitude.
    """
    finite = x.isfinite()
    low, high, second_low, second_high = _ends(x, finite)
    size = x.abs()
    largest = torch.maximum(-low, high)
    small = (size <= (largest * 0.125)[:, None]) & (size > 0)
    near = torch.minimum(high - second_low, second_high - low)
    far = (near < (high - low) * 0.5) | (small.sum(1) * 5 >= (size > 0).sum(1) * 4)
    return ~finite.all(1) | ((high > low) & far)


def _ends(x: Tensor, finite: Tensor) -> tuple[Tensor, ...]:
    """(R,) least and largest finite value, and those of the elements above the former and below the latter."""
    low, high = (end + 0.0 for end in finite_range(x, 1)[:2])  # + 0.0 turns -0.0 into 0.0
    second_low = x.masked_fill(~finite | (x <= low[:, None]), torch.inf).amin(1)
    second_high = x.masked_fill(~finite | (x >= high[:, None]), -torch.inf).amax(1)
    return low, high, second_low, second_high


def fit(x: Tensor, bit_width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Metadata of buckets as uneven ones: (R,) minimum (int32 bits), (R,) scale (int16 bits), (R, I) whether elements
    are far.

    *Far* are the elements that are not finite, else those of the least value or of the largest, whichever leaves the
    smaller range. The gap between levels at the median magnitude of the others decides how these lie. Of the forms
    below the last one is taken whose gap is at most so many times the smallest before it:

    - from 4 bits on, octaves around zero, behind more and more even levels: spacing 0 to 6; 1.25;
    - even levels (q + K) * s, where all others are of one sign; 2;
    - even levels with one at zero; 2.
    """
    finite = x.isfinite()
    low, high, second_low, second_high = _ends(x, finite)
    has_missing = ~finite.all(1)
    drops_low = high - second_low <= second_high - low
    is_far = ~finite | (~has_missing & (low < high))[:, None] & (x == torch.where(drops_low, low, high)[:, None])
    low = torch.where(~has_missing & drops_low, second_low, low)
    high = torch.where(~has_missing & ~drops_low, second_high, high)
    low, high = (torch.where(low > high, 0.0, end).clamp(-LARGEST_NEAR, LARGEST_NEAR) for end in (low, high))
    middle = _median_magnitude(x, ~is_far & (x != 0))

    form, step, smallest = torch.zeros_like(low, dtype=torch.int32), low, torch.full_like(low, torch.inf)
    forms = [(1.25, _octaves(low, high, bit_width, spacing, middle)) for spacing in range(EVEN) if bit_width >= 4]
    forms += [(2.0, _offsets(low, high, bit_width)), (2.0, _octaves(low, high, bit_width, EVEN, middle))]
    for times, (own_form, own_step, gap) in forms:
        takes = gap <= smallest * times
        form, step = torch.where(takes, own_form, form), torch.where(takes, own_step, step)
        smallest = torch.minimum(smallest, gap)
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


def _stored(step: Tensor) -> Tensor:
    """The least step that can be stored, of four significant bits, that is not smaller."""
    return round_up(step, 1 << 20).clamp(min=SMALLEST_SCALE)


def _octaves(low: Tensor, high: Tensor, bit_width: int, spacing: int, middle: Tensor) -> tuple[Tensor, ...]:
    """Form, step and gap at the median magnitude, of levels around a code of zero: of two, that of the smaller step."""
    below, above, most = (-low).clamp(min=0.0), high.clamp(min=0.0), (1 << bit_width) - 2
    zero = torch.zeros_like(low, dtype=torch.int32)
    for bit in reversed(range(8)):
        tried = zero | 1 << bit
        beneath, over = reach(tried, spacing, bit_width), reach((most - tried).clamp(min=0), spacing, bit_width)
        zero = torch.where((tried < most) & (beneath * above <= over * below), tried, zero)
    step, next_step = (_covering(below, above, z, spacing, bit_width) for z in (zero, zero + 1))
    zero, step = torch.where(next_step < step, zero + 1, zero), _stored(torch.minimum(step, next_step))
    octave = _octave(bit_width)
    beyond = (middle * (torch.ones_like(step) / step) - float(_evenly(spacing, bit_width))).clamp(min=0.0)
    exponent = (beyond + float(1 << octave)).view(torch.int32) >> 23
    return spacing << 8 | zero, step, step * ((exponent - octave) << 23).view(torch.float32)


def _covering(below: Tensor, above: Tensor, zero: Tensor, spacing: int, bit_width: int) -> Tensor:
    """The step with which levels cover the range below zero and above it."""
    low_reach, high_reach = reach(zero, spacing, bit_width), reach((1 << bit_width) - 2 - zero, spacing, bit_width)
    of_low, of_high = torch.where(below > 0, below / low_reach, 0.0), torch.where(above > 0, above / high_reach, 0.0)
    return torch.maximum(of_low, of_high)


def _offsets(low: Tensor, high: Tensor, bit_width: int) -> tuple[Tensor, ...]:
    """Form, step and gap of even levels (q + K) * s; K has 11 bits, for which s is at least 2^-9 of the largest."""
    largest = torch.maximum(low.abs(), high.abs())
    exponent = largest.view(torch.int32) & _SPECIAL
    gaps = torch.full_like(low, (1 << bit_width) - 3.0)  # a tensor: CUDA multiplies by a scalar's inverse
    step = torch.maximum((high - low) / gaps, (exponent - (9 << 23)).clamp(min=1 << 23).view(torch.float32))
    step = _stored(step)
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
    inverse, octave = torch.ones_like(step) / step, _octave(bit_width)
    size, even = x.abs() * inverse, _evenly(form >> 8, bit_width).float()
    first = torch.tensor(float(1 << octave), dtype=torch.float32, device=x.device)
    beyond = ((size - even).clamp(min=0.0) + first).view(torch.int32) - first.view(torch.int32)
    count = torch.minimum(size, even) + beyond.float() * 2.0 ** (octave - 23)
    offset, zero = x * inverse - ((form & 0x7FF) - 1024).float(), (form & 0xFF).float()
    around = torch.where(torch.signbit(x), zero - count, zero + count)
    near = torch.where(form >= 0x800, offset, around).clamp(0.0, most)
    return torch.where(is_far, most + 1.0, near)


def values(q: Tensor, minimum: Tensor, scale: Tensor, bit_width: int, limit: float) -> Tensor:
    """Values of codes, in float32 within the limit of a type; shapes broadcast."""
    form, step, far = _parts(minimum, scale)
    q = q.to(torch.int32)
    even = (q + ((form & 0x7FF) - 1024)).float() * step
    count = q - (form & 0xFF)
    size = reach(count.abs(), form >> 8, bit_width) * step
    near = torch.where(form >= 0x800, even, torch.where(count < 0, -size, size)).clamp(-limit, limit)
    return torch.where(q == (1 << bit_width) - 1, _far_value(far, limit), near)


def _parts(minimum: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Form, step and far bits from the int32 bits of minima and the int16 bits of scales."""
    scale = scale.to(torch.int32)
    return minimum & 0xFFF, ((scale & 0x7FF0) << 16).view(torch.float32), (minimum & ~0xFFF) | (scale & 0xF) << 8


def _far_value(far: Tensor, limit: float) -> Tensor:
    size = far & 0x7FFFFFFF
    value = torch.where(size > _SPECIAL, torch.nan, size.view(torch.float32).clamp(max=limit))
    for place, special in enumerate((torch.inf, *(min(sentinel, limit) for sentinel in SENTINELS)), 1):
        value = torch.where(size == _QUIET | place << 8, special, value)
    return torch.where(far < 0, -value, value)
