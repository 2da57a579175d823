"""Noise of each chain alone, by bit width, from which `fit` allocates bits.

Two passes with a chain at b bits and all others at 8 measure E |h - g|^2, minus the same with all at 8 bits, in units
of minibatch noise: variance plus squared bias. It follows c / (2^b - 1)^2 from 3 bits on; fewer bits are measured, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from brevact.autograd.hooks import regions_of
from brevact.bit_widths.allocation import Option
from brevact.bit_widths.fit_groups import BIT_WIDTHS, FULL_PRECISION, Groups, storing
from brevact.reports.gradient_noise import ExactGradients
from brevact.reports.gradient_passes import Loss, as_it_was, gradients, squared_norm

#: Bits at which each group is measured first; from here on its noise follows the law.
FIRST_WIDTH = 3
_FINE = max(BIT_WIDTHS)
_LEAST_NOISE = 1e-15


class ChainNoise:
    """Measures each chain's own noise, at most once per width, with one draw per batch, on a model without a policy.

    `exact` has the gradients of these batches, and maybe of more.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Groups,
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
        """Measure a chain alone, unless it was measured at this width."""
        if bit_width not in self._measured[source]:
            self._measured[source][bit_width] = max(self._error({source: bit_width}) - self._floor, _LEAST_NOISE)

    def measure_within(self, widths: Mapping[str, int]) -> None:
        """Replace each chain's noise by its share at these widths: the total minus the total with it at 8 bits."""
        whole = self._error(widths)
        for source, width in widths.items():
            if width < _FINE:
                without = self._error({**widths, source: _FINE})
                self._measured[source] = {width: max(whole - without, _LEAST_NOISE)}

    def noise(self, source: str, bit_width: int) -> float:
        """Return a chain's noise at a width, from the nearest measured width."""
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
        """Return a chain's bytes and noise at each width."""
        return [Option(size, self.noise(source, width), width) for width, size in self._groups.costs[source].items()]

    def _error(self, widths: Mapping[str, int]) -> float:
        """Return the gradients' mean squared error in units of minibatch noise, with other chains at 8 bits."""
        quantizers = self._groups.quantizers({**self._fine, **widths})
        errors = []
        with as_it_was(self._model), storing(self._model, quantizers):
            for index, batch in enumerate(self._batches):
                found = gradients(self._model, batch, self._loss, self._exact.seed + index, index)
                exact = self._exact.of_batches[index]
                errors.append(squared_norm([a.double().sub_(b) for a, b in zip(found, exact, strict=True)]))
                self._on_pass()
        return float(torch.tensor(errors, dtype=torch.float64).mean()) / self._exact.unit.value
