"""How a fake quantizer rounds floating-point numbers to integers: plain data for kernels and quantizers."""

from __future__ import annotations

import enum
from typing import NamedTuple


class IntegerRounding(enum.IntEnum):
    """Deterministic roundings: half to even, floor, ceiling, towards zero, and half to even but -1/2 up (DPU)."""

    NEAREST = 0
    FLOOR = 1
    CEIL = 2
    TO_ZERO = 3
    DPU = 4


class IntegerPlan(NamedTuple):
    """Fake quantization of a flat tensor: y = (clip(round(x / s + z), lowest, highest) - z) s.

    Args:
        numel: Number of elements.
        bit_width: Bits per code; a code is an integer minus `lowest`.
        rounding: From x / s + z to an integer.
        rectifies: Whether a ReLU precedes, so that x is its input.
        clips: Whether clipped elements have no gradient; elements that a ReLU sets to zero never have.
        has_spare: Whether the last code is NaN.
        inner: Consecutive elements of one scale and zero point.
        groups: Number of scales, in rows of `groups // rows`.
        repeats: Consecutive runs, each of a row's length times `inner` elements, that share the row.
        rows: Number of rows. With `f = e // inner` and `n = groups // rows`, element e has scale
            `f // (n * repeats) % rows * n + f % n`, which is `f % groups` with one row.
    """

    numel: int
    bit_width: int
    lowest: int
    highest: int
    rounding: IntegerRounding
    rectifies: bool
    clips: bool
    has_spare: bool
    inner: int
    groups: int
    repeats: int = 1
    rows: int = 1
