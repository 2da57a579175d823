"""Fake quantizers of torchao in a region: integers are kept, weights recomputed, gradients torchao's own."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import brevact
from brevact import LosslessBackward

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    qat = pytest.importorskip("torchao.quantization.qat", reason="not installed: torchao (pip install torchao)")

from torchao.quantization import quantize_

from brevact.qat.torch_fake_quantization import FAKE_QUANTIZATION

_TOKENS = {"dtype": torch.int8, "granularity": "per_token", "is_symmetric": False}
_GROUPS = {"dtype": torch.int4, "group_size": 32}
CONFIGS: dict[str, Callable[[], dict[str, object]]] = {
    "8da4w": lambda: {
        "activation_config": qat.IntxFakeQuantizeConfig(**_TOKENS),
        "weight_config": qat.IntxFakeQuantizeConfig(**_GROUPS),
    },
    "4 bits a group": lambda: {"weight_config": qat.IntxFakeQuantizeConfig(**_GROUPS)},
    "asymmetric groups": lambda: {"weight_config": qat.IntxFakeQuantizeConfig(**_GROUPS, is_symmetric=False)},
    "8 bits a channel": lambda: {
        "weight_config": qat.IntxFakeQuantizeConfig(torch.int8, "per_channel", is_symmetric=True)
    },
}


def net(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    quantize_(model.to(dtype), qat.QATConfig(**CONFIGS[kind](), step="prepare"))
    return model


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    loss = model(leaf * 1).square().mean()
    return [loss, *torch.autograd.grad(loss, [leaf, *model.parameters()])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CONFIGS)
def test_lossless_is_torchao_to_the_last_bit_and_keeps_no_weight(kind, dtype):
    plain, x = net(kind, dtype), torch.randn(8, 64, 64, dtype=dtype)
    model = brevact.quantize_backward(copy.deepcopy(plain), LosslessBackward.let(min_numel=0))
    assert all(map(torch.equal, step(model, x), step(plain, x)))
    report = brevact.memory_report(model, x, lambda model, x: model(x).square().mean())
    quantized = [row for row in report.ops if row.layer.endswith("weight_fake_quantizer")]
    groups = sum(p.numel() for p in model.parameters() if p.dim() == 2) // 32
    assert sum(row.saved_bytes for row in quantized) <= groups * 8  # a scale and a zero point of 4 bytes
    if kind == "8da4w":  # the codes, a mask, and scales and zero points of tokens
        kept = [row for row in report.ops if row.op == "linear" and row.layer in ("2", "4")]
        codes = 8 * 64 * (128 + 64)
        assert kept and sum(row.saved_bytes for row in kept) <= codes + 4 * 8 * 64 * 8 + 8 * 1024


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_default_stores_less_and_losses_are_equal(kind):
    plain, x = net(kind), torch.randn(32, 64, 64)
    model = brevact.quantize_backward(copy.deepcopy(plain))
    expected, found = step(plain, x), step(model, x)
    assert torch.equal(found[0], expected[0])
    assert brevact.memory_report(model, x, lambda model, x: model(x).square().mean()).ratio > 6
    difference = [(a - b).square().sum() for a, b in zip(found[2:], expected[2:], strict=True)]
    assert sum(difference) < 0.3**2 * sum(b.square().sum() for b in expected[2:])


def test_a_step_in_a_region_and_twice_through_one_graph():
    plain, x = net("8da4w"), torch.randn(8, 64, 64)
    model = brevact.quantize_backward(copy.deepcopy(plain), LosslessBackward.let(min_numel=0))
    expected = step(plain, x)
    with brevact.backward_quant(model):  # backward, too
        assert all(map(torch.equal, step(model, x), expected))
    leaf = x.clone().requires_grad_()
    loss = model(leaf * 1).square().mean()
    for _ in range(2):
        found = torch.autograd.grad(loss, [leaf, *model.parameters()], retain_graph=True)
        assert all(map(torch.equal, found, expected[1:]))


def test_learned_scales_have_their_gradients():
    config = qat.IntxFakeQuantizeConfig(torch.int4, group_size=32, is_dynamic=False, range_learning=True)
    plain = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
    quantize_(plain, qat.QATConfig(weight_config=config, step="prepare"))
    x = torch.randn(8, 16, 64)
    qat.initialize_fake_quantizers(plain, (x,))
    model = brevact.quantize_backward(copy.deepcopy(plain), LosslessBackward.let(min_numel=0))
    assert len(list(plain.parameters())) > 4
    assert all(map(torch.equal, step(model, x), step(plain, x)))


def test_quantizers_that_are_off_and_changed_weights():
    plain, x = net("8da4w"), torch.randn(8, 64, 64)
    for module in plain.modules():
        if isinstance(module, qat.FakeQuantizerBase):
            module.enabled = False
    model = brevact.quantize_backward(copy.deepcopy(plain), LosslessBackward.let(min_numel=0))
    assert all(map(torch.equal, step(model, x), step(plain, x)))
    model = brevact.quantize_backward(net("4 bits a group"), LosslessBackward.let(min_numel=0))
    loss = model(x.requires_grad_()).square().mean()
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_replaced_is_there():
    import importlib

    module, name = FAKE_QUANTIZATION
    assert callable(getattr(importlib.import_module(module), name))


def test_tensors_below_min_numel_and_regions_without_a_quantizer_run_as_before():
    plain, x = net("8da4w"), torch.randn(2, 2, 64)
    for policy in (brevact.DEFAULT, {"*": None}):
        model = brevact.quantize_backward(copy.deepcopy(plain), policy)
        assert torch.equal(step(model, x)[0], step(plain, x)[0])
