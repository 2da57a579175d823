"""Modules with several names: reports and fits know each by one, and lose none of its bytes."""

from __future__ import annotations

from collections.abc import Callable

import brevitas.nn as qnn
import pytest
import torch
from torch import Tensor, nn

import brevact
from brevact import StochBackward2bit, StochBackward4bit
from brevact.injectors.proxies import names_of
from brevact.reports.memory_table import chains_of
from tests.autograd.measuring import kept_bytes
from tests.crosses import some_of


class Residual(nn.Module):
    """A block as segmentation networks have them: the activation is an attribute, and inside of the body."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.body = nn.Sequential(nn.BatchNorm2d(8), self.act, nn.Conv2d(8, 8, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.body(self.conv(x)))


class UNet(nn.Module):
    """Like MONAI's DynUNet: blocks are attributes, and also in a ModuleList and in nested skip layers."""

    def __init__(self) -> None:
        super().__init__()
        self.input_block, self.bottleneck = self.block(3, 8, 1), self.block(8, 16, 2)
        self.upsample = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.output_block = nn.Conv2d(8, 2, 1)
        self.downsamples = nn.ModuleList([self.input_block, self.bottleneck])
        self.skip_layers = nn.ModuleDict({"down": self.input_block, "next": nn.Sequential(self.bottleneck)})

    @staticmethod
    def block(channels: int, out: int, stride: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(channels, out, 3, stride, 1), nn.InstanceNorm2d(out), nn.LeakyReLU(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.output_block(self.upsample(self.skip_layers["next"](self.downsamples[0](x))))


def shared_by_two() -> nn.Sequential:
    act = nn.SiLU()
    return nn.Sequential(nn.Sequential(nn.Linear(64, 64), act), nn.Sequential(nn.Linear(64, 64), act, nn.Linear(64, 8)))


def shared_in_one() -> nn.Sequential:
    act = nn.ReLU()
    return nn.Sequential(nn.Linear(64, 64), act, nn.Linear(64, 64), act, nn.Linear(64, 8))


def shared_container() -> nn.Sequential:
    block = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU())
    return nn.Sequential(block, nn.Sequential(nn.Linear(64, 64), block))


def lstm() -> nn.Module:
    """After its first forward pass a QuantLSTM refers to the insides of its quantizers."""

    class Last(qnn.QuantLSTM):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[0]

    model = Last(32, 64, batch_first=True)
    model(torch.randn(2, 3, 32))
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual": (Residual, (2, 8, 16, 16)),
    "unet": (UNet, (2, 3, 32, 32)),
    "shared_by_two": (shared_by_two, (128, 64)),
    "shared_in_one": (shared_in_one, (128, 64)),
    "shared_container": (shared_container, (128, 64)),
    "lstm": (lstm, (32, 4, 32)),
}
all_models = pytest.mark.parametrize("name", MODELS)


def made(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    return make(), torch.randn(shape)


@all_models
def test_memory_report_has_the_bytes_of_modules_with_several_names(name):
    model, x = made(name)
    plain_bytes = kept_bytes(model, lambda: model(x))
    brevact.quantize_backward(model, StochBackward4bit)
    report = brevact.memory_report(model, x)
    assert report.plain_bytes == plain_bytes
    assert report.saved_bytes == kept_bytes(model, lambda: model(x))
    assert report.saved_bytes == sum(row.saved_bytes for row in report.rows) == sum(op.saved_bytes for op in report.ops)
    assert report.ratio > 1
    assert {op.layer for op in report.ops} <= set(names_of(model).values())
    brevact.restore_backward(model)  # parts of it are shared with other models of Brevitas


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("name", some_of(["shared_container", "residual", "unet", "shared_by_two"], quick=4))
def test_fit_stores_what_it_reports(name):
    """Each layer that packs has the width of its group, under whichever of its names a rule would match it."""
    model, x = made(name)
    wanted = kept_bytes(model, lambda: mean_square(model, x)) // 3
    policy = brevact.fit(model, [x, 2 * x + 1], mean_square, saved_bytes=wanted)
    brevact.quantize_backward(model, policy)

    def step() -> Tensor:
        with brevact.backward_quant(model):
            return mean_square(model, x)

    assert policy.report.saved_bytes <= wanted and not policy.report.note
    assert policy.report.saved_bytes == kept_bytes(model, step)
    found = {chain.source: chain for chain in chains_of(brevact.memory_report(model, x))}
    for group in policy.report.groups:
        if group.source in found and group.bit_width <= 8:
            assert found[group.source].bit_widths == (group.bit_width,)


@pytest.mark.parametrize("name", ["shared_by_two", "shared_container"])
def test_adaptive_gives_widths_to_modules_with_several_names(name):
    model, x = made(name)
    brevact.quantize_backward(model, StochBackward2bit)
    adaptive = brevact.Adaptive(model, x, mean_square, bit_width=3)
    assert adaptive.saved_bytes <= adaptive.budget_bytes
    assert adaptive.bit_widths.keys() <= set(names_of(model).values())
    assert adaptive.saved_bytes == sum(op.saved_bytes for op in brevact.memory_report(model, x, mean_square).ops)
