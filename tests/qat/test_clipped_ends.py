"""Integers that no op saves: the quantizer keeps one bit of each, and the gradients are the same, bit for bit."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext

import brevitas.nn as qnn
import pytest
import torch
from brevitas.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerTensorFloat,
    ShiftedUint8ActPerTensorFloat,
    Uint8ActPerTensorFloat,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import brevact
from brevact import LosslessBackward, StochBackward2bit
from brevact.autograd.saving.saved import SavedByHook
from brevact.qat import integer_codes

SHAPE = (4, 32, 16, 24)
NUMEL = 4 * 32 * 16 * 24


def quantizer(bit_width: int = 4, signed: bool = False, **options: object) -> nn.Module:
    kind, act_quant = (qnn.QuantIdentity, Int8ActPerTensorFloat) if signed else (qnn.QuantReLU, Uint8ActPerTensorFloat)
    layer = kind(act_quant=act_quant, bit_width=bit_width, collect_stats_steps=1, **options)
    with torch.no_grad():
        for _ in range(2):
            layer(0.8 * torch.ones(SHAPE))  # the scale: elements of a normal distribution beyond are clipped
    return layer


def scale_gradient(model: nn.Module, loss: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, ...]:
    """Gradients of the input and of the scale, by the same random numbers each time."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    torch.manual_seed(1)
    loss(model(x)).backward()
    (scale,) = (p.grad for name, p in model.named_parameters() if "scaling" in name)
    return x.grad, scale.clone()


def weighted(out: Tensor) -> Tensor:
    """A loss that saves nothing of the output, whose gradient differs by element and sign."""
    pooled = torch.nn.functional.adaptive_avg_pool2d(out, (4, 4))
    return (pooled * torch.linspace(-1.0, 2.0, pooled.numel()).view(pooled.shape)).sum() + out[..., ::3].sum()


def kept_bytes(model: nn.Module, x: Tensor) -> int:
    return brevact.memory_report(model, x).saved_bytes


@pytest.mark.parametrize(("bit_width", "signed"), [(4, False), (4, True), (8, True), (2, False)])
def test_integers_that_no_op_saves_take_one_bit(bit_width: int, signed: bool):
    x = torch.randn(SHAPE, requires_grad=True)
    model = nn.Sequential(quantizer(bit_width, signed), nn.AdaptiveAvgPool2d(1))
    brevact.quantize_backward(model, LosslessBackward, residual_bit_width=2)
    assert NUMEL * 3 // 8 <= kept_bytes(model, x) <= NUMEL * 3 // 8 + 64  # and a few numbers


def test_integers_that_an_op_saves_are_there_once():
    x = torch.randn(SHAPE, requires_grad=True)
    conv = qnn.QuantConv2d(32, 8, 1, bias=False, weight_quant=Int8WeightPerTensorFloat)
    model = nn.Sequential(quantizer(), conv)
    brevact.quantize_backward(model, LosslessBackward, residual_bit_width=2)
    weights = 3 * conv.weight.nbytes + 64
    assert NUMEL * 6 // 8 <= kept_bytes(model, x) <= NUMEL * 6 // 8 + weights
    report = brevact.memory_report(model, x)
    (row,) = (row for row in report.ops if row.saved_bytes == NUMEL // 2)  # of the quantizer, as its op
    assert (row.layer, row.op, row.how, row.tensor_bytes) == ("0", "fake_quantize", "exact", NUMEL * 4)


@pytest.mark.parametrize("reads_again", [False, True])
def test_integers_that_an_op_saves_as_those_of_its_source_are_there_once(reads_again: bool):
    class Reader(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            curved = nn.functional.gelu(x)
            return curved + x * x if reads_again else curved

    x = torch.randn(SHAPE, requires_grad=True)
    model = nn.Sequential(quantizer(), Reader())
    brevact.quantize_backward(model, StochBackward2bit, residual_bit_width=2)
    assert NUMEL * 6 // 8 <= kept_bytes(model, x) <= NUMEL * 6 // 8 + 64


class Surrounded(nn.Module):
    """A quantizer whose saved tensors somebody else handles."""

    def __init__(self, quantizer: nn.Module, how: str) -> None:
        super().__init__()
        self.quantizer, self.how = quantizer, how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "checkpoint":
            return checkpoint(self.quantizer, x, use_reentrant=False)
        if self.how == "inside":
            with torch.autograd.graph.save_on_cpu():
                return self.quantizer(x)
        return self.quantizer(x)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("how", ["alone", "checkpoint", "inside", "around", "reader"])
def test_gradients_are_those_of_whole_integers(how: str, signed: bool, monkeypatch: pytest.MonkeyPatch):
    x = torch.randn(SHAPE)
    model = Surrounded(quantizer(4, signed), how)
    brevact.quantize_backward(model, LosslessBackward, residual_bit_width=2)

    def loss(out: Tensor) -> Tensor:
        if how == "reader":
            with brevact.backward_quant(StochBackward2bit):
                weight = torch.zeros(8, 32, 1, 1, requires_grad=True)
                return weighted(out) + torch.nn.functional.conv2d(out, weight).sum()
        return weighted(out)

    def gradients() -> tuple[Tensor, ...]:
        with torch.autograd.graph.save_on_cpu() if how == "around" else nullcontext():
            return scale_gradient(model, loss, x)

    found = gradients()
    monkeypatch.setattr(integer_codes, "MIN_NUMEL", sys.maxsize)
    for one, other in zip(found, gradients(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("act_quant", [Int8ActPerTensorFloat, ShiftedUint8ActPerTensorFloat])
@pytest.mark.parametrize(("bit_width", "zero_point"), [(2, 1.0), (4, 5.0), (4, 11.0), (4, 15.0), (8, 0.0)])
def test_what_a_relu_set_to_zero_has_the_integer_of_the_zero_point(
    act_quant: type, bit_width: int, zero_point: float, monkeypatch: pytest.MonkeyPatch
):
    model = qnn.QuantReLU(act_quant=act_quant, bit_width=bit_width, collect_stats_steps=1)
    with torch.no_grad():
        for _ in range(2):
            model(0.8 * torch.rand(SHAPE))
    for name, value in model.named_parameters():
        if "zero_point" in name:
            value.requires_grad_(False).fill_(zero_point)  # that of a tensor with a range below zero
    brevact.quantize_backward(model, LosslessBackward, residual_bit_width=2)
    x = torch.randn(SHAPE, requires_grad=True)
    assert kept_bytes(model, x) <= NUMEL * 4 // 8 + 64  # of some, a mask of the ReLU, too
    found = scale_gradient(model, weighted, x)
    monkeypatch.setattr(integer_codes, "MIN_NUMEL", sys.maxsize)
    for one, other in zip(found, scale_gradient(model, weighted, x), strict=True):
        assert torch.equal(one, other)


def test_backward_runs_twice_and_frees_the_bits():
    def kept() -> list[SavedByHook]:
        return [each for each in gc.get_objects() if type(each) is SavedByHook]

    of_others = kept()  # tests before this one may have left a graph in a cycle
    x = torch.randn(SHAPE, requires_grad=True)
    model = brevact.quantize_backward(quantizer(), LosslessBackward, residual_bit_width=2)
    loss = weighted(model(x))
    loss.backward(retain_graph=True)
    assert len(kept()) > len(of_others)
    first = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * first)
    assert all(any(each is other for other in of_others) for each in kept())  # although the loss is still there


@pytest.mark.parametrize("signed", [False, True])
def test_scale_gradient_is_that_of_float64_but_for_its_residuals(signed: bool):
    """Unbiased: the mean over seeds is the gradient of `LosslessBackward` within five standard errors."""
    x = torch.randn(SHAPE)
    model = brevact.quantize_backward(quantizer(4, signed), LosslessBackward)
    exact = scale_gradient(model, weighted, x)
    brevact.quantize_backward(brevact.restore_backward(model), LosslessBackward, residual_bit_width=2)
    found = []
    for seed in range(64):
        model.zero_grad()
        torch.manual_seed(seed)
        leaf = x.detach().requires_grad_()
        weighted(model(leaf)).backward()
        assert torch.equal(leaf.grad, exact[0])
        (scale,) = (p.grad for name, p in model.named_parameters() if "scaling" in name)
        found.append(scale.double())
    sample = torch.stack(found)
    assert (sample.mean() - exact[1]).abs() <= 5 * sample.std() / 8
