"""Groups of layers with one bit width in `fit`: a layer that packs tensors, and the layers that derive from it.

All tensors derive from packed ones if they can, at any width (``derive_min_bits=1``): the set of packed tensors then
hardly depends on the widths, so that bytes add up over the layers that pack.

Two passes with a chain at b bits and all others at 8 measure E |h - g|^2, minus the same with all at 8 bits, in units
of minibatch noise: variance plus squared bias. It follows c / (2^b - 1)^2 from 3 bits on; fewer bits are measured, too.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from brevact import injectors
from brevact.autograd import attach_region, detach_region
from brevact.autograd.hooks import Attachment, regions_of, takes_hooks
from brevact.autograd.storage_report import DERIVED, PACKED, SMALL
from brevact.bit_widths.budgets import Option
from brevact.bit_widths.layers import BIT_WIDTHS, Groups
from brevact.injectors import backward_settings_from
from brevact.injectors.proxies import modules_without_own_region, names_of
from brevact.policy.attach import hook_of_policy
from brevact.policy.presets import Policy
from brevact.policy.rules import POLICY
from brevact.reports.gradient_noise import ExactGradients, Loss, gradients, squared_norm, training_eagerly
from brevact.reports.memory_table import Chain, MemoryReport, chains_of

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
    double_backward: bool = False
    recompute: int = 0

    def widths_of_modules(self, widths: Mapping[str, int]) -> dict[str, int]:
        """Return the widths of modules that differ from their parents, of attention, shared modules and the model."""
        found: dict[str, int] = {}
        effective: dict[str, int] = {}
        for name in self.names:
            effective[name] = width = _MOST if name in self.small else self.width_of(name, widths)
            is_own = not name or name in self.shared or name in self.attending
            if is_own or effective.get(name.rpartition(".")[0]) != width:
                found[name] = width
        return found

    def quantizers(self, widths: Mapping[str, int]) -> dict[str, Any]:
        found = self.widths_of_modules(widths)
        return {
            name: leaf_of(
                width,
                attends=name in self.attending,
                double_backward=self.double_backward,
                recompute=self.recompute,
            )
            for name, width in found.items()
        }

    def policy(self, widths: Mapping[str, int]) -> Policy:
        found = self.quantizers(widths)
        inner_first = sorted(found, key=_depth, reverse=True)
        inner_first.sort(key=lambda name: name not in self.shared)  # rules of containers match their other names
        return Policy({_pattern(name): found[name] for name in inner_first})


def groups_of(
    model: nn.Module, reports: Mapping[int, MemoryReport], *, double_backward: bool = False, recompute: int = 0
) -> FitGroups:
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
        double_backward=double_backward,
        recompute=recompute,
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
_FINE = max(BIT_WIDTHS)
_LEAST_NOISE = 1e-15


class ChainNoise:
    """Measures each chain's own noise, at most once per width, with one draw per batch, on a model without a policy."""

    def __init__(
        self,
        model: nn.Module,
        groups: FitGroups,
        batches: Sequence[Any],
        loss: Loss,
        exact: ExactGradients,
        on_pass: Callable[[], object],
    ) -> None:
        self._model, self._groups, self._batches, self._loss = model, groups, batches, loss
        self._exact, self._on_pass = exact, on_pass
        self._fine = dict.fromkeys(groups.costs, _FINE)
        self._measured: dict[str, dict[int, float]] = {source: {} for source in self._fine}
        self._has_others = any(regions_of(module) for module in model.modules())

    @functools.cached_property
    def _floor(self) -> float:
        return self._error({})

    def measure(self, source: str, bit_width: int) -> None:
        if bit_width not in self._measured[source]:
            self._measured[source][bit_width] = max(self._error({source: bit_width}) - self._floor, _LEAST_NOISE)

    def noise(self, source: str, bit_width: int) -> float:
        if bit_width == FULL_PRECISION:
            return 0.0
        known = self._measured[source]
        nearest = min(known, key=lambda width: (abs(width - bit_width), -width))
        return known[nearest] * ((2**nearest - 1) / (2**bit_width - 1)) ** 2

    @property
    def rest(self) -> float:
        """Noise of layers without a width, those with ``act_quant=``; 0 before anything is measured."""
        if not self._has_others or not any(self._measured.values()):
            return 0.0
        return max(0.0, self._floor - sum(self.noise(source, _FINE) for source in self._measured))

    def is_known(self, source: str, bit_width: int) -> bool:
        """Return whether a chain's noise at a width is measured, or follows the law from a measured one."""
        return bit_width >= min(FIRST_WIDTH, *self._measured[source])

    def options(self, source: str) -> list[Option]:
        return [Option(size, self.noise(source, width), width) for width, size in self._groups.costs[source].items()]

    def _error(self, widths: Mapping[str, int]) -> float:
        """Return the gradients' mean squared error in units of minibatch noise, with other chains at 8 bits."""
        quantizers = self._groups.quantizers({**self._fine, **widths})
        errors = []
        with training_eagerly(self._model), storing(self._model, quantizers):
            for index, batch in enumerate(self._batches):
                found = gradients(self._model, batch, self._loss, self._exact.seed + index, index)
                exact = self._exact.of_batches[index]
                errors.append(squared_norm([a.double().sub_(b) for a, b in zip(found, exact, strict=True)]))
                self._on_pass()
        return float(torch.tensor(errors, dtype=torch.float64).mean()) / self._exact.unit.value
