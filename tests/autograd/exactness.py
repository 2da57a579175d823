"""Checks of functions whose gradients in a region are torch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from brevact.autograd import region
from tests.autograd.measuring import settings, watch_saved

MAP = (3, 4, 12, 12)
INDEX = torch.randint(0, 12, (3, 4, 12, 5), generator=torch.Generator().manual_seed(0))
MASK = torch.rand(MAP, generator=torch.Generator().manual_seed(0)) > 0.5
OTHER = torch.randn(MAP, generator=torch.Generator().manual_seed(0))


def run_exactly(function: Callable[..., Tensor], inputs: list[Tensor], bit_width: int | None, weights=()):
    """Output, gradients of a weighted sum, and saved tensors."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    chosen = None if bit_width is None else settings(bit_width=bit_width)
    activations = [x.clone() for x in leaves]
    with watch_saved() as saved, region(chosen):
        out = function(*activations)
    factor = torch.arange(1.0, out.numel() + 1).sin().view(out.shape).to(out.dtype)
    return out.detach(), torch.autograd.grad((out * factor).sum(), [*leaves, *weights]), saved


def assert_exact(function: Callable[..., Tensor], *inputs: Tensor):
    """Compare a run at one bit per element with torch; return the saved tensors."""
    expected_out, expected, _ = run_exactly(function, list(inputs), None)
    out, grads, saved = run_exactly(function, list(inputs), 1)
    assert torch.equal(out, expected_out) and out.stride() == expected_out.stride()
    for grad, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, reference, equal_nan=True)
    return saved


def assert_same_error(call: Callable[..., object], *leaves: Tensor) -> None:
    with pytest.raises(Exception) as expected:
        call(*leaves)
    with pytest.raises(type(expected.value)) as raised, region(settings()):
        call(*leaves)
    assert str(raised.value).split("\n")[0] == str(expected.value).split("\n")[0]
