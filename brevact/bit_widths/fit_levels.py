"""Levels of `recompute`, from which `fit` chooses by its budget."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from brevact.bit_widths.budgets import Budget, BudgetRefusal
from brevact.bit_widths.fit_groups import leaf_of, storing
from brevact.policy.presets import Policy
from brevact.reports.gradient_passes import Loss
from brevact.reports.memory import MemoryOfPass
from brevact.reports.step import step_report

#: Most multiplications and additions per element, from none on.
_LEVELS = (0, 64, 256, 1024, 4096, 16384)
#: The last level that is tried without a budget of time.
_MOST_WITHOUT_TIME = 4096
#: Bits at which a level's bytes and time are measured.
_BIT_WIDTH = 4
#: Least relative saving of bytes of each level over those before.
_LEAST_SAVING = 0.02
#: Timed pairs of steps.
_ROUNDS = 3


def policy_of_levels(fit_at: Callable[[int], Policy], levels: list[int], budget: Budget, quiet: float) -> Policy:
    """Return the policy of the first level that meets the budget with little noise, else the least noise within it."""
    found: list[Any] = []
    refusals: list[BudgetRefusal] = []
    for recompute in levels:
        try:
            found.append(fit_at(recompute))
        except BudgetRefusal as error:  # another level may meet the budget
            refusals.append(error)
            continue
        if budget.is_met_by(found[-1].report) and (budget.noise is not None or found[-1].report.harm <= quiet):
            return found[-1]
    if not found:
        raise min(refusals, key=lambda each: each.least)
    met = [each for each in found if budget.is_met_by(each.report)]
    return min(met or found, key=lambda each: each.report.harm)


def levels_of(model: nn.Module, memory: MemoryOfPass, budget: Budget, *, quiet: float, is_quick: bool) -> list[int]:
    """Return the levels that differ in bytes; if quick, the first one that leaves 4 bits, and the last."""
    least, found, fitting = math.inf, [], []
    for recompute in _LEVELS:
        if recompute <= _MOST_WITHOUT_TIME or budget.time is not None:
            with storing(model, _everywhere(recompute)):
                report = memory.measured()
            if report.saved_bytes < (1 - _LEAST_SAVING) * least:
                least = report.saved_bytes
                found.append(recompute)
                accepts_noise = budget.noise is not None and budget.noise > quiet
                if accepts_noise or least <= budget.bytes_of(report.plain_bytes):
                    fitting.append(recompute)
    if not is_quick or budget.time is not None:
        return found
    return sorted({*fitting[:1], found[-1]})


def times_of_levels(model: nn.Module, levels: list[int], batch: Any, loss: Loss, budget: Budget) -> dict[int, float]:
    """Return the times of a step at the levels within a budget of time, over those of plain steps, the last one first.

    Raises a ValueError if there is no such level.
    """
    assert budget.time is not None
    times: dict[int, float] = {}
    for recompute in levels:
        with storing(model, _everywhere(recompute)):
            times[recompute] = step_report(model, batch, loss, rounds=_ROUNDS).time_ratio
    least = min(times.values())
    if least > budget.time:
        raise ValueError(
            f"time={budget.time:g} is not possible: a step takes {least:.2f} times as long as at full "
            f"precision; accepted is time={least + 0.01:.2f} or more"
        )
    return {level: time for level, time in reversed(times.items()) if time <= budget.time}


def _everywhere(recompute: int) -> dict[str, Any]:
    return {"": leaf_of(_BIT_WIDTH, attends=True, recompute=recompute)}
