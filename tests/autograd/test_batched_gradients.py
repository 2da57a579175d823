"""Batches of gradients: an error that names the fix."""

import pytest
import torch
from torch import nn

import brevact
from brevact import StochBackward4bit


def by_torch(loss, leaves, factors):
    return torch.autograd.grad(loss, leaves, factors, is_grads_batched=True, retain_graph=True)


def by_vmap(loss, leaves, factors):
    return torch.func.vmap(lambda factor: torch.autograd.grad(loss, leaves, factor, retain_graph=True))(factors)


@pytest.mark.parametrize("batched", [by_torch, by_vmap])
def test_batches_of_gradients_raise_and_run_under_double_backward(batched):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)), torch.randn(128, 64)
    leaves, factors = list(model.parameters()), torch.tensor([1.0, -2.0])
    with brevact.backward_quant(StochBackward4bit):
        loss = model(x).sum()
    with pytest.raises(RuntimeError, match="one backward pass for each gradient, or set double_backward=True"):
        batched(loss, leaves, factors)
    with brevact.backward_quant(StochBackward4bit, double_backward=True):
        loss = model(x).sum()
    expected = torch.autograd.grad(loss, leaves, retain_graph=True)
    for found, single in zip(batched(loss, leaves, factors), expected, strict=True):
        torch.testing.assert_close(found[1], -2 * single)
