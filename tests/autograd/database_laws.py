"""Comparisons of a call in torch's databases: the laws of a region, and the call's results and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import brevact
from brevact import BackwardSettings, LosslessBackward, StochBackward2bit, StochBackward8bit

#: Relative error of a gradient whose tensors are stored at 8 bits, of one draw or of the mean over some.
MOST_ERROR, DRAWS = 0.1, 64
#: Norm of a gradient, relative to what reaches the op, that is no more than what rounding leaves of a difference.
VANISHING = 1e-5


class Outcome(NamedTuple):
    outputs: list[Tensor]
    grads: list[Tensor | None]
    scale: float
    """Norm of the weights of that sum: what reaches the op in backward."""


def loss_of(outputs: list[Tensor]) -> Tensor | None:
    """A weighted sum of the results, the weights of both signs and of one scale."""
    terms = []
    for x in outputs:
        if x.requires_grad:
            y = dense(x)
            y = torch.view_as_real(y.resolve_conj()) if y.is_complex() else y
            generator = torch.Generator().manual_seed(y.numel())
            weights = torch.rand(y.shape, generator=generator, dtype=torch.float64) + 0.5
            weights *= torch.randint(0, 2, y.shape, generator=generator) * 2 - 1
            terms.append((y * weights.to(y.dtype)).sum())
    return None if not terms else sum(terms[1:], terms[0])


def dense(x: Tensor) -> Tensor:
    if x.is_nested:
        return torch.cat([part.flatten() for part in x.unbind()])
    return x if x.layout is torch.strided else x.to_dense()


def settings_of(quantizer: Any, is_large: bool) -> BackwardSettings:
    """The default settings for large samples, those that pack each tensor for small ones."""
    return BackwardSettings(brevact.quantizer(quantizer), **({} if is_large else {"min_numel": 0}))


def are_same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def finite_pairs(outcome: Outcome, plain: Outcome) -> list[tuple[Tensor, Tensor]]:
    """Elements of the gradients whose plain value is finite, with those values; no gradient is one of zeros."""
    pairs = []
    for grad, expected in zip(outcome.grads, plain.grads, strict=True):
        if expected is not None:
            grad = torch.zeros_like(expected) if grad is None else grad
            where = expected.isfinite()
            pairs.append((grad[where].double(), expected[where].double()))
    return pairs


def error_of(grad: Tensor, expected: Tensor, scale: float) -> float:
    """Error relative to the norm of ``expected``, or to ``scale``, the norm at the op, if the gradient vanishes.

    A norm of two elements has only the rounding of a difference for a gradient; 10 % of that is nothing.
    """
    error, norm = float((grad - expected).norm()), float(expected.norm())
    return error / (norm if norm > VANISHING * scale else scale) if error else 0.0


def errs_on_average(call: Callable[[int], Outcome], plain: Callable[[int], Outcome], expected: Outcome) -> bool:
    """Whether the mean gradient over some draws errs by more than the bound and more than 5 standard errors."""
    if not all(are_same(a, b) for a, b in zip(plain(1).outputs, expected.outputs, strict=True)):
        return True  # the op draws random numbers of its own
    drawn = [finite_pairs(call(seed), expected) for seed in range(DRAWS)]
    for i, (_, reference) in enumerate(drawn[0]):
        values = torch.stack([pairs[i][0] for pairs in drawn])
        mean = values.mean(0)
        if error_of(mean, reference, expected.scale) > MOST_ERROR:
            if float((mean - reference).norm()) > 5 * float(values.std(0).norm()) / DRAWS**0.5:
                return True
    return False


def bias_of(call: Callable[[int], Outcome], plain: Outcome, odd: list[Tensor | None]) -> float:
    """Largest significant bias of the gradients, relative to their norms, from two sets of draws; NaN is infinite.

    The mean product of the errors of two draws is the squared bias; an unbiased gradient's lies within some of its
    standard errors of zero, however the errors of one draw depend on each other. ``odd`` elements do not count.
    """

    def ordinary(outcome: Outcome) -> list[Tensor]:
        found = []
        for grad, expected, where in zip(outcome.grads, plain.grads, odd, strict=True):
            if expected is not None and expected.numel() >= 16:
                grad = torch.zeros_like(expected) if grad is None else grad
                grad = grad if where is None else grad[~where]
                found.append((torch.view_as_real(grad) if grad.is_complex() else grad).double().flatten())
        return found

    largest = 0.0
    expected = ordinary(plain)
    found = ordinary(call(0))
    if all(torch.allclose(a, b, 1e-5, 1e-6 * float(b.abs().max())) for a, b in zip(found, expected, strict=True)):
        return largest
    first, second = ([ordinary(call(seed)) for seed in range(start, start + 16)] for start in (0, 16))
    for i, reference in enumerate(expected):
        biases = []
        for draws in (first, second):
            errors = torch.stack([draw[i] for draw in draws]) - reference
            products = (errors @ errors.T)[~torch.eye(16, dtype=torch.bool)]
            is_told = not products.mean() <= 5 * products.square().mean().sqrt() / 120**0.5
            biases.append(
                float(products.mean().nan_to_num(torch.inf)) ** 0.5 / float(reference.norm()) if is_told else 0.0
            )
        largest = max(largest, min(biases))
    return largest


def broken_laws(call: Callable[[BackwardSettings | None, int], Outcome], is_large: bool, is_exact: bool) -> list[str]:
    """Return the laws that a call breaks; ``call`` runs with settings, or None for no region, and a seed.

    ``is_large``: the settings are the default ones. ``is_exact``: the gradient is exact at 2 bits.
    """
    broken = []
    plain = call(None, 0)
    lossless, eight, two = (
        call(settings_of(each, is_large), 0) for each in (LosslessBackward, StochBackward8bit, StochBackward2bit)
    )
    for outcome in (lossless, eight, two):
        if not all(are_same(a, b) for a, b in zip(outcome.outputs, plain.outputs, strict=True)):
            broken.append("forward")
    if not all(are_same(a, b) for a, b in zip(lossless.grads, plain.grads, strict=True)):
        broken.append("lossless")
    if any(error_of(*pair, plain.scale) > MOST_ERROR for pair in finite_pairs(eight, plain)) and errs_on_average(
        lambda seed: call(settings_of(StochBackward8bit, is_large), seed), lambda seed: call(None, seed), plain
    ):
        broken.append("8 bits")
    if not all(grad.isfinite().all() for grad, _ in finite_pairs(two, plain)):
        broken.append("2 bits")
    for grad, expected in finite_pairs(two, plain) if is_exact else ():
        eps = 8 * torch.finfo(torch.float32).eps
        largest = float(expected.abs().max()) if len(expected) else 0.0
        if not torch.allclose(grad, expected, rtol=eps, atol=eps * largest):
            broken.append("exact")
    return broken
