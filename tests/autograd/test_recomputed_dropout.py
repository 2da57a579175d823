"""Dropout in checkpoints: the masks of the forward pass, whatever regions draw."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import brevact
import brevact.nn as bnn
from brevact import StochBackward2bit, StochBackward2bit4bitMix, StochBackward8bit
from tests.autograd.leaves import every_noisy_leaf


class Block(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.a, self.b, self.d, self.e = nn.Linear(64, 64), nn.Linear(64, 64), nn.Dropout(0.5), nn.Dropout(0.5)
        self.reentrant = reentrant

    def body(self, x: Tensor) -> Tensor:
        return self.e(self.b(self.d(self.a(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_is_recomputed_as_it_was(reentrant):
    torch.manual_seed(0)
    plain, packed = Block(None), Block(reentrant)
    packed.load_state_dict(plain.state_dict())
    brevact.quantize_backward(packed, StochBackward8bit.let(bit_width=24, min_numel=0))
    x = torch.randn(32, 64, requires_grad=True)
    grads = []
    for model in (plain, packed):
        torch.manual_seed(1)
        model(x).square().sum().backward()
        grads.append([x.grad.clone(), *(p.grad for p in model.parameters())])
        x.grad = None
    for grad, reference in zip(*grads, strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-4, atol=1e-4)


@every_noisy_leaf
def test_dropout_is_recomputed_as_it_was_with_each_kind(leaf):
    plain, packed = Block(None), Block(True)
    packed.load_state_dict(plain.state_dict())
    brevact.quantize_backward(packed, leaf, min_numel=0)
    x, grads = torch.randn(64, 64, requires_grad=True), []
    for model in (plain, packed):
        torch.manual_seed(1)
        model(x).square().sum().backward()  # of linear layers: x.grad depends on nothing that is rounded
        grads.append(x.grad)
        x.grad = None
    assert torch.equal(*grads)


@pytest.mark.parametrize("leaf", [StochBackward2bit, StochBackward2bit4bitMix], ids=lambda leaf: leaf.__name__)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_with_regions_of_their_own_recompute_the_same_dropout(leaf, use_reentrant):
    masks = []

    class Noted(nn.Module):
        def forward(self, x):
            masks.append(nn.functional.dropout(torch.ones_like(x)))
            return x * masks[-1]

    torch.manual_seed(0)
    quant = {"weight_quant": None, "act_quant": leaf.let(min_numel=0)}
    blocks = [nn.Sequential(bnn.QuantLinear(64, 64, bias=True, **quant), Noted()) for _ in range(3)]
    x = torch.randn(64, 64, requires_grad=True)
    for _ in range(2):
        masks.clear()
        y = x
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=use_reentrant)
        forward = list(masks)
        y.square().sum().backward()
        assert len(masks) == 6 and all(map(torch.equal, masks[3:], reversed(forward)))
