"""Lossless settings keep no more than torch: what a mask takes, it saves elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import brevact
from brevact import LosslessBackward

MAP, ROWS, SEQUENCE = (4, 3, 32, 32), (128, 64), (8, 32, 64)


class Residual(nn.Module):
    def __init__(self, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, 16, 3, padding=1), activation()
        self.branch = convolutions(16, activation)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.last(x + self.branch(x))


class Rectified(nn.Module):
    """The outputs of a recurrent layer, rectified."""

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


@pytest.mark.xfail(
    strict=True,
    reason="a rectifier keeps its mask, one bit an element, before it is known that the next layer keeps its output",
)
@pytest.mark.parametrize("net", READ_AGAIN)
def test_lossless_keeps_no_more_than_torch_where_layers_read_each_rectifier(net):
    make, shape = READ_AGAIN[net]
    check(make(), torch.randn(shape))


@pytest.mark.parametrize("net", READ_AGAIN)
def test_lossless_keeps_at_most_a_mask_more_than_torch(net):
    make, shape = READ_AGAIN[net]
    model = make()
    brevact.quantize_backward(model, LosslessBackward)
    report = brevact.memory_report(model, torch.randn(shape))
    assert report.saved_bytes <= report.plain_bytes * (1 + 1 / 32)  # one bit beside each float32
