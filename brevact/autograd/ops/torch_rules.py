"""Gradients that differ between versions of torch: each is probed once, when first needed."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from brevact.autograd.ops.recompute import outside_regions
from brevact.private_names.of_torch import disable_modes


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
