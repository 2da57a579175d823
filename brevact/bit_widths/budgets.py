"""Budgets of `fit` and `Adaptive`: bytes of a training step, or noise."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from brevact.policy.fit_report import FitReport
from brevact.quantizers.checks import check_number
from brevact.tables import MIB

BIT_WIDTHS = range(1, 9)
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


#: Fraction of the noise budget to aim at, since measurements scatter.
_AIM = 0.95
#: Bisection steps between the least and the most bytes: resolves a byte in a terabyte.
_HALVINGS = 40


class BudgetRefusal(ValueError):
    """A budget below the least possible one, ``least``, in bytes."""

    def __init__(self, text: str, least: int) -> None:
        super().__init__(text)
        self.least = least


@dataclass(frozen=True)
class Budget:
    text: str
    ratio: float | None
    saved_bytes: float | None
    noise: float | None
    time: float | None = None

    def bytes_of(self, plain_bytes: int) -> float:
        """Return the most bytes to save, infinite for a budget of noise."""
        if self.ratio is not None:
            return plain_bytes / self.ratio * (1 + ROUNDING)
        return math.inf if self.saved_bytes is None else self.saved_bytes

    def is_met_by(self, report: FitReport) -> bool:
        is_quiet = self.noise is None or report.harm <= self.noise
        return report.saved_bytes <= self.bytes_of(report.plain_bytes) and is_quiet

    def check_bytes(self, plain_bytes: int, least: int) -> None:
        """Raise a BudgetRefusal if both 1 bit everywhere and full precision save more than the budget."""
        if self.bytes_of(plain_bytes) < min(least, plain_bytes):
            ratio = math.floor(10 * plain_bytes / least) / 10
            raise BudgetRefusal(
                f"{self.text} is not possible: 1 bit in each layer that packs stores {least / MIB:.2f} of "
                f"{plain_bytes / MIB:.2f} MiB; accepted are a ratio up to {ratio:g}, and saved_bytes from {least} on",
                least,
            )

    def choose(
        self, items: Sequence[Sequence[Option]], most_bytes: float, factor: float, rest: float = 0.0
    ) -> list[Option]:
        """Return an option per item: the least noise within the bytes, or the least bytes for the noise."""
        least, most = (sum(pick(option.cost for option in options) for options in items) for pick in (min, max))
        if self.noise is None:
            return allocate(items, max(least, most_bytes))
        low, high = least, most
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            total = sum(option.noise for option in allocate(items, middle))
            low, high = (low, middle) if total * factor + rest <= _AIM * self.noise else (middle, high)
        return allocate(items, high)


def budget_of(
    *,
    ratio: float | None = None,
    saved_bytes: float | None = None,
    noise: float | None = None,
    time: float | None = None,
) -> Budget:
    given = {"ratio": ratio, "saved_bytes": saved_bytes, "noise": noise, "time": time}
    stated = {name: value for name, value in given.items() if value is not None}
    if not stated.keys() - {"time"} or {"ratio", "saved_bytes"} <= stated.keys():
        raise ValueError(
            f"got {', '.join(stated) or 'no budget'}; accepted is one of ratio=24 (times less) and "
            "saved_bytes=512 * 2**20, or noise=0.05 (of minibatch noise), or noise and one of these; and with each of "
            "them time=1.15 (of a step over that at full precision)"
        )
    for name, value in stated.items():
        check_number(name, value, 0)
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value}; accepted is a number above 0")
    text = ", ".join(f"{name}={value}" for name, value in stated.items())
    return Budget(text, ratio, saved_bytes, noise, time)


def bytes_of_budget(
    uniform: Mapping[int, int], least: int, plain_bytes: int, ratio: float | None, bit_width: float | None
) -> int:
    """Return the bytes of a ratio to `plain_bytes` or of a uniform width, interpolated between integer widths."""
    if bit_width is not None:
        low = int(bit_width)
        above = uniform[min(low + 1, BIT_WIDTHS[-1])]
        found = uniform[low] + (bit_width - low) * (above - uniform[low])
        wanted, nearest = f"bit_width={bit_width}", f"a larger bit_width, or a ratio that gives {least} bytes"
    else:
        assert ratio is not None
        found, wanted = plain_bytes / ratio * (1 + ROUNDING), f"ratio={ratio}"
        nearest = f"ratio={math.floor(100 * plain_bytes / least) / 100:.2f} or less"
    if found < least:
        raise ValueError(
            f"{wanted}: that is {int(found)} bytes of a training step, and the model stores {least} at the least; "
            f"accepted is {nearest}, or policies that store less beside (rules, act_quant=, min_numel=)"
        )
    return int(found)


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Layers that pack tensors, each with one width, and layers that derive from them.

    A layer that derives from several sources has the smallest of their widths, and all others, which pass tensors on or
    save masks, the smallest of all: with more bits than its source, a layer would pack its own tensor.
    """

    costs: Mapping[str, Mapping[int, int]]  # bytes by width, of each source
    sources_of: Mapping[str, Sequence[str]]  # of each layer that derives
    fixed_bytes: int  # independent of the widths

    def saved_bytes(self, widths: Mapping[str, int]) -> int:
        return self.fixed_bytes + sum(costs[widths[source]] for source, costs in self.costs.items())

    def width_of(self, name: str, widths: Mapping[str, int]) -> int:
        if name in widths:
            return widths[name]
        return min((widths[source] for source in self.sources_of.get(name, widths)), default=BIT_WIDTHS[-1])
