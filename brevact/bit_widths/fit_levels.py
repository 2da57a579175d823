"""Levels of `recompute`, from which `fit` chooses by its budget."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import nn

from brevact.bit_widths.budgets import Budget, BudgetRefusal
from brevact.bit_widths.fit_groups import quantizer_of, with_quantizers
from brevact.policy.presets import Policy
from brevact.reports.gradient_passes import Loss, as_it_was, gradients
from brevact.reports.memory import MemoryOfPass
from brevact.reports.memory_table import MemoryReport

#: Most multiplications and additions per element, from none on.
_LEVELS = (0, 64, 256, 1024, 4096, 16384)
#: The last level that is tried without a budget of time.
_MOST_WITHOUT_TIME = 4096
#: Noise and squared bias, in units of minibatch noise, that need no further recomputation.
QUIET = 0.01
#: Bits at which levels are measured: time hardly depends on bits.
_BIT_WIDTH = 6
#: Bits at which a level's bytes must be within the budget for a quick fit to try the level.
_QUICK_BIT_WIDTH = 4
#: Least relative saving of bytes of each level over those before.
_LEAST_SAVING = 0.02
#: Timed steps of each kind, alternating, after one warm-up step.
_ROUNDS = 3


class Levels:
    """The levels of a model that differ in bytes.

    Args:
        model: module without a policy, restored afterwards.
        batch: passed to the loss.
        loss: takes the model and a batch, and returns a scalar.
        memory: measures the loss of this batch.
        on_pass: called after each timed pass.
        quiet: noise and squared bias that need no further recomputation.
        is_quick: whether to fit at most two levels without a budget of time.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Loss,
        memory: MemoryOfPass,
        on_pass: Callable[[], object],
        *,
        quiet: float = QUIET,
        is_quick: bool = False,
    ) -> None:
        self._model, self._batch, self._loss, self._on_pass = model, batch, loss, on_pass
        self._memory = memory
        self._quiet, self._is_quick = quiet, is_quick

    def policy(self, fit_at: Callable[[int], Policy], budget: Budget) -> Policy:
        """Return the policy of the first level that meets the budget without much noise.

        With a budget of time, levels are tried from the last one whose steps do not take longer.
        """
        found: list[Policy] = []
        refusals: list[BudgetRefusal] = []
        for recompute, predicted in self._in_order(budget):
            try:
                policy = fit_at(recompute)
            except BudgetRefusal as error:  # another level may meet the budget
                refusals.append(error)
                continue
            policy = replace(policy, report=replace(_report(policy), recompute=recompute))
            if budget.time is not None:  # against plain steps, in their full memory
                policy = self._timed(policy, recompute, predicted)
            found.append(policy)
            if is_enough(policy, budget, self._quiet):
                return policy
        if not found:
            raise min(refusals, key=lambda each: each.least)
        met = [each for each in found if is_met(each, budget)]
        return min(met or found, key=lambda each: _report(each).harm)

    def _in_order(self, budget: Budget) -> Iterable[tuple[int, float]]:
        """Return the levels to try, each with the relative time of a step, or 0 if not measured."""
        if budget.time is None:
            found = self._quickly(budget) if self._is_quick else self._that_differ(_MOST_WITHOUT_TIME)
            return ((recompute, 0.0) for recompute in found)
        levels = list(self._that_differ(max(_LEVELS)))
        times = times_of(self._model, [_everywhere(each) for each in levels], self._batch, self._loss, self._on_pass)
        fitting = [(level, each) for level, each in zip(levels, times, strict=True) if each <= budget.time]
        if not fitting:
            raise ValueError(
                f"time={budget.time:g} is not possible: a step takes {min(times):.2f} times as long as at full "
                f"precision; accepted is time={min(times) + 0.01:.2f} or more"
            )
        return fitting[::-1]

    def _that_differ(self, most: int) -> Iterator[int]:
        least = math.inf
        for recompute in _LEVELS:
            if recompute > most:
                return
            saved_bytes = self._memory_at(recompute, _BIT_WIDTH).saved_bytes
            if saved_bytes < (1 - _LEAST_SAVING) * least:
                least = saved_bytes
                yield recompute

    def _quickly(self, budget: Budget) -> Iterator[int]:
        """Yield the first level that leaves 4 bits (or level 0, if the budget allows much noise), then the last."""
        needs_bits = budget.noise is None or budget.noise <= self._quiet
        levels = [each for each in _LEVELS if each <= _MOST_WITHOUT_TIME]
        for recompute in levels[:-1]:
            memory = self._memory_at(recompute, _QUICK_BIT_WIDTH) if needs_bits else None
            if memory is None or memory.saved_bytes <= budget.bytes_of(memory.plain_bytes):
                yield recompute
                break
        yield levels[-1]

    def _memory_at(self, recompute: int, bit_width: int) -> MemoryReport:
        with with_quantizers(self._model, _everywhere(recompute, bit_width)):
            return self._memory.measured()

    def _timed(self, policy: Policy, recompute: int, predicted: float) -> Policy:
        """Add the time of a step to the policy's report."""
        (measured,) = times_of(self._model, [_everywhere(recompute)], self._batch, self._loss, self._on_pass)
        report = replace(_report(policy), time=measured, predicted_time=predicted)
        return replace(policy, report=report)


def _report(policy: Policy) -> Any:
    return policy.report


def is_met(policy: Policy, budget: Budget) -> bool:
    """Return whether a fitted policy's measurements are within a budget."""
    report = _report(policy)
    is_quick = budget.time is None or report.time <= budget.time
    return is_quick and budget.is_met(report.saved_bytes, report.plain_bytes, report.harm, report.peak)


def is_enough(policy: Policy, budget: Budget, quiet: float) -> bool:
    """Return whether a policy is within a budget, and without a noise budget its noise is at most ``quiet``."""
    return is_met(policy, budget) and (budget.noise is not None or _report(policy).harm <= quiet)


def _everywhere(recompute: int, bit_width: int = _BIT_WIDTH) -> dict[str, Any]:
    return {"": quantizer_of(bit_width, attends=True, recompute=recompute)}


def times_of(
    model: nn.Module,
    quantizers: Sequence[Mapping[str, Any]],
    batch: Any,
    loss: Loss,
    on_pass: Callable[[], object],
) -> list[float]:
    """Return each setting's median ratio of step times with and without its quantizers; steps alternate."""
    ratios: list[list[float]] = [[] for _ in quantizers]
    with as_it_was(model):
        for turn in range(_ROUNDS + 1):
            plain = 0.0
            for index, each in enumerate((None, *quantizers)):
                with nullcontext() if each is None else with_quantizers(model, each):
                    start = time.perf_counter()
                    gradients(model, batch, loss, 0, 0)
                    seconds = time.perf_counter() - start
                on_pass()
                if each is None:
                    plain = seconds
                elif turn:
                    ratios[index - 1].append(seconds / plain)
    return [statistics.median(each) for each in ratios]
