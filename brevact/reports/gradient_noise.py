"""What quantization does to the gradients of a model, estimated without bias from a few passes.

With g_b the exact gradient of batch b, all weights in one vector, h_bs the gradient of the same batch with backward
quantization and seed s, and E the mean over seeds:

    noise = mean_b E |h_bs - E h_bs|^2 / V,    bias^2 = mean_b |E h_bs - g_b|^2 / V,    V = variance of g_b over batches

each estimated without bias: sums of squares over the draws less one, and from the squared mean error the sampling
variance that is in it. Noise 1 is what halving the batch adds; both scale as 1 / batch size like V, so that neither
depends on it.

In all passes of a batch a model draws the same random numbers of torch's (dropout): quantization alone differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from brevact.autograd import regions_disabled
from brevact.reports.gradient_passes import Gradients, Loss, as_it_was, check_repeats, gradients, squared_norm
from brevact.reports.saved_in_file import saved_in_file

#: Seeds of the model are those of its batches, one after the other; those of quantizers lie far from them.
_MOST_SEED, _SEEDS_OF_BATCH = 1 << 62, 1 << 32


class Estimate(NamedTuple):
    """A figure and its standard error, NaN where nothing is known of that."""

    value: float
    error: float


class Distortion(NamedTuple):
    """What quantization does to gradients, in the unit of :class:`ExactGradients`.

    Noise is the variance over seeds, summed over weights, and bias the squared norm of the mean error.
    """

    noise: Estimate
    bias: Estimate


class ExactGradients(NamedTuple):
    """Gradients of some batches without backward quantization: those of the parameters that train, for each batch.

    Their unit is the variance between batches, summed over weights; of one batch, the squared norm. The seed is that of
    the random numbers that the model draws.
    """

    of_batches: list[Gradients]
    unit: Estimate
    seed: int

    @property
    def is_relative(self) -> bool:
        """Whether the unit is the squared norm of one gradient."""
        return len(self.of_batches) == 1

    def seeds_of(self, batch: int) -> tuple[int, int]:
        """Return the seed of the model's draws for a batch, and the first of those of quantizers."""
        return self.seed + batch, self.seed + (batch + 1) * _SEEDS_OF_BATCH


def exact_gradients(
    model: nn.Module, batches: Sequence[Any], loss: Loss, on_pass: Callable[[], object] = lambda: None
) -> ExactGradients:
    """Return the gradients of batches without backward quantization: a pass for each, and one more.

    The model is measured in training mode, and afterwards as it was. A TypeError or a ValueError says that the loss is
    no scalar tensor, is not finite, or differs from one call to the next; that no parameter trains or gets a gradient;
    or that the gradients of all batches are equal.
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
    """Return the gradients of a pass without backward quantization, in the memory of one with it."""
    with regions_disabled(), saved_in_file(model):
        return gradients(model, batch, loss, seed)


def gradient_noise(
    model: nn.Module,
    batches: Sequence[Any],
    loss: Loss,
    exact: ExactGradients,
    draws: int,
    on_pass: Callable[[], object] = lambda: None,
) -> Distortion:
    """Return noise and squared bias of the gradients of a model with backward quantization: batches x draws passes.

    The model is measured in training mode, and afterwards as it was. The batches are those of the exact gradients, or
    the first of them; each has draws of its own, at least 2. What is held at a time are two gradients in their own
    precision and one in float64. Errors are those of the mean over batches and that of the unit, as if the two were
    independent; the latter is left out where it is not known, of fewer than 3 batches.
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
    """Return noise and squared bias of each batch, 2 x batches in float64, in no unit; see :func:`gradient_noise`."""
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
    """Yield the gradients of a batch, each with seeds of its own for quantization."""
    for each in quantization:
        yield gradients(model, batch, loss, seed, each)
        on_pass()


def batch_variance(gradients_B: Sequence[Gradients]) -> Estimate:
    """Variance of gradients over at least 2 batches, summed over weights.

    Its error is the jackknife's, and NaN of 2 batches.
    """
    batches = len(gradients_B)
    squares_B = torch.zeros(batches, dtype=torch.float64)
    for of_parameter in zip(*gradients_B, strict=True):
        mean = sum(grad.double() for grad in of_parameter) / batches
        squares_B += torch.tensor([float((grad.double() - mean).square().sum()) for grad in of_parameter])
    # Leaving out batch b, the sum of squares is less by squares_b * B / (B - 1).
    error = float(squares_B.std() * math.sqrt(batches) / (batches - 2)) if batches > 2 else math.nan
    return Estimate(float(squares_B.sum() / (batches - 1)), error)


def variance_and_bias(drawn: Iterable[Gradients], exact: Gradients) -> tuple[float, float]:
    """Unbiased estimates of the variance and of the squared bias of random gradients, summed over weights.

    Of at least 2 independent draws running sums are kept. The variance sum_w S_w^2 is exactly 0 for draws that are
    equal; the bias |mean - exact|^2 - sum_w S_w^2 / D may be negative.
    """
    draws = iter(drawn)
    first = next(draws)
    sums = [torch.zeros_like(grad, dtype=torch.float64) for grad in first]
    count, squares = 1, 0.0
    for found in draws:
        count += 1
        for total, grad, start in zip(sums, found, first, strict=True):
            change = grad.double() - start  # from the first draw: exactly 0 where they are equal
            total.add_(change)
            squares += float(change.square_().sum())
    variance = max(0.0, squares - sum(float(total.square().sum()) for total in sums) / count) / (count - 1)
    bias = 0.0
    for total, start, grad in zip(sums, first, exact, strict=True):
        bias += float(total.div_(count).add_(start).sub_(grad).square_().sum())
    return variance, bias - variance / count


def in_units(values_B: Tensor, unit: Estimate) -> Estimate:
    """Return the mean of figures of independent batches in a unit; its error is NaN for one batch.

    The unit's own error is left out where it is NaN.
    """
    mean = float(values_B.mean())
    error = float(values_B.std() / math.sqrt(len(values_B))) if len(values_B) > 1 else math.nan
    of_unit = 0.0 if math.isnan(unit.error) else mean * unit.error / unit.value
    return Estimate(mean / unit.value, math.hypot(error, of_unit) / unit.value)
