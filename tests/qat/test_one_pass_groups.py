"""Fake quantization in one pass by several scales: of groups, of dimensions together, and of 16 bits."""

import brevitas.nn as qnn
import pytest
import torch
from brevitas.quant import Int8WeightPerChannelFloat
from brevitas.quant.mx_quant_ocp import MXInt8Act, MXInt8Weight
from brevitas.quant_tensor import QuantTensor
from torch import nn

import brevact
from brevact import LosslessBackward
from brevact.qat import fake_quantization

ROWS, FEATURES, GROUP = 24, 64, 16


@pytest.fixture
def plans(monkeypatch):
    """How kernels run each quantizer, or None."""
    found, ask = [], fake_quantization.one_pass_for
    monkeypatch.setattr(fake_quantization, "one_pass_for", lambda *args: found.append(ask(*args)) or found[-1])
    return found


def compare(make, shape, dtype=torch.float32):
    results = []
    for policy in (None, LosslessBackward):
        torch.manual_seed(0)
        model = make().to(dtype)
        if policy is not None:
            brevact.quantize_backward(model, policy, min_numel=0)
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        out = model(x)
        out = out.value if isinstance(out, QuantTensor) else out
        grad = torch.randn(out.shape, generator=generator).to(out.dtype)
        results.append([out.detach(), *torch.autograd.grad(out, (x, *model.parameters()), grad)])
    for one, other in zip(*results, strict=True):
        assert one.dtype is other.dtype and one.stride() == other.stride()
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)  # NaN of groups of zeros in float16


def test_groups_of_a_linear_layer(plans):
    """Groups of its weight and of its input, each with scales of its own."""

    def make():
        return qnn.QuantLinear(
            *(FEATURES, 32, True),
            weight_quant=MXInt8Weight,
            weight_group_size=GROUP,
            input_quant=MXInt8Act,
            input_group_size=GROUP,
            input_group_dim=-1,
        )

    compare(make, (ROWS, FEATURES))
    assert {plan and plan.plan.groups for plan in plans} == {ROWS * FEATURES // GROUP, 32 * FEATURES // GROUP}
    assert {plan and plan.plan.inner for plan in plans} == {GROUP}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_scales_of_channels_of_16_bits(kind, dtype, plans):
    def make():
        options = {"bias": False, "weight_quant": Int8WeightPerChannelFloat, "weight_bit_width": 4}
        layer = qnn.QuantLinear(FEATURES, 32, **options) if kind == "linear" else qnn.QuantConv2d(8, 16, 3, **options)
        return nn.Sequential(layer)

    compare(make, (ROWS, FEATURES) if kind == "linear" else (4, 8, 9, 9), dtype)
    assert plans and all(plan is not None and plan.plan.groups in (16, 32) for plan in plans)
