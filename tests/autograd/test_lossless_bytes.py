"""Lossless settings keep no more bytes than torch, masks included."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from brevact import LosslessBackward
from brevact.autograd import BackwardSettings, region
from brevact.quantizers import LosslessQuantizer

MAP, ROWS, SEQUENCE = (4, 3, 32, 32), (128, 64), (8, 32, 64)


class Residual(nn.Module):
    def __init__(self, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, 16, 3, padding=1), activation()
        self.branch = convolutions(16, activation)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.last(x + self.branch(x))


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


class Rectified(nn.Module):
    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layer = layer(64, 64, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0].relu()


def convolutions(channels: int, activation: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), activation()),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), activation()),
    )


def inverted_residual(activation: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 1), nn.BatchNorm2d(32), activation()),
        *(nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.BatchNorm2d(32), activation()),
        *(nn.Conv2d(32, 8, 1), nn.BatchNorm2d(8)),
    )


def perceptron(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), *between, nn.Linear(128, 64))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv, bn, relu twice": (lambda: convolutions(3, nn.ReLU), MAP),
    "conv, bn, relu in place twice": (lambda: convolutions(3, lambda: nn.ReLU(True)), MAP),
    "residual relu": (lambda: Residual(nn.ReLU), MAP),
    "residual relu6": (lambda: Residual(nn.ReLU6), MAP),
    **{
        f"inverted residual {each.__name__}": (lambda each=each: inverted_residual(each), MAP)
        for each in (nn.ReLU6, nn.Hardswish, nn.Hardtanh, nn.SiLU, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.Sigmoid, nn.Mish)
    },
    "relu and dropout": (lambda: perceptron(nn.ReLU(), nn.Dropout(0.2)), ROWS),
    "gelu and dropout": (lambda: perceptron(nn.GELU(), nn.Dropout(0.2)), ROWS),
    "glu": (lambda: nn.Sequential(nn.Linear(64, 256), nn.GLU(), nn.Linear(128, 64)), ROWS),
    "softmax": (lambda: perceptron(nn.Softmax(-1)), ROWS),
    "transformer relu": (lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), SEQUENCE),
    "transformer gelu": (
        lambda: nn.TransformerEncoderLayer(64, 4, 128, activation="gelu", batch_first=True, norm_first=True),
        SEQUENCE,
    ),
    "GRU": (lambda: Rectified(nn.GRU), SEQUENCE),
    "LSTM": (lambda: Rectified(nn.LSTM), SEQUENCE),
}
#: Nets in which all outputs of a rectifier, which torch keeps for it, are inputs of layers, which keep them as well.
READ_AGAIN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv, bn, relu twice, and a conv": (
        lambda: nn.Sequential(*convolutions(3, nn.ReLU), nn.Conv2d(16, 8, 1)),
        MAP,
    ),
    "flattened": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16384, 8)),
        MAP,
    ),
    "viewed": (lambda: perceptron(nn.ReLU(), nn.Unflatten(0, (4, 32))), ROWS),
    "transposed": (
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), Transposed(), nn.Conv1d(64, 8, 1)),
        SEQUENCE,
    ),
    "leaky relu in place": (lambda: inverted_residual(lambda: nn.LeakyReLU(0.1, True)), MAP),
    "perceptron": (lambda: perceptron(nn.ReLU()), ROWS),
    "transformer without dropout": (
        lambda: nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True),
        SEQUENCE,
    ),
}


def check(model: nn.Module, x: Tensor) -> None:
    brevact.quantize_backward(model, LosslessBackward)
    report = brevact.memory_report(model, x)
    assert 0 < report.saved_bytes <= report.plain_bytes


@pytest.mark.parametrize("net", NETS)
def test_lossless_keeps_no_more_than_torch(net):
    make, shape = NETS[net]
    check(make(), torch.randn(shape))


@pytest.mark.parametrize("net", READ_AGAIN)
def test_lossless_keeps_no_more_than_torch_where_layers_read_each_rectifier(net):
    make, shape = READ_AGAIN[net]
    check(make(), torch.randn(shape))


def relu_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.LeakyReLU(0.1, True), nn.Linear(128, 64)
    )


def gradients(model: nn.Module, x: Tensor, **options: bool) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), list(model.parameters()), **options))


@pytest.mark.parametrize("net", READ_AGAIN)
def test_gradients_are_those_of_torch_where_layers_read_each_rectifier(net):
    make, shape = READ_AGAIN[net]
    model, x = make(), torch.randn(shape)
    expected = gradients(model, x)
    brevact.quantize_backward(model, LosslessBackward.let(min_numel=0))
    assert all(map(torch.equal, gradients(model, x), expected))


@pytest.mark.parametrize("shape", [(32, 64), (4, 8, 64)])
def test_gradients_are_those_of_torch_where_masks_are_given_up(shape):
    model, x = relu_net(), torch.randn(shape)
    expected = gradients(model, x)
    brevact.quantize_backward(model, LosslessBackward.let(min_numel=0))
    assert all(map(torch.equal, gradients(model, x), expected))
    loss = model(x).square().sum()
    for _ in range(2):
        found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("chosen", [LosslessBackward, BackwardSettings(LosslessQuantizer())])
def test_a_factor_times_itself_adds_its_gradients_in_the_order_of_torch(chosen):
    x, weights = torch.randn(2, 128, 64, requires_grad=True), torch.randn(128, 64)

    def gradient(context) -> Tensor:
        with context:
            factor = x[0] * x[1]
            out = factor * factor + factor * x[1]
        return torch.autograd.grad(out, x, weights)[0]

    with_region = region(chosen) if isinstance(chosen, BackwardSettings) else brevact.backward_quant(chosen)
    assert torch.equal(gradient(with_region), gradient(nullcontext()))


def test_an_output_that_a_layer_keeps_may_not_change_before_backward():
    x, weight = torch.randn(32, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    with brevact.backward_quant(LosslessBackward):
        y = (x * 1).relu()
        out = y @ weight
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("change", [lambda y: y.add_(1), lambda y: y.mul_(2), lambda y: y[:4].zero_()])
def test_a_mask_outlives_a_change_of_the_output_that_a_layer_keeps(change):
    """Plain PyTorch refuses, as it keeps the output for the rectifier; a mask has the signs before the change."""
    x, weight = torch.randn(32, 64, requires_grad=True), torch.randn(64, 64)
    with brevact.backward_quant(LosslessBackward.let(min_numel=0)):
        y = (x * 1).relu()
        change(y)
        out = F.linear(y, nn.Parameter(weight))
    grad = torch.autograd.grad(out.sum(), x)[0]
    z = x.detach().relu().requires_grad_()
    w = z * 1
    change(w)
    expected = torch.autograd.grad(F.linear(w, weight).sum(), z)[0] * (x > 0)
    assert torch.equal(grad, expected)
