"""Spend bytes where they lower the noise most: choose one option per item within a budget."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

#: Most measurements in a search.
TRIES = 8
#: Fraction of the bytes that may stay unused.
SLACK = 0.01
#: Relative tolerance of a number of bytes that comes from a ratio.
ROUNDING = 1e-12


class Option(NamedTuple):
    """One way to store an item: its cost, in bytes or bits, its noise, at least 0, and its width."""

    cost: float
    noise: float
    bit_width: int


def allocate(items: Sequence[Sequence[Option]], budget: float) -> list[Option]:
    """Choose one option per item with little total noise and a total cost within the budget.

    Starts at each item's cheapest option, and takes the step along an item's convex hull that lowers the noise most per
    cost; a step that does not fit ends its item. If bits have diminishing returns, the noise exceeds the minimum by at
    most the gain of the first step that did not fit. Raises a ValueError if the budget is below the cheapest options.

    Source: ActNN, arXiv:2104.14129, section 4.3. Differs: goes up from the cheapest, by noise per byte.

    >>> sensitive, robust = ([Option(b, s / (2**b - 1) ** 2, b) for b in (1, 2, 3)] for s in (99.0, 1.0))
    >>> [option.bit_width for option in allocate([sensitive, robust], 4)]
    [3, 1]
    """
    hulls = [convex_hull(options) for options in items]
    left = budget - sum(hull[0].cost for hull in hulls)
    if left < 0:
        raise ValueError(f"budget={budget:g}; accepted is at least {budget - left:g}, the cost of the cheapest options")
    places = [0] * len(hulls)
    steps = [_step(hull, 0, item) for item, hull in enumerate(hulls) if len(hull) > 1]
    heapq.heapify(steps)
    while steps:
        _, item = heapq.heappop(steps)
        hull, place = hulls[item], places[item]
        cost = hull[place + 1].cost - hull[place].cost
        if cost <= left:
            left -= cost
            places[item] = place + 1
            if place + 2 < len(hull):
                heapq.heappush(steps, _step(hull, place + 1, item))
    return [hull[place] for hull, place in zip(hulls, places, strict=True)]


def convex_hull(options: Sequence[Option]) -> list[Option]:
    """Return the options on the lower convex hull, cheapest first: each step lowers the noise by less per cost."""
    hull: list[Option] = []
    for option in sorted(options):
        if hull and option.noise >= hull[-1].noise:
            continue
        if hull and option.cost == hull[-1].cost:
            hull.pop()
        while len(hull) > 1 and _gain(hull[-2], option) >= _gain(hull[-2], hull[-1]):
            hull.pop()
        hull.append(option)
    return hull


def _gain(low: Option, high: Option) -> float:
    return (low.noise - high.noise) / (high.cost - low.cost)


def _step(hull: list[Option], place: int, item: int) -> tuple[float, int]:
    """Return a heap entry, best step first, ties by item."""
    return -_gain(hull[place], hull[place + 1]), item


def most_within(allowed: float, peak_with: Callable[[float], int], first: float, fits: float, exceeds: float) -> float:
    """Return the most saved bytes that were tried, from `first` on, whose peak is within the budget, or `fits`.

    The bytes move by the distance of the peak from the budget; or halve the range, since few may be alive at the peak.
    """
    value = first
    for number in range(TRIES):
        value = max(fits, min(exceeds, value))
        room = allowed - peak_with(value)
        fits, exceeds = (max(fits, value), exceeds) if room >= 0 else (fits, min(exceeds, value))
        value += room
        if 0 <= room <= SLACK * allowed or exceeds - fits <= SLACK * fits:
            break
        if room < 0 and (number or value <= fits):
            value = (fits + exceeds) / 2
    return fits
