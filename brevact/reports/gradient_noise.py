"""Unbiased estimates of the noise and bias that quantization adds to a model's gradients, from a few passes.

`gradient_report` has the formulas. Sums of squares are divided by the draws minus one, and the sampling variance is
subtracted from the squared mean error. All passes of a batch use the same torch random numbers
(dropout): only quantization differs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from brevact.autograd import regions_disabled
from brevact.autograd.region import running
from brevact.autograd.region.running import nodes_behind
from brevact.autograd.region.seeds import kept_generators, seeded
from brevact.quantizers.brief import brief
from brevact.reports.in_place import ModelBefore

#: Gradients in the order of the parameters.
Gradients = Sequence[Tensor]
Loss = Callable[[Any, Any], Tensor]
OnPass = Callable[[], object] | None

#: Largest relative difference of two exact gradients of one batch; beyond it the loss is not a fixed function.
MOST_DIFFERENCE = 1e-2


def gradients(model: nn.Module, batch: Any, loss: Loss, seed: int, quantization: int | None = None) -> Gradients:
    """Return the gradients of trainable parameters; buffers, attributes and other tensors' gradients are unchanged."""
    before = ModelBefore(model, but_parameters=True)
    model.zero_grad(set_to_none=True)
    if torch.cuda.is_available() and not torch.cuda.is_initialized():
        torch.default_generator.manual_seed(seed)  # alone: CUDA's generators would later start from this seed
    else:
        torch.manual_seed(seed)
    others: list[tuple[Tensor, Tensor | None]] = []
    try:
        with nullcontext() if quantization is None else seeded(quantization):
            value = checked_value(loss(model, batch))
            if not bool(value.isfinite()):
                raise ValueError(f"loss: returned {float(value.detach())}; noise is measured where losses are finite")
            own = {id(p) for p in model.parameters()}
            for node in nodes_behind([torch.autograd.graph.get_gradient_edge(value).node]):
                leaf = getattr(node, "variable", None)  # of the loss alone, or an input that requires a gradient
                if isinstance(leaf, Tensor) and id(leaf) not in own:
                    others.append((leaf, leaf.grad))
                    leaf.grad = None
            value.backward()
    finally:
        before.restore()
        for leaf, grad in others:
            leaf.grad = grad
    found = [p.grad for p in model.parameters() if p.requires_grad]
    if all(grad is None for grad in found):
        raise ValueError(
            "loss: no parameter of the model gets a gradient; compute it with the model that is passed: "
            "lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"
        )
    model.zero_grad(set_to_none=True)
    trained = (p for p in model.parameters() if p.requires_grad)
    return [torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(trained, found, strict=True)]


def squared_norm(found: Gradients) -> float:
    return sum(float(grad.double().square().sum()) for grad in found)


def squared_distance(found: Gradients, other: Gradients) -> float:
    return sum(float((a.double() - b).square().sum()) for a, b in zip(found, other, strict=True))


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Run a block that trains a model; torch's generators are restored, and the model by :func:`in_place` around it."""
    if not any(p.requires_grad for p in model.parameters()):
        count = sum(1 for _ in model.parameters())
        raise ValueError(
            f"model: none of the {count} parameters of {type(model).__name__} requires a gradient, so that "
            "quantization has nothing to change; call model.requires_grad_()"
        )
    with kept_generators(), torch.inference_mode(False), torch.enable_grad():
        if not model.training:
            model.train()
        yield


def checked_value(value: Any) -> Tensor:
    fix = "return a scalar tensor: lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"
    if not isinstance(value, Tensor):
        raise TypeError(f"loss: returned {brief(value)} of type {type(value).__name__}; {fix}")
    if value.numel() != 1:
        raise ValueError(f"loss: returned a tensor of shape {tuple(value.shape)}; {fix}, or its mean()")
    if not value.requires_grad:
        raise ValueError(
            "loss: returned a tensor that requires no gradient; compute it with the model that is passed, without "
            "detach(), item() and torch.no_grad()"
        )
    return value


def check_repeats(first: Gradients, second: Gradients, changed: Sequence[str]) -> None:
    """Raise a ValueError if two exact gradients of a batch differ; `changed` names parameters that a pass modified."""
    norm = math.sqrt(squared_norm(first))
    difference = math.sqrt(squared_distance(first, second))
    if not math.isfinite(norm):
        raise ValueError("loss: the gradient of the first batch is not finite; noise is measured where gradients are")
    if not difference <= MOST_DIFFERENCE * norm:
        why = (
            f"The passes change parameters, {', '.join(changed)}: leave steps of an optimizer inside the model, and "
            "other updates in place, out of what is measured"
            if changed
            else "Random numbers of torch's generators, buffers and attributes of modules are the same in all passes; "
            "draw others (of random, numpy, a generator of its own) beforehand, into the batches, and keep state in "
            "attributes of modules (not in globals or iterators)"
        )
        raise ValueError(
            f"loss: two exact gradients of the first batch, of norm {norm:.2g}, differ by {difference:.2g}, which "
            f"would count as noise of quantization. {why}"
        )


def check_batches(batches: Any, call: str) -> None:
    if isinstance(batches, str | bytes | Tensor) or not isinstance(batches, Sequence):
        raise TypeError(
            f"batches: got {brief(batches)} of type {type(batches).__name__}; accepted is a list of batches, each what "
            f"the loss takes; a few of a data loader: {call} with batches = list(itertools.islice(loader, 4))"
        )
    if not batches:
        raise ValueError("batches: got none; accepted are at least 2, or 1 for figures relative to its gradient")


def check_loss(loss: Any) -> None:
    if not callable(loss) or isinstance(loss, nn.Module | type) or not _takes_two(loss):
        raise TypeError(
            f"loss: got {brief(loss)} of type {type(loss).__name__}; accepted is a function of the model and a batch: "
            "lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"
        )


def _takes_two(loss: Callable[..., Any]) -> bool:
    try:
        return bool(inspect.signature(loss).bind(None, None).args)
    except (TypeError, ValueError) as error:
        return isinstance(error, ValueError)  # of a builtin, whose signature is unknown


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
        return self.seed + batch, self.seed + (batch + 1) * _SEEDS_OF_BATCH


def exact_gradients(
    model: nn.Module, batches: Sequence[Any], loss: Loss, on_pass: Callable[[], object] = lambda: None
) -> ExactGradients:
    seed = torch.initial_seed() % _MOST_SEED
    versions = {name: p._version for name, p in model.named_parameters() if not p.is_inference()}
    with training(model):
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


def saved_on_host(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which autograd's tensors of a model on a GPU wait for backward in the host's memory."""
    if all(x.is_cpu for x in model.parameters()):
        return nullcontext()
    return running.measuring_hooks(lambda x: (x.device, x.detach().cpu()), lambda saved: saved[1].to(saved[0]))


def plain_gradients(model: nn.Module, batch: Any, loss: Loss, seed: int) -> Gradients:
    with regions_disabled(), saved_on_host(model):
        return gradients(model, batch, loss, seed)


def gradient_noise(
    model: nn.Module, batches: Sequence[Any], loss: Loss, exact: ExactGradients, draws: int, on_pass: OnPass = None
) -> Distortion:
    """Return the means over batches of :func:`noise_of_batches` in the unit; each draw first calls ``on_pass``."""
    noise_B, bias_B = noise_of_batches(model, batches, loss, exact, draws, on_pass)
    return Distortion(in_units(noise_B, exact.unit), in_units(bias_B, exact.unit))


def noise_of_batches(
    model: nn.Module, batches: Sequence[Any], loss: Loss, exact: ExactGradients, draws: int, on_pass: OnPass = None
) -> Tensor:
    """Return noise and squared bias per batch, (2, batches) float64, without a unit; see :func:`gradient_noise`."""

    def drawn_at(batch: Any, seed: int, quantization: int) -> Gradients:
        if on_pass is not None:
            on_pass()
        return gradients(model, batch, loss, seed, quantization)

    figures = []
    with training(model):
        for index, batch in enumerate(batches):
            seed, first = exact.seeds_of(index)
            drawn = (drawn_at(batch, seed, each) for each in range(first, first + draws))
            figures.append(variance_and_bias(drawn, exact.of_batches[index]))
    return torch.tensor(figures, dtype=torch.float64).T


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
    """Return unbiased estimates of variance and squared bias of at least 2 independent draws, summed over weights."""
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
    """Return the mean of independent batches' values in a unit, with its error, NaN for one batch."""
    mean = float(values_B.mean())
    error = float(values_B.std() / math.sqrt(len(values_B))) if len(values_B) > 1 else math.nan
    of_unit = 0.0 if math.isnan(unit.error) else mean * unit.error / unit.value
    return Estimate(mean / unit.value, math.hypot(error, of_unit) / unit.value)
