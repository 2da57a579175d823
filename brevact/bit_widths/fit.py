"""Fit bit widths to a budget: `fit`.

A group has one width: a layer that packs tensors, and the layers that derive from it. All tensors derive from packed
ones if they can, at any width (``derive_min_bits=1``): the set of packed tensors then hardly depends on the widths, so
that bytes add up over the layers that pack.

Two passes with a chain at b bits and all others at 8 measure E |h - g|^2, minus the same with all at 8 bits, in units
of minibatch noise: variance plus squared bias. It follows c / (2^b - 1)^2 from 3 bits on; fewer bits are measured, too.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from brevact import injectors
from brevact.arguments import check_model
from brevact.autograd import attach_region, detach_region
from brevact.autograd.region.module_hooks import Attachment, regions_of, takes_hooks
from brevact.autograd.saving.storage_report import DERIVED, PACKED, SMALL
from brevact.bit_widths.budgets import BIT_WIDTHS, SLACK, TRIES, Budget, BudgetRefusal, Groups, Option, budget_of
from brevact.injectors import backward_settings_from
from brevact.injectors.proxies import modules_without_own_region, names_of
from brevact.policy.attach import attach_policy, hook_of_policy
from brevact.policy.fit_report import FitReport, FittedGroup
from brevact.policy.presets import Policy
from brevact.policy.rules import POLICY, layers_of, refuse_policy
from brevact.quantizers.checks import check_bool
from brevact.reports.gradient_noise import (
    ExactGradients,
    Loss,
    check_batches,
    check_loss,
    exact_gradients,
    gradient_noise,
    gradients,
    squared_norm,
    training,
)
from brevact.reports.in_place import in_place, uncompiled
from brevact.reports.memory import MemoryOfPass
from brevact.reports.memory_table import Chain, MemoryReport, chains_of
from brevact.reports.step import StepLoss, step_report
from brevact.tables import progress_bar
from brevact.user_lines import warn

#: The marker of full precision.
FULL_PRECISION = 32
_MOST = max(BIT_WIDTHS)
#: Additional bits of attention's query and key, since they are exponentiated.
_MORE_SCORE_BITS = 2
_LEAST_SCORE_BITS = 2


@dataclass(frozen=True, kw_only=True)
class FitGroups(Groups):
    """All saved tensors of a model: chains, each with one width, and the rest."""

    chains: tuple[Chain, ...]
    plain_bytes: int
    small: frozenset[str]
    attending: frozenset[str]
    names: tuple[str, ...]
    shared: frozenset[str]
    options: Mapping[str, Any]  # of `leaf_of`

    def quantizers(self, widths: Mapping[str, int]) -> dict[str, Any]:
        """Return those of modules that differ from their parents, of attention, shared modules and the model."""
        found: dict[str, Any] = {}
        effective: dict[str, int] = {}
        for name in self.names:
            effective[name] = width = _MOST if name in self.small else self.width_of(name, widths)
            attends = name in self.attending
            if not name or attends or name in self.shared or effective.get(name.rpartition(".")[0]) != width:
                found[name] = leaf_of(width, attends=attends, **self.options)
        return found

    def policy(self, widths: Mapping[str, int]) -> Policy:
        found = self.quantizers(widths)
        inner_first = sorted(found, key=_depth, reverse=True)
        inner_first.sort(key=lambda name: name not in self.shared)  # rules of containers match their other names
        return Policy({_pattern(name): found[name] for name in inner_first})


def groups_of(model: nn.Module, reports: Mapping[int, MemoryReport], **options: Any) -> FitGroups:
    """Return the groups of a model without a policy, from its reports with 1 to 8 bits everywhere."""
    finest = reports[_MOST]
    chains = chains_of(finest)
    sources_of: dict[str, list[str]] = {}
    for chain in chains:
        for reader in chain.readers:
            sources_of.setdefault(reader, []).append(chain.source)
    owner = {chain.source: chain.source for chain in chains} | {name: of[0] for name, of in sources_of.items()}
    costs = {chain.source: dict.fromkeys((*BIT_WIDTHS, FULL_PRECISION), 0) for chain in chains}
    for op in finest.ops:  # tensors that layers share without a policy count for each: an upper bound
        if op.layer in owner and op.how in (PACKED, DERIVED):
            costs[owner[op.layer]][FULL_PRECISION] += op.tensor_bytes
    for width, report in reports.items():
        for row in report.rows:
            if row.layer in owner:
                costs[owner[row.layer]][width] += row.saved_bytes
    others = {op.layer for op in finest.ops if op.why != SMALL}
    count = Counter(module for _, module in modules_without_own_region(model))
    names = {module: name for module, name in names_of(model).items() if module in count}
    return FitGroups(
        chains=chains,
        costs=costs,
        sources_of=sources_of,
        fixed_bytes=sum(row.saved_bytes for row in finest.rows if row.layer not in owner),
        plain_bytes=finest.plain_bytes,
        small=frozenset(op.layer for op in finest.ops) - others - owner.keys(),
        attending=frozenset(op.layer for op in finest.ops if "attention" in op.op),
        names=tuple(sorted(names.values(), key=_depth)),
        shared=frozenset(name for module, name in names.items() if count[module] > 1),
        options=options,
    )


@functools.cache
def leaf_of(bit_width: int, *, attends: bool, double_backward: bool = False, recompute: int = 0) -> Any:
    """Return the backward quantizer of a width, None for full precision; attention's query and key get more bits."""
    if bit_width == FULL_PRECISION:
        return None
    settings = {"score_bit_width": max(_LEAST_SCORE_BITS, min(_MOST, bit_width + _MORE_SCORE_BITS))} if attends else {}
    if double_backward:
        settings["double_backward"] = double_backward
    return getattr(injectors, f"DitherBackward{bit_width}bit").let(derive_min_bits=1, recompute=recompute, **settings)


@contextmanager
def storing(model: nn.Module, quantizers: Mapping[str, Any]) -> Iterator[None]:
    """Attach backward quantizers (None: full precision) to a model without a policy, for a block."""
    modules, attachment = dict(model.named_modules(remove_duplicate=False)), Attachment()
    with without_policy(model):
        for name, source in quantizers.items():
            if takes_hooks(modules[name]):
                settings = None if source is None else backward_settings_from(source)
                attach_region(modules[name], settings, POLICY, attachment=attachment)
        attachment.root = hook_of_policy(model)
        yield


@contextmanager
def without_policy(model: nn.Module) -> Iterator[None]:
    try:
        yield
    finally:
        for module in model.modules():
            detach_region(module, POLICY)


def _depth(name: str) -> int:
    return len(name.split(".")) if name else 0


def _pattern(name: str) -> str:
    """Escape a name, so that the rule matches only it and its children."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)


#: Bits at which each group is measured first; from here on its noise follows the law.
FIRST_WIDTH = 3
_LEAST_NOISE = 1e-15


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


def levels_of(
    model: nn.Module, memory: MemoryOfPass, budget: Budget, batch: Any, loss: Loss, *, quiet: float, is_quick: bool
) -> dict[int, float]:
    """Return the levels that differ in bytes, in the order to try, with times of steps over plain ones, or 0."""
    least, found, fitting = math.inf, {}, []
    for recompute in _LEVELS:
        if recompute <= _MOST_WITHOUT_TIME or budget.time is not None:
            with storing(model, {"": leaf_of(_BIT_WIDTH, attends=True, recompute=recompute)}):
                report = memory.measured()
                if report.saved_bytes >= (1 - _LEAST_SAVING) * least:
                    continue
                is_timed = budget.time is not None
                found[recompute] = step_report(model, batch, loss, rounds=_ROUNDS).time_ratio if is_timed else 0.0
            least = report.saved_bytes
            if (budget.noise is not None and budget.noise > quiet) or least <= budget.bytes_of(report.plain_bytes):
                fitting.append(recompute)
    if budget.time is not None:
        shortest = min(found.values())
        if shortest > budget.time:
            raise ValueError(
                f"time={budget.time:g} is not possible: a step takes {shortest:.2f} times as long as at full "
                f"precision; accepted is time={shortest + 0.01:.2f} or more"
            )
        return {level: time for level, time in reversed(found.items()) if time <= budget.time}
    return dict.fromkeys(sorted({*fitting[:1], *[*found][-1:]}), 0.0) if is_quick else found


_log = logging.getLogger(__name__)


class _Effort(NamedTuple):
    batches: int | None  # of the unit; None for all
    alone: int  # batches of each layer's noise
    together: int  # batches of a policy's noise
    rounds: int  # of measuring a policy and correcting it
    quiet: float  # noise and squared bias that need no further recomputation


_THOROUGH, _QUICK = _Effort(None, 2, 4, 3, 0.01), _Effort(3, 1, 2, 2, 0.1)
#: Draws per batch in a policy's noise.
_DRAWS = 2
#: Noise and squared bias above which to warn, unless a budget accepts them.
_LOUD = 1.0
#: Largest accepted factor between measured and predicted noise.
_AGREE = 1.5


def fit(
    model: nn.Module,
    batches: Sequence[Any],
    loss: Loss,
    *,
    ratio: float | None = None,
    saved_bytes: int | None = None,
    noise: float | None = None,
    time: float | None = None,
    double_backward: bool = False,
    quick: bool = False,
    progress: bool = True,
) -> Policy:
    """Return the policy of least gradient noise within a budget: each layer gets 1 to 8 bits or full precision.

    The budget is for a step in ``with brevact.backward_quant(model):``: the loss packs, too, at its own width, and its
    bytes and noise count.

    ``fit`` measures the noise of each layer that packs tensors, and spends bytes where they lower noise most
    (:func:`brevact.bit_widths.budgets.allocate`); other tensors derive where they can. It measures the resulting
    policy, and corrects it until bytes and noise are within the budget. ``policy.report`` has the result. Noise and
    squared bias are added, in units of the noise between minibatches.

    Layers are recomputed (``recompute=``) if the bytes or the noise need that, and with a budget of bytes alone until
    noise is below 0.01: ``fit`` tries increasing levels, up to 4096 multiplications per element. With ``time`` it takes
    the highest level whose steps take no longer.

    Cost with B batches and G layers that pack tensors (24 in EfficientNetV2 nano): B + 1 + 2 (G + 1) passes, two more
    per layer that gets 1 or 2 bits, 8 per measured policy (1, or up to 3 for ``noise``), and some 20 forward passes for
    bytes. All this once per level of recomputation. On a GPU, full-precision passes save their tensors in the host's
    memory, except the timed passes of a budget of ``time``.

    ``quick`` measures the layers' noise on one batch, in G + 1 passes, and policies on two batches. Without
    ``time`` it tries at most two levels of recomputation: the first one at which 4 bits are within the budget, and the
    last one if noise would be above 0.1 or the budget cannot be met otherwise.

    Source: ActNN, arXiv:2104.14129, section 4.3. Differs: noise is measured, not bounded, for any op; chains of derived
    tensors count as one; the budget is in bytes.

    >>> import torch, torch.nn.functional as F, brevact
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.SiLU(), torch.nn.Linear(128, 8))
    >>> batches = [(torch.randn(128, 64), torch.randint(8, (128,))) for _ in range(3)]
    >>> loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    >>> policy = brevact.fit(model, batches, loss, ratio=8)
    >>> policy.report.ratio >= 8
    True
    >>> model = brevact.quantize_backward(model, policy)

    Args:
        model: module without a policy, restored afterwards; layers with ``act_quant=`` keep theirs.
        batches: at least 2, of training size; more batches give a more exact unit. Noise is measured on the first 4.
        loss: takes the model and a batch, and returns a scalar. It runs in the region of the model.
        ratio: how many times fewer bytes to save than plain PyTorch.
        saved_bytes: most bytes to save for a batch like the first.
        noise: highest sum of noise and squared bias, in units of minibatch noise; alone or with a budget of bytes.
        time: longest step, as a multiple of a plain step; with another budget.
        double_backward: whether the loss differentiates gradients again (``create_graph=True``), which the policy then
            supports.
        quick: whether to measure the layers' noise on one batch, and the policy's on two.
        progress: whether to show a progress bar after some seconds, if tqdm is installed.

    Returns:
        A policy for this model; ``policy.save`` writes it, ``policy.report`` has its bytes and noise.

    Warns:
        UserWarning: noise and squared bias are above 1, and ``noise`` is not given.

    Raises:
        TypeError: ``model`` is not a module, ``batches`` not a list, a budget not a number, ``double_backward`` or
            ``quick`` not a bool, or the loss not a tensor.
        ValueError: there is no budget, or only ``time``, or it is impossible (the error names the nearest possible
            one); there are fewer than two batches; the loss is not a scalar, or differs between two runs; no parameter
            trains; or the model has a policy.
    """
    check_model(model, "fit(model, batches, loss, ratio=24)", batches)
    check_batches(batches, "fit(model, batches, loss, ratio=24)")
    check_loss(loss)
    budget = budget_of(ratio=ratio, saved_bytes=saved_bytes, noise=noise, time=time)
    if len(batches) < 2:
        raise ValueError(
            "batches: got 1; accepted are at least 2, whose gradients differ by the noise that is the unit"
        )
    check_bool("double_backward", double_backward)
    check_bool("quick", quick)
    refuse_policy(model)
    loss = StepLoss(loss)
    effort = _QUICK if quick else _THOROUGH
    batches = batches[: effort.batches]
    with progress_bar("fit", None, progress) as on_pass, in_place(model), uncompiled():
        exact = exact_gradients(model, batches, loss, on_pass)
        memory = MemoryOfPass(model, lambda measured: loss(measured, batches[0]))
        times: Mapping[int, float] = {0: 0.0}
        if not double_backward or time is not None:  # a gradient's graph needs the tensors to recompute
            times = levels_of(model, memory, budget, batches[0], loss, quiet=effort.quiet, is_quick=quick)

        found: list[tuple[FitReport, Policy]] = []
        refusals: list[BudgetRefusal] = []
        for recompute, of_step in times.items():
            options = {"double_backward": double_backward, "recompute": recompute}
            fitting = _Fit(model, batches, loss, budget, exact, memory, on_pass, options, effort)
            try:
                found.append(fitting.best(fitting.reports(), of_step))
            except BudgetRefusal as error:  # another level may meet the budget
                refusals.append(error)
            else:
                report, policy = found[-1]
                if budget.is_met_by(report) and (budget.noise is not None or report.harm <= effort.quiet):
                    break
        else:  # no level meets the budget with little noise: the one of least noise
            if not found:
                raise min(refusals, key=lambda each: each.least)
            met = [each for each in found if budget.is_met_by(each[0])]
            report, policy = min(met or found, key=lambda each: each[0].harm)
    if budget.noise is None and not report.harm <= _LOUD:
        warn(
            f"fit({report.budget}): noise and squared bias of the gradients are {report.harm:.2g} times the noise "
            "between minibatches, the least that was found; training will suffer. Store more bytes (a smaller ratio=, "
            "a larger saved_bytes=), or accept it by noise="
        )
    return policy


def _agree(report: FitReport) -> bool:
    return report.predicted <= _AGREE * report.harm and report.harm <= _AGREE * report.predicted


class _Fit:
    """Measures each chain's own noise, at most once per width, with one draw per batch, and policies of these."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        loss: Loss,
        budget: Budget,
        exact: ExactGradients,
        memory: MemoryOfPass,
        on_pass: Callable[[], object],
        options: Mapping[str, Any],
        effort: _Effort,
    ) -> None:
        self._effort, self._recompute = effort, options["recompute"]
        self._model, self._batches, self._loss, self._budget = model, batches, loss, budget
        self._exact, self._memory, self._passes, self._told = exact, memory, len(batches) + 1, on_pass
        reports = {}
        for width in BIT_WIDTHS:
            with storing(model, {"": leaf_of(width, attends=True, **options)}):
                reports[width] = memory.measured()
        self._groups = groups_of(model, reports, **options)
        self._noises: dict[str, dict[int, float]] = {source: {} for source in self._groups.costs}
        self._has_others = any(regions_of(module) for module in model.modules())
        #: Measured minus summed bytes, and measured over summed noise.
        self._more_bytes, self._factor = 0, 1.0

    def reports(self) -> list[FitReport]:
        groups, budget = self._groups, self._budget
        budget.check_bytes(groups.plain_bytes, groups.saved_bytes(dict.fromkeys(groups.costs, min(BIT_WIDTHS))))
        if not groups.costs or (budget.noise is None and budget.bytes_of(groups.plain_bytes) >= groups.plain_bytes):
            return [self._measured(dict.fromkeys(groups.costs, FULL_PRECISION))]
        for source in groups.costs:
            self._measure(source, FIRST_WIDTH)
        found: list[FitReport] = []
        for _ in range(self._effort.rounds):
            widths = self._within_bytes()
            found.append(self._measured(widths))
            if self._is_right(found[-1], widths):
                break
        return found

    @functools.cached_property
    def _floor(self) -> float:
        return self._error({})

    def _measure(self, source: str, bit_width: int) -> None:
        if bit_width not in self._noises[source]:
            self._noises[source][bit_width] = max(self._error({source: bit_width}) - self._floor, _LEAST_NOISE)

    def _noise(self, source: str, bit_width: int) -> float:
        if bit_width == FULL_PRECISION:
            return 0.0
        known = self._noises[source]
        nearest = min(known, key=lambda width: (abs(width - bit_width), -width))
        return known[nearest] * ((2**nearest - 1) / (2**bit_width - 1)) ** 2

    @property
    def _rest(self) -> float:
        """Noise of layers without a width, those with ``act_quant=``; 0 before anything is measured."""
        if not self._has_others or not any(self._noises.values()):
            return 0.0
        return max(0.0, self._floor - sum(self._noise(source, _MOST) for source in self._noises))

    def _error(self, widths: Mapping[str, int]) -> float:
        """Return the gradients' mean squared error in units of minibatch noise, with other chains at 8 bits."""
        quantizers = self._groups.quantizers({**dict.fromkeys(self._groups.costs, _MOST), **widths})
        errors = []
        with training(self._model), storing(self._model, quantizers):
            for index, batch in enumerate(self._batches[: self._effort.alone]):
                found = gradients(self._model, batch, self._loss, self._exact.seed + index, index)
                exact = self._exact.of_batches[index]
                errors.append(squared_norm([a.double().sub_(b) for a, b in zip(found, exact, strict=True)]))
                self._count()
        return float(torch.tensor(errors, dtype=torch.float64).mean()) / self._exact.unit.value

    def _within_bytes(self) -> dict[str, int]:
        """Return the best widths by known noise whose measured bytes are within the budget, but hardly below it."""
        groups, limit = self._groups, self._budget.bytes_of(self._groups.plain_bytes)
        for _ in range(TRIES):
            widths = self._chosen()
            with storing(self._model, groups.quantizers(widths)):
                saved_bytes = self._memory.measured().saved_bytes
            error = saved_bytes - self._more_bytes - groups.saved_bytes(widths)
            self._more_bytes += error
            if saved_bytes <= limit and -error <= SLACK * saved_bytes:
                break
        return widths

    def _chosen(self) -> dict[str, int]:
        """Return the best widths by known noise, after measuring unknown noise of chosen small widths."""
        groups = self._groups
        while True:
            items = [
                [Option(size, self._noise(source, width), width) for width, size in costs.items()]
                for source, costs in groups.costs.items()
            ]
            others = groups.fixed_bytes + self._more_bytes
            limit = self._budget.bytes_of(groups.plain_bytes)
            chosen = self._budget.choose(items, limit - others, self._factor, self._rest)
            widths = {source: each.bit_width for source, each in zip(groups.costs, chosen, strict=True)}
            # noise at a larger width than a measured one follows the law
            unknown = [source for source, width in widths.items() if width < min(FIRST_WIDTH, *self._noises[source])]
            for source in unknown:
                self._measure(source, widths[source])
            if not unknown:
                return widths

    def _measured(self, widths: Mapping[str, int]) -> FitReport:
        with without_policy(self._model):
            attach_policy(self._model, self._groups.policy(widths))
            memory = self._memory.measured()
            batches = self._batches[: self._effort.together]
            noise, bias = gradient_noise(self._model, batches, self._loss, self._exact, _DRAWS, self._count)
        of_layers = {row.layer: row.saved_bytes for row in memory.rows}
        groups = tuple(
            FittedGroup(
                source=chain.source,
                readers=len(chain.readers),
                bit_width=widths[chain.source],
                saved_bytes=of_layers.get(chain.source, 0),
                noise=self._noise(chain.source, widths[chain.source]) * self._factor,
            )
            for chain in self._groups.chains
        )
        predicted = sum(each.noise for each in groups) + self._rest
        sizes = memory.saved_bytes, self._groups.plain_bytes
        report = FitReport(self._budget.text, *sizes, predicted, *noise, *bias, passes=self._passes, groups=groups)
        _log.info(
            "fit, %s: %d of %d bytes, noise %.3g, predicted %.3g",
            *(self._budget.text, report.saved_bytes, report.plain_bytes, report.noise, report.predicted),
        )
        return report

    def _is_right(self, report: FitReport, widths: Mapping[str, int]) -> bool:
        """Return whether the noise is as predicted and within its budget; if not, correct the prediction."""
        if self._budget.noise is None:
            return True
        total = sum(self._noise(source, width) for source, width in widths.items())
        if total and report.harm > self._rest:
            self._factor = (report.harm - self._rest) / total
        return _agree(report) and self._budget.is_met_by(report)

    def best(self, found: Sequence[FitReport], time: float) -> tuple[FitReport, Policy]:
        """Return report and policy of least noise, or bytes, within the budget, or the nearest ones, with a note."""
        budget = self._budget
        met = [each for each in found if budget.is_met_by(each)]
        is_by_noise = (budget.noise is None) == bool(met)
        best = min(met or found, key=lambda each: each.harm if is_by_noise else each.saved_bytes)
        notes = []
        if not met:
            notes.append(f"{budget.text} was not reached in {len(found)} policies; this is the nearest one.")
        if best.predicted and not _agree(best):
            times = best.harm / best.predicted
            notes.append(f"The noise is {times:.2g} times what was predicted: that of the layers does not add up.")
        report = replace(best, passes=self._passes, note=" ".join(notes), recompute=self._recompute, time=time)
        policy = self._groups.policy({group.source: group.bit_width for group in best.groups})
        return report, replace(policy, layers=layers_of(self._model), report=report)

    def _count(self) -> None:
        self._passes += 1
        self._told()
