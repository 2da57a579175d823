"""Unbiased estimates of the noise and bias that quantization adds to a model's gradients, from a few passes.

With g_b the exact gradient of batch b, all weights in one vector, h_bs the gradient of the same batch with backward
quantization and seed s, and E the mean over seeds:

    noise = mean_b E |h_bs - E h_bs|^2 / V,    bias^2 = mean_b |E h_bs - g_b|^2 / V,    V = variance of g_b over batches

each estimated without bias: divides sums of squares by the draws minus one, and subtracts the sampling variance from
the squared mean error. Noise 1 equals the noise that halving the batch adds; both scale as 1 / batch size like V, so
that neither depends on it.

All passes of a batch use the same torch random numbers (dropout): only quantization differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from brevact.autograd import regions_disabled
from brevact.reports.gradient_passes import Gradients, Loss, as_it_was, check_repeats, gradients, squared_norm
from brevact.reports.in_place import is_compiled
from brevact.reports.peak import saved_in_file

#: The model's seeds are consecutive, one per batch; quantizers' seeds are far from them.
_MOST_SEED, _SEEDS_OF_BATCH = 1 << 62, 1 << 32


class Estimate(NamedTuple):
    """A value and its standard error, NaN if unknown."""

    value: float
    error: float


class Distortion(NamedTuple):
    """Variance over seeds, summed over weights, and squared norm of the mean error, in `ExactGradients.unit`s."""

    noise: Estimate
    bias: Estimate


class ExactGradients(NamedTuple):
    """Gradients of trainable parameters without backward quantization, per batch.

    The unit is the variance between batches, summed over weights; with one batch, the squared norm of its gradient.
    `seed` is the first one for the model's random numbers.
    """

    of_batches: list[Gradients]
    unit: Estimate
    seed: int

    @property
    def is_relative(self) -> bool:
        return len(self.of_batches) == 1

    def seeds_of(self, batch: int) -> tuple[int, int]:
        """Return the model's seed for a batch, and the first seed of its quantizers."""
        return self.seed + batch, self.seed + (batch + 1) * _SEEDS_OF_BATCH


def exact_gradients(
    model: nn.Module, batches: Sequence[Any], loss: Loss, on_pass: Callable[[], object] = lambda: None
) -> ExactGradients:
    """Return the gradients of batches without backward quantization, from one pass per batch and one more.

    Runs the model in training mode and restores it. Raises a TypeError or a ValueError if the loss is not a scalar
    tensor, not finite, or differs between two calls; if no parameter trains or gets a gradient; or if the gradients of
    all batches are equal.
    """
    seed = torch.initial_seed() % _MOST_SEED
    versions = {name: p._version for name, p in model.named_parameters() if not p.is_inference()}
    with as_it_was(model):
        again = plain_gradients(model, batches[0], loss, seed)
        on_pass()
        found = []
        for index, batch in enumerate(batches):
            found.append(plain_gradients(model, batch, loss, seed + index))
            on_pass()
    changed = [name for name, p in model.named_parameters() if p._version != versions.get(name, p._version)]
    check_repeats(found[0], again, changed)
    unit = batch_variance(found) if len(found) > 1 else Estimate(squared_norm(found[0]), math.nan)
    if unit.value == 0:
        raise ValueError(
            f"batches: the gradients of all {len(found)} are equal, or 0, so that there is no unit of noise; pass "
            "different batches, and weights that they change"
        )
    return ExactGradients(found, unit, seed)


def plain_gradients(model: nn.Module, batch: Any, loss: Loss, seed: int) -> Gradients:
    """Return the gradients of a pass without backward quantization, in the memory of a packed one."""
    with regions_disabled(is_compiled(model)), saved_in_file(model):
        return gradients(model, batch, loss, seed)


def gradient_noise(
    model: nn.Module,
    batches: Sequence[Any],
    loss: Loss,
    exact: ExactGradients,
    draws: int,
    on_pass: Callable[[], object] = lambda: None,
) -> Distortion:
    """Return noise and squared bias of the gradients with backward quantization, from batches x draws passes.

    Runs the model in training mode and restores it. `batches` are the first ones of `exact`, or all; each has its own
    draws, at least 2. Memory: two gradients in their own precision and one in float64. Standard errors combine those of
    the mean over batches and of the unit as if independent, without the latter for fewer than 3 batches.
    """
    noise_B, bias_B = noise_of_batches(model, batches, loss, exact, draws, on_pass)
    return Distortion(in_units(noise_B, exact.unit), in_units(bias_B, exact.unit))


def noise_of_batches(
    model: nn.Module,
    batches: Sequence[Any],
    loss: Loss,
    exact: ExactGradients,
    draws: int,
    on_pass: Callable[[], object] = lambda: None,
) -> Tensor:
    """Return noise and squared bias per batch, (2, batches) float64, without a unit; see :func:`gradient_noise`."""
    figures = []
    with as_it_was(model):
        for index, batch in enumerate(batches):
            seed, first = exact.seeds_of(index)
            drawn = _drawn(model, batch, loss, seed, range(first, first + draws), on_pass)
            figures.append(variance_and_bias(drawn, exact.of_batches[index]))
    return torch.tensor(figures, dtype=torch.float64).T


def _drawn(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    seed: int,
    quantization: Iterable[int],
    on_pass: Callable[[], object],
) -> Iterator[Gradients]:
    for each in quantization:
        yield gradients(model, batch, loss, seed, each)
        on_pass()


def batch_variance(gradients_B: Sequence[Gradients]) -> Estimate:
    """Return the variance of gradients over at least 2 batches, with the jackknife's error (NaN for 2 batches)."""
    batches = len(gradients_B)
    squares_B = torch.zeros(batches, dtype=torch.float64)
    for of_parameter in zip(*gradients_B, strict=True):
        mean = sum(grad.double() for grad in of_parameter) / batches
        squares_B += torch.tensor([float((grad.double() - mean).square().sum()) for grad in of_parameter])
    # Without batch b, the sum of squares falls by squares_b * B / (B - 1).
    error = float(squares_B.std() * math.sqrt(batches) / (batches - 2)) if batches > 2 else math.nan
    return Estimate(float(squares_B.sum() / (batches - 1)), error)


def variance_and_bias(drawn: Iterable[Gradients], exact: Gradients) -> tuple[float, float]:
    """Return unbiased estimates of the variance and squared bias of random gradients, summed over weights.

    Keeps running sums of at least 2 independent draws. The variance sum_w S_w^2 is exactly 0 for equal draws; the bias
    |mean - exact|^2 - sum_w S_w^2 / D may be negative.
    """
    draws = iter(drawn)
    first = next(draws)
    sums = [torch.zeros_like(grad, dtype=torch.float64) for grad in first]
    count, squares = 1, 0.0
    for found in draws:
        count += 1
        for total, grad, start in zip(sums, found, first, strict=True):
            change = grad.double() - start  # exactly 0 for equal draws
            total.add_(change)
            squares += float(change.square_().sum())
    variance = max(0.0, squares - sum(float(total.square().sum()) for total in sums) / count) / (count - 1)
    bias = 0.0
    for total, start, grad in zip(sums, first, exact, strict=True):
        bias += float(total.div_(count).add_(start).sub_(grad).square_().sum())
    return variance, bias - variance / count


def in_units(values_B: Tensor, unit: Estimate) -> Estimate:
    """Return the mean of independent batches' values in a unit; its error is NaN for one batch, and ignores a NaN
    error of the unit.
    """
    mean = float(values_B.mean())
    error = float(values_B.std() / math.sqrt(len(values_B))) if len(values_B) > 1 else math.nan
    of_unit = 0.0 if math.isnan(unit.error) else mean * unit.error / unit.value
    return Estimate(mean / unit.value, math.hypot(error, of_unit) / unit.value)
