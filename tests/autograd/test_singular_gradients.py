"""Gradients that are singular in what is stored are torch's: it stays in full precision."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from brevact.autograd import region
from tests.autograd.leaves import every_noisy_leaf, packs
from tests.autograd.measuring import settings


@pytest.mark.parametrize(
    "op",
    [
        lambda x: 1.0 / x,
        lambda x: x**-1,
        lambda x: x**0.5,
        lambda x: torch.ones_like(x).div_(x),
        lambda x: (x * 1).log_(),
        lambda x: (x * 1).rsqrt_(),
        lambda x: torch.special.log1p(x),
        lambda x: x.prod(1),
        lambda x: x.view(-1, 2).std(1),
        lambda x: F.normalize(x.view(-1, 2)),
        lambda x: F.cosine_similarity(x[:, ::2], x[:, 1::2]),
        lambda x: torch.logsumexp(x, -1),
    ],
)
def test_singular_gradients_are_exact(op):
    x = (torch.rand(1, 64, 8) * 10 + 0.01).squeeze(0).requires_grad_()
    weights = None
    grads = []
    for chosen in (None, settings(bit_width=2)):
        with region(chosen):
            out = op(x * 1 if chosen is None else x + 0)
        weights = torch.randn_like(out) if weights is None else weights
        grads.append(torch.autograd.grad((out * weights).sum(), x)[0])
    torch.testing.assert_close(grads[1], grads[0])


@every_noisy_leaf
@pytest.mark.parametrize("op", [lambda x: 1.0 / x, lambda x: x**0.5, lambda x: torch.logsumexp(x, -1)])
def test_singular_gradients_of_each_kind_are_exact(leaf, op):
    x = (torch.rand(64, 64) * 10 + 0.01).requires_grad_()
    weights, grads = torch.randn(64, 64), []
    for chosen in (None, packs(leaf)):
        with region(chosen):
            out = op(x + 0)
        grads.append(torch.autograd.grad((out * weights).sum(), x)[0])
    torch.testing.assert_close(grads[1], grads[0])
