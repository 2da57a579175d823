"""Measure peaks of steps for `fit`, and search the most saved bytes whose peak is within a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from brevact.reports.gradient_passes import Loss
from brevact.reports.in_place import in_place
from brevact.reports.step import device_of, peak_of, plain_peak_of, step_of

#: Most measurements in a search.
TRIES = 8
#: Fraction of the bytes that may stay unused.
SLACK = 0.01


def peak_of_step(model: nn.Module, batch: Any, loss: Loss, *, packs: bool) -> int:
    """Return the peak of a step in training mode, with the model's policy, or without it in as little memory."""
    with in_place(model):
        if not model.training:
            model.train()
        if not packs:
            return plain_peak_of(model, batch, loss).tensors
        return peak_of(step_of(model, batch, loss, packs=True), device_of(model, batch))


class ByteLimit:
    """Searches the most saved bytes whose peak is within a budget.

    Other tensors are alive at the peak, too, and the peak may be where few saved bytes are left. So the limit moves by
    the distance of the peak from the budget, between bytes whose peak fitted and bytes whose peak did not.

    >>> limit = ByteLimit(allowed=100, value=60, fits=10, exceeds=90)
    >>> limit.moves(peak=120), limit.value  # 20 too much
    (True, 40)
    >>> limit.moves(peak=90), limit.value  # 10 are left
    (True, 50)

    Args:
        allowed: highest peak in bytes.
        value: initial saved bytes.
        fits: saved bytes whose peak is within the budget.
        exceeds: most saved bytes to try.
    """

    def __init__(self, allowed: float, value: float, fits: float, exceeds: float) -> None:
        self._allowed, self._exceeds = allowed, exceeds
        #: Most bytes so far whose peak is within the budget.
        self.fits = fits
        self.value = max(fits, min(exceeds, value))

    def moves(self, peak: int) -> bool:
        """Move the limit by the peak measured at it; return whether another measurement is worth its time."""
        is_within = peak <= self._allowed
        if is_within:
            self.fits = max(self.fits, self.value)
        else:
            self._exceeds = min(self._exceeds, self.value)
        moved = self.value + self._allowed - peak
        if not is_within and moved <= self.fits:
            moved = (self.fits + self._exceeds) / 2
        moved = max(self.fits, min(self._exceeds, moved))
        is_worth = abs(moved - self.value) > SLACK * self._allowed or not is_within
        self.value = moved if is_worth else self.fits
        return is_worth and self._exceeds - self.fits > SLACK * self.fits

    def search(self, peak_with: Callable[[float], int]) -> float:
        for _ in range(TRIES):
            if not self.moves(peak_with(self.value)):
                break
        return self.fits
