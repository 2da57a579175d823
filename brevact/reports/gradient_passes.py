"""Compute a model's gradients without changing the model, and check that its loss allows that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from brevact.autograd.running import nodes_behind
from brevact.autograd.seeds import kept_generators, seeded
from brevact.quantizers.brief import brief
from brevact.quantizers.checks import check_int
from brevact.reports.in_place import ModelBefore, is_compiled, uncompiled

#: Gradients in the order of the parameters.
Gradients = Sequence[Tensor]
Loss = Callable[[Any, Any], Tensor]

#: Largest relative difference of two exact gradients of one batch; beyond it the loss is not a fixed function.
MOST_DIFFERENCE = 1e-2


def gradients(model: nn.Module, batch: Any, loss: Loss, seed: int, quantization: int | None = None) -> Gradients:
    """Return the gradients of trainable parameters; buffers, attributes and other tensors' gradients are unchanged.

    The model's gradients are None afterwards. `seed` seeds torch's generators, for the model's own random numbers;
    `quantization` seeds the quantizers, which use torch's generator if it is None.
    """
    before = ModelBefore(model, but_parameters=True)
    model.zero_grad(set_to_none=True)
    _seed_generators(seed)
    try:
        with nullcontext() if quantization is None else seeded(quantization):
            value = loss(model, batch)
            _check_value(value)
            with _gradients_kept(_leaves_beside(value, model)):
                value.backward()
    finally:
        before.restore()
    found = [p.grad for p in model.parameters() if p.requires_grad]
    if all(grad is None for grad in found):
        raise ValueError(
            "loss: no parameter of the model gets a gradient; compute it with the model that is passed: "
            "lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"
        )
    model.zero_grad(set_to_none=True)
    trained = (p for p in model.parameters() if p.requires_grad)
    return [torch.zeros_like(p) if g is None else g.to_dense() for p, g in zip(trained, found, strict=True)]


def _seed_generators(seed: int) -> None:
    """Seed torch's generators, except CUDA's before its initialization, which would later start from this seed."""
    if torch.cuda.is_available() and not torch.cuda.is_initialized():
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def _leaves_beside(value: Tensor, model: nn.Module) -> list[Tensor]:
    """Return a graph's leaves other than the model's parameters: the loss's own, or inputs that require gradients."""
    own = {id(p) for p in model.parameters()}
    nodes = nodes_behind([torch.autograd.graph.get_gradient_edge(value).node])
    leaves = [getattr(node, "variable", None) for node in nodes]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in own]


@contextmanager
def _gradients_kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    before = [(x, x.grad) for x in tensors]
    try:
        for x in tensors:
            x.grad = None
        yield
    finally:
        for x, grad in before:
            x.grad = grad


def squared_norm(found: Gradients) -> float:
    """Return the sum of squares over all gradients."""
    return sum(float(grad.double().square().sum()) for grad in found)


def squared_distance(found: Gradients, other: Gradients) -> float:
    """Return the sum of squared differences over all gradients."""
    return sum(float((a.double() - b).square().sum()) for a, b in zip(found, other, strict=True))


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Run a block that trains a model, then restore gradients, training modes and torch's generators.

    Post-accumulate-grad hooks, such as optimizers that step during backward, do not run. Raises a ValueError if no
    parameter requires a gradient.
    """
    if not any(p.requires_grad for p in model.parameters()):
        count = sum(1 for _ in model.parameters())
        raise ValueError(
            f"model: none of the {count} parameters of {type(model).__name__} requires a gradient, so that "
            "quantization has nothing to change; call model.requires_grad_()"
        )
    before = [(p, p.grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    hooks = [(each, dict(each)) for p, _ in before if (each := p._post_accumulate_grad_hooks)]
    try:
        eager = nullcontext() if is_compiled(model) else uncompiled()
        with eager, kept_generators(), torch.inference_mode(False), torch.enable_grad():
            if not model.training:
                model.train()
            for each, _ in hooks:
                each.clear()
            yield
    finally:
        for each, old in hooks:
            each.update(old)
        for module, mode in modes:
            module.training = mode
        for parameter, grad in before:
            parameter.grad = grad


def _check_value(value: Any) -> None:
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
    if not bool(value.isfinite()):
        raise ValueError(f"loss: returned {float(value.detach())}; noise is measured where losses are finite")


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
    """Raise if batches are not a sequence or are empty; `call` is the usage that the error shows."""
    if isinstance(batches, str | bytes | Tensor) or not isinstance(batches, Sequence):
        raise TypeError(
            f"batches: got {brief(batches)} of type {type(batches).__name__}; accepted is a list of batches, each what "
            f"the loss takes; a few of a data loader: {call} with batches = list(itertools.islice(loader, 4))"
        )
    if not batches:
        raise ValueError("batches: got none; accepted are at least 2, or 1 for figures relative to its gradient")


def check_loss(loss: Any) -> None:
    """Raise a TypeError unless the loss is a function."""
    if not callable(loss) or isinstance(loss, nn.Module | type):
        raise TypeError(
            f"loss: got {brief(loss)} of type {type(loss).__name__}; accepted is a function of the model and a batch: "
            "lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"
        )


def check_draws(draws: Any, name: str = "draws") -> None:
    """Raise unless there are at least 2 draws, from which a variance can be estimated."""
    check_int(name, draws)
    if draws < 2:
        raise ValueError(f"{name}={draws}; accepted is an int of at least 2, of which a variance can be estimated")
