"""Noise of each layer's tensors alone, by bit width, by which `fit` allocates bits.

Of a chain at b bits, all others at 8, two passes tell E |h - g|^2 - the same with all at 8 bits, in units of
minibatch noise: variance and squared bias together. It follows c / (2^b - 1)^2 from 3 bits on; where fewer bits are
in question, they are measured, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from brevact.autograd.hooks import regions_of
from brevact.bit_widths.allocation import Option
from brevact.bit_widths.fit_groups import BIT_WIDTHS, FULL_PRECISION, Groups, with_quantizers
from brevact.reports.gradient_noise import ExactGradients
from brevact.reports.gradient_passes import Loss, as_it_was, gradients, squared_norm

#: Bits at which each group is measured first, and from which on its noise follows the law.
FIRST_WIDTH = 3
_FINE = max(BIT_WIDTHS)
_LEAST_NOISE = 1e-15


class ChainNoise:
    """Measures noise of chains alone, each at a width at most once, by one draw a batch.

    Regions are attached to the model, which has no policy. The exact gradients are those of the batches, or of more.
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
        """Measure a chain alone, unless it is known at this width."""
        if bit_width not in self._measured[source]:
            self._measured[source][bit_width] = max(self._error({source: bit_width}) - self._floor, _LEAST_NOISE)

    def measure_within(self, widths: Mapping[str, int]) -> None:
        """Measure each chain beside the others at their widths: the noise less that with this chain at 8 bits.

        The noise of the chain alone is forgotten.
        """
        whole = self._error(widths)
        for source, width in widths.items():
            if width < _FINE:
                without = self._error({**widths, source: _FINE})
                self._measured[source] = {width: max(whole - without, _LEAST_NOISE)}

    def noise(self, source: str, bit_width: int) -> float:
        """Return the noise of a chain at a width, by the nearest one that is known."""
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
        """Return whether the noise of a chain at a width is measured, or follows the law from one that is."""
        return bit_width >= min(FIRST_WIDTH, *self._measured[source])

    def options(self, source: str) -> list[Option]:
        """Return the bytes of a chain, and its noise, at each width."""
        return [Option(size, self.noise(source, width), width) for width, size in self._groups.costs[source].items()]

    def _error(self, widths: Mapping[str, int]) -> float:
        """Return the mean squared error of the gradients in units of minibatch noise, other chains at 8 bits."""
        quantizers = self._groups.quantizers({**self._fine, **widths})
        errors = []
        with as_it_was(self._model), with_quantizers(self._model, quantizers):
            for index, batch in enumerate(self._batches):
                found = gradients(self._model, batch, self._loss, self._exact.seed + index, index)
                exact = self._exact.of_batches[index]
                errors.append(squared_norm([a.double().sub_(b) for a, b in zip(found, exact, strict=True)]))
                self._on_pass()
        return float(torch.tensor(errors, dtype=torch.float64).mean()) / self._exact.unit.value
