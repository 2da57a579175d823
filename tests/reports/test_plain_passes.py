"""Passes at full precision that hold nothing in memory, or on the host: the same bytes and gradients as others."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint_sequential

import brevact
from brevact.autograd import regions_disabled
from brevact.injectors.proxies import names_of
from brevact.reports.gradient_noise import gradients, plain_gradients
from brevact.reports.in_place import in_place
from brevact.reports.memory import _measure, _measured_plain
from brevact.reports.step import peak_of, step_of
from tests.reports.test_in_place import collecting

IMAGES, TOKENS, VOLUMES = torch.randn(2, 3, 12, 12), torch.randn(4, 16, 32), torch.randn(1, 1, 8, 8, 8)


class Calls(nn.Module):
    def __init__(self, layer: nn.Module, code) -> None:
        super().__init__()
        self.layer, self.code = layer, code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.layer, x)


def conv_net() -> nn.Sequential:
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2), nn.Conv2d(8, 8, 3)
    return nn.Sequential(*layers, nn.SiLU())


def checkpoints() -> nn.Module:
    model = conv_net()
    model.forward = partial(checkpoint_sequential, model, 2, use_reentrant=False)
    return nn.Sequential(model)


def attend(layer: nn.Module, x: Tensor) -> Tensor:
    query, key, value = layer(x).view(4, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)  # views of one tensor
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def cast(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return layer(x)


def penalize(layer: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    try:
        (grad,) = torch.autograd.grad(layer(x).exp().sum(), x, create_graph=True)
    except Exception:  # as programs do that log and go on
        grad = x
    return layer(x) + grad


def branch(layer: nn.Module, x: Tensor) -> Tensor:
    out = layer(x).tanh()
    return out.expand(2, *out.shape) * out if out.detach().numpy().mean() < 1 else out


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)


def recur(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)[0]


MODELS = {
    "conv net": (conv_net, IMAGES),
    "encoder": (encoder, TOKENS),
    "attention": (lambda: Calls(nn.Linear(32, 96), attend), TOKENS),
    "lstm": (lambda: Calls(nn.LSTM(32, 16, 2, batch_first=True), recur), TOKENS),
    "gru": (lambda: Calls(nn.GRU(32, 16, batch_first=True), recur), TOKENS),
    "volumes": (lambda: nn.Sequential(nn.Conv3d(1, 4, 3), nn.InstanceNorm3d(4), nn.LeakyReLU()), VOLUMES),
    "autocast": (lambda: Calls(encoder(), cast), TOKENS),
    "checkpoints": (checkpoints, IMAGES),
    "quantized": (collecting, IMAGES),
    "backward in forward": (lambda: Calls(nn.Linear(32, 32), penalize), TOKENS),
    "control flow": (lambda: Calls(nn.Linear(32, 32), branch), TOKENS),
}


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_held_and_all_is_the_same(name, monkeypatch):
    torch.manual_seed(0)
    make, x = MODELS[name]
    model = make()
    with regions_disabled():
        run, names = (lambda model: square(model, x)), names_of(model)
        held, unheld = (measure(model, run, names) for measure in (_measure, _measured_plain))
    assert held == unheld and sum(op.saved_bytes for op in held)
    with in_place(model):
        expected = gradients(model, x, square, 3)
        monkeypatch.setattr(Tensor, "is_cpu", False)  # so that tensors take the way of a GPU's
        assert all(map(torch.equal, expected, plain_gradients(model, x, square, 3)))


def test_passes_take_the_memory_of_inference():
    """Twenty layers save 40 tensors of 1 MiB; in a pass that holds nothing a few are there at a time."""
    layers = (layer for _ in range(20) for layer in (nn.Linear(64, 64), nn.SiLU()))
    model, x = nn.Sequential(*layers), torch.randn(4096, 64)
    steps = {
        "plain": step_of(model, x, square, packs=False),
        "counted": lambda: _measured_plain(model, lambda model: square(model, x), names_of(model)),
    }
    peaks = {name: peak_of(step, torch.device("cpu")) for name, step in steps.items()}
    assert peaks["plain"] > 40 * x.nbytes
    assert peaks["counted"] < 5 * x.nbytes


@pytest.mark.parametrize("rows", [64, 512])
def test_a_large_parameter_that_is_written_to_is_named(rows):
    """Small ones, such as scales that collect statistics, are copied and put back."""
    model = nn.Sequential(nn.Embedding(rows, 64, max_norm=1.0))
    before = model[0].weight.detach().clone()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        brevact.memory_report(model, torch.arange(rows))
    assert torch.equal(model[0].weight, before) is (rows == 64)
    assert bool(caught) is (rows == 512)
    assert all("the forward pass of the model writes into 0.weight, of which" in str(each.message) for each in caught)
