"""Fake quantization by torch's own ops: its integers are kept, and gradients are torch's to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    FakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    default_fused_per_channel_wt_fake_quant,
)
from torch.nn import functional as F

import brevact
from brevact import LosslessBackward

QINT8 = {"quant_min": -128, "quant_max": 127, "dtype": torch.qint8, "qscheme": torch.per_tensor_symmetric}
KINDS: dict[str, Callable[[], nn.Module]] = {
    "unsigned": lambda: FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255),
    "signed": lambda: FakeQuantize(observer=MovingAverageMinMaxObserver, **QINT8),
    "reduced": lambda: FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=127),
    "four bits": lambda: FakeQuantize(observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=15),
    "a channel": lambda: FakeQuantize(
        observer=MovingAveragePerChannelMinMaxObserver, **{**QINT8, "qscheme": torch.per_channel_symmetric}, ch_axis=1
    ),
    "fused": lambda: FusedMovingAvgObsFakeQuantize(quant_min=0, quant_max=255),
}


class Block(nn.Module):
    """Two layers whose inputs and weights are fake-quantized, as `torch.ao.nn.qat` has them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)])
        self.inputs = nn.ModuleList([KINDS[kind]() for _ in self.layers])
        self.weights = nn.ModuleList([default_fused_per_channel_wt_fake_quant() for _ in self.layers])

    def forward(self, x: Tensor) -> Tensor:
        for layer, of_input, of_weight in zip(self.layers, self.inputs, self.weights, strict=True):
            x = F.conv2d(of_input(x), of_weight(layer.weight), layer.bias, padding=1).relu()
        return x


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    out = model(leaf * 1)
    return [out, *torch.autograd.grad(out.square().sum(), [leaf, *model.parameters()]), *model.buffers()]


@pytest.mark.parametrize("kind", KINDS)
def test_lossless_is_torch_to_the_last_bit_and_keeps_integers(kind):
    model, x = Block(kind), torch.randn(4, 4, 16, 16)
    plain = copy.deepcopy(model)
    brevact.quantize_backward(model, LosslessBackward.let(min_numel=0))
    for _ in range(3):  # scales move from step to step
        assert all(map(torch.equal, step(model, x), step(plain, x)))
    report = brevact.memory_report(model, x.clone().requires_grad_())
    bits = (model.inputs[0].quant_max - model.inputs[0].quant_min).bit_length()
    kept = [row for row in report.ops if row.op.startswith("conv") and row.how == "exact" and row.saved_bytes > 1024]
    assert kept and all(8 * row.saved_bytes <= bits * row.tensor_bytes / 4 + 64 * 8 for row in kept)


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_stores_less_and_no_weight(kind):
    model, x = Block(kind), torch.randn(4, 4, 32, 32, requires_grad=True)
    report = brevact.memory_report(brevact.quantize_backward(model), x)
    assert report.saved_bytes < report.plain_bytes / 3
    plain, found = step(brevact.restore_backward(copy.deepcopy(model)), x.detach()), step(model, x.detach())
    assert torch.equal(plain[0], found[0])


def test_quantizers_that_are_off_are_plain():
    model, x = Block("fused"), torch.randn(4, 4, 16, 16)
    for quantizer in model.inputs:
        quantizer.disable_fake_quant()
    plain = copy.deepcopy(model)
    brevact.quantize_backward(model, LosslessBackward.let(min_numel=0))
    assert all(map(torch.equal, step(model, x), step(plain, x)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_run_as_before(dtype):
    x = torch.randn(64, 64, dtype=dtype, requires_grad=True)
    with brevact.backward_quant(LosslessBackward.let(min_numel=0)):
        try:
            out = torch.fake_quantize_per_tensor_affine(x * 1, 0.1, 3, 0, 255)
        except RuntimeError:  # a type that torch's op does not take
            return
    expected = torch.fake_quantize_per_tensor_affine(x * 1, 0.1, 3, 0, 255)
    assert torch.equal(out, expected)
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), x), torch.autograd.grad(expected.sum(), x)))


def test_infinite_values_and_large_ranges():
    x = torch.randn(64, 64)
    x[0, 0], x[1, 1] = float("inf"), -float("inf")
    leaf, weight = x.requires_grad_(), torch.randn(64, 64, requires_grad=True)
    found = []
    for policy in (LosslessBackward.let(min_numel=0), None):
        with brevact.backward_quant(policy):
            for high in (255, 65535):
                out = torch.fake_quantize_per_tensor_affine(leaf * 1, 0.05, 7, 0, high) @ weight
                found += torch.autograd.grad(out.sum(), [leaf, weight])
    assert all(map(torch.equal, found[: len(found) // 2], found[len(found) // 2 :]))


@pytest.mark.parametrize("scale", [0.0, 1e-45, 0.1, 1e37, 3e38])
@pytest.mark.parametrize("zero_point", [torch.int32, torch.float32])
def test_scales_and_zero_points_of_every_size(scale, zero_point):
    """Per channel; products of integers with the largest scales are infinite, and zero points may be no integers."""
    x, weight = torch.randn(8, 64, requires_grad=True), torch.randn(64, 8, requires_grad=True)
    scales = torch.full((64,), scale) * torch.linspace(0, 1, 64)
    zeros = torch.full((64,), 3.3 if zero_point is torch.float32 else 3).to(zero_point)
    found = []
    for policy in (LosslessBackward.let(min_numel=0), None):
        with brevact.backward_quant(policy):
            out = torch.fake_quantize_per_channel_affine(x * 1, scales, zeros, 1, -8, 7) @ weight
            found += torch.autograd.grad(out.sum(), [x, weight])
    assert all(torch.allclose(a, b, 0, 0, equal_nan=True) for a, b in zip(found[:2], found[2:], strict=True))
