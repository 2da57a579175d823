"""The way of a call changes no gradient: hooks and reports around a region, save modes, keywords."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F

import brevact
from brevact import BackwardSettings, DitherBackward4bit, NearestBackward4bit, SaveMode, StochBackward2bit
from brevact.autograd import region, storage_report
from tests.autograd import ops
from tests.autograd.database_laws import are_same
from tests.crosses import taking_turns

QUANTIZERS = {each.__name__: each for each in (StochBackward2bit, NearestBackward4bit, DitherBackward4bit)}

#: What is around a region, and the save mode inside.
WAYS: dict[str, tuple[Callable[[], AbstractContextManager], SaveMode]] = {
    "identity hooks": (lambda: saved_tensors_hooks(lambda x: x, lambda x: x), SaveMode.SAVE_QUANTIZED),
    "save_on_cpu": (save_on_cpu, SaveMode.SAVE_QUANTIZED),
    "a report": (storage_report.recording, SaveMode.SAVE_QUANTIZED),
    "quantize on backward": (nullcontext, SaveMode.QUANTIZE_ON_BACKWARD),
}


def gradients(
    call: Callable[[Tensor], Tensor], x: Tensor, settings: BackwardSettings, around: AbstractContextManager
) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    parameters = list(call.parameters()) if isinstance(call, nn.Module) else []
    torch.manual_seed(1)
    with around, region(settings):
        out = call(leaf * 1)
    torch.manual_seed(2)
    return list(torch.autograd.grad(out, [leaf, *parameters], torch.randn(out.shape), allow_unused=True))


def check(make: Callable[[], Callable], shape: tuple[int, ...], quantizer: str, way: str) -> None:
    torch.manual_seed(0)
    call, x = make(), torch.randn(shape)
    state = {k: v.clone() for k, v in call.state_dict().items()} if isinstance(call, nn.Module) else {}
    settings = BackwardSettings(brevact.quantizer(QUANTIZERS[quantizer]), min_numel=0)
    expected = gradients(call, x, settings, nullcontext())
    if state:
        call.load_state_dict(state)
    around, save_mode = WAYS[way]
    found = gradients(call, x, replace(settings, save_mode=save_mode), around())
    assert all(are_same(a, b) for a, b in zip(found, expected, strict=True))


ROWS = {op.name: op for op in ops.ALL}


@pytest.mark.parametrize(("op", "quantizer", "way"), taking_turns(list(ROWS), list(QUANTIZERS), list(WAYS)))
def test_the_way_changes_no_gradient_of_an_op(op, quantizer, way):
    check(ROWS[op].make, ROWS[op].shape, quantizer, way)


def _block(activation: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), activation()),
        *(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), activation()),
    )


class Residual(nn.Module):
    """Two norms read one tensor, which is added to what comes after."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.BatchNorm2d(16)
        self.conv = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return F.relu(x + self.conv(F.silu(self.first(x)))) * self.second(x).sigmoid()


NETS: dict[str, Callable[[], nn.Module]] = {
    "conv, bn, relu": lambda: _block(nn.ReLU),
    "conv, bn, silu": lambda: _block(nn.SiLU),
    "conv, bn, hardswish in place": lambda: _block(lambda: nn.Hardswish(inplace=True)),
    "residual, bn twice on one tensor": lambda: Residual(),
    "without batch norm": lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.SiLU(), nn.Conv2d(16, 16, 3), nn.GELU()),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("net", NETS)
def test_the_way_changes_no_gradient_of_a_net(net, quantizer, way):
    check(NETS[net], (4, 3, 16, 16), quantizer, way)


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_keywords_change_no_gradient_of_a_batch_norm(quantizer):
    norm = nn.BatchNorm2d(16)

    class Spelled(nn.Module):
        def __init__(self, with_keywords: bool) -> None:
            super().__init__()
            self.norm, self.with_keywords = norm, with_keywords

        def forward(self, x: Tensor) -> Tensor:
            weight, bias = self.norm.weight, self.norm.bias
            if self.with_keywords:
                return F.batch_norm(
                    input=x, running_mean=None, running_var=None, bias=bias, weight=weight, training=True
                )
            return F.batch_norm(x, None, None, weight, bias, True, 0.1, 1e-5)

    x, settings = torch.randn(4, 16, 9, 9), BackwardSettings(brevact.quantizer(QUANTIZERS[quantizer]), min_numel=0)
    found, expected = (gradients(Spelled(each), x, settings, nullcontext()) for each in (True, False))
    assert all(are_same(a, b) for a, b in zip(found, expected, strict=True))
