"""Graphs that run twice, several graphs at once, and save modes: none changes another one's saved tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import brevact
from brevact import StochBackward8bit
from tests.autograd.leaves import convolutions, every_leaf


@every_leaf
def test_two_brevitas_models_do_not_share_regions(leaf):
    import brevitas.nn as qnn
    from brevitas.quant import Int8ActPerTensorFloat

    a, b = (nn.Sequential(qnn.QuantConv2d(3, 8, 3, input_quant=Int8ActPerTensorFloat)) for _ in range(2))
    brevact.quantize_backward(a, leaf)
    with pytest.raises(ValueError, match="no backward policy"):
        brevact.restore_backward(b)
    brevact.quantize_backward(b, leaf)
    brevact.restore_backward(b)
    rows = brevact.memory_report(a, torch.randn(8, 3, 16, 16)).rows
    assert [row.layer for row in rows] == ["0"]


def gradients(model: nn.Module, loss: Tensor, **options: bool) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), **options))


def loss_of(model: nn.Module, x: Tensor, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return model(x).square().sum()


@every_leaf
def test_forwards_before_one_backward_do_not_overwrite_each_other(leaf):
    model, x = brevact.quantize_backward(convolutions(), leaf, min_numel=0), torch.randn(4, 3, 9, 9)
    expected = gradients(model, loss_of(model, x, 1))
    first = loss_of(model, x, 1)
    for scale in (100.0, 0.01):
        loss_of(model, scale * x, 2)
    assert all(map(torch.equal, gradients(model, first), expected))


@every_leaf
def test_a_second_backward_of_a_kept_graph_is_the_first(leaf):
    model, x = brevact.quantize_backward(convolutions(), leaf, min_numel=0), torch.randn(4, 3, 9, 9)
    loss = loss_of(model, x)
    first = gradients(model, loss, retain_graph=True)
    assert all(map(torch.equal, gradients(model, loss), first))


@every_leaf
def test_models_with_different_quantizers_do_not_mix(leaf):
    model, x = brevact.quantize_backward(convolutions(), leaf, min_numel=0), torch.randn(4, 3, 9, 9)
    other = brevact.quantize_backward(convolutions(), StochBackward8bit, min_numel=0)
    expected = gradients(model, loss_of(model, x, 1))
    loss = loss_of(model, x, 1)
    gradients(other, loss_of(other, x, 2))
    assert all(map(torch.equal, gradients(model, loss), expected))


@every_leaf
def test_both_save_modes_give_the_same_gradients(leaf):
    x, grads = torch.randn(4, 3, 9, 9), []
    for mode in brevact.SaveMode:
        model = brevact.quantize_backward(convolutions(), leaf, min_numel=0, save_mode=mode)
        grads.append(gradients(model, loss_of(model, x)))
    assert all(map(torch.equal, *grads))
