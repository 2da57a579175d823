"""Levels of any spacing, one row for all groups or one a group, and where a group's values lie on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_GAP = 2.0**-126
"""Smallest normal float32: two levels that are closer count as one, so that the inverse of a gap stays finite."""


@dataclass(frozen=True, eq=False)
class Grid:
    """What the codes of a tensor stand for: code q of group g is offset[g] + scale[g] * levels[row, q].

    Args:
        levels: (R, N) float32 levels, each row ascending (equal neighbours are allowed); R is 1, or the number of
            groups, each of which then has a row.
        bounds: (R, N - 1) float32 bounds of nearest rounding: the code of z is the number of bounds b with z >= b. None
            puts them half-way between levels.
        offset: (G,) float32 offsets, or None for 0. NaN marks a group all of which decodes to NaN.
        scale: (G,) float32 scales, or None for 1; a group with scale 0 is constant. The magnitude counts: a sign bit,
            that of 0 as well, flags a group whose last code stands for NaN; finite elements take the others.
        marks: Whether elements that are not finite take the last of the 2^b codes. It stands for NaN in flagged groups,
            and where the last level of a row is NaN.
    """

    levels: Tensor
    bounds: Tensor | None = None
    offset: Tensor | None = None
    scale: Tensor | None = None
    marks: bool = False

    @property
    def inverse(self) -> Tensor | None:
        """(G,) inverse scales with their sign bits, 0 for constant groups and for broken ones; None for 1."""
        if self.scale is None:
            return None
        step = self.scale.abs()
        return torch.where(step > 0, torch.ones_like(step) / step, 0.0).copysign(self.scale)

    def steps(self, *, stochastic: bool) -> Tensor:
        """What rounding needs beside the levels.

        Args:
            stochastic: Rounding.

        Returns:
            (R, N - 1) float32: inverse gaps between levels, 0 where they are equal; for nearest, the bounds.
        """
        low, high = self.levels[:, :-1], self.levels[:, 1:]
        if stochastic:
            gap = high - low
            return torch.where(gap >= SMALLEST_GAP, torch.ones_like(gap) / gap, 0.0)
        return low * 0.5 + high * 0.5 if self.bounds is None else self.bounds
