"""Chains of ops that backward records again, from a weight or from the one tensor that they need."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from brevact.autograd import known_values
from brevact.autograd.ops.base import Saving, load, save
from brevact.autograd.saved import Keeper
from brevact.private_names.of_torch import DisableTorchFunction, disable_modes


@contextmanager
def outside_regions(device: torch.device) -> Iterator[None]:
    """Record a graph on the backward's device as if no region, hooks or autocast were active."""
    with (
        torch.enable_grad(),
        DisableTorchFunction(),
        torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x),
        nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False),
    ):
        yield


def gradients_of(
    compute: Callable[..., Tensor], tensors: list[Tensor], needs: tuple[bool, ...], grad: Tensor
) -> list[Tensor | None]:
    leaves = [x.detach().requires_grad_(needed) for x, needed in zip(tensors, needs, strict=True)]
    with outside_regions(grad.device):
        found = iter(torch.autograd.grad(compute(*leaves), [x for x in leaves if x.requires_grad], grad))
    return [next(found) if needed else None for needed in needs]


class _OfWeight(Saving):
    is_brevact = False  # its result is computed from weights

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        save(ctx, exact=tensors)
        ctx.compute = compute
        out = compute(*tensors)
        if out.shape == tensors[0].shape:  # statistics are small: saved unpacked
            known_values.register(out, tuple(x.detach() for x in tensors), known_values.Recomputed(compute, out.nbytes))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *gradients_of(ctx.compute, load(ctx), ctx.needs_input_grad[1:], grad)


class _OfQuotient(Saving):
    @staticmethod
    def forward(ctx: Any, region: Keeper, compute: Callable[..., Tensor], x: Tensor, scale: Tensor) -> Tensor:
        quotient = x / scale
        save(ctx, exact=(quotient, scale))
        ctx.compute = compute
        out = compute(quotient, scale)
        known_values.register(out, (quotient, scale.detach()), known_values.Recomputed(compute, out.nbytes))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        quotient, scale = load(ctx)
        needs_x, needs_scale = ctx.needs_input_grad[2:]
        through, of_scale = gradients_of(ctx.compute, [quotient, scale], (True, needs_scale), grad)
        assert through is not None
        if of_scale is not None:
            of_scale = of_scale + (-through * (quotient / scale)).sum_to_size(scale.shape)
        return None, None, through / scale if needs_x else None, of_scale


def compute_from_weight(region: Keeper, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Compute a function of a weight, the first tensor; backward reruns ``compute``: no random numbers, no state."""
    with DisableTorchFunction():
        return region.apply_to_weight(_OfWeight, compute, *tensors)


def compute_from_quotient(region: Keeper, compute: Callable[..., Tensor], x: Tensor, scale: Tensor) -> Tensor:
    """Compute a function of x / scale, saving only the quotient, unpacked; ``compute``: no random numbers, no state."""
    with DisableTorchFunction():
        return region.apply(_OfQuotient, compute, x, scale)


@functools.cache
def clamp_passes_bounds() -> bool:
    """Return whether ``clamp`` passes the gradient of an element equal to a bound: in torch 2.13, not in 2.15."""
    return _gradient(lambda x: x.clamp(0.0, 1.0), 0.0) == 1.0


@functools.cache
def fmax_shares_ties() -> bool:
    """Return whether equal elements share the gradient of ``fmax`` and ``fmin``: in torch 2.15, not in 2.13."""
    return _gradient(torch.fmax, 1.0, 1.0) == 0.5


def _gradient(function: Callable[..., Tensor], *values: float) -> float:
    with disable_modes(), torch.inference_mode(False), outside_regions(torch.device("cpu")):
        numbers = [torch.tensor(value, device="cpu", dtype=torch.float32).requires_grad_() for value in values]
        return float(torch.autograd.grad(function(*numbers), numbers[0])[0])
