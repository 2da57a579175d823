"""Fake quantization in one pass by several scales: of groups, of dimensions together, and of 16 bits."""

import brevitas.nn as qnn
import pytest
import torch
from brevitas.quant import Int8WeightPerChannelFloat
from brevitas.quant.mx_quant_ocp import MXInt8Act, MXInt8Weight
from torch import nn

import brevact
from brevact import LosslessBackward
from brevact.autograd.known_values import groups_of
from brevact.autograd.ops import fake_quantization
from brevact.quantizers import Layout

ROWS, FEATURES, GROUP = 24, 64, 16


@pytest.fixture
def plans(monkeypatch):
    """What is found for each quantizer: how kernels run it, or None."""
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
        grad = torch.randn(out.shape, generator=generator).to(out.dtype)
        results.append([out.detach(), *torch.autograd.grad(out, (x, *model.parameters()), grad)])
    for one, other in zip(*results, strict=True):
        assert one.dtype is other.dtype and one.stride() == other.stride()
        assert torch.equal(one, other)


def test_groups_of_a_linear_layer(plans):
    """Of its weight and of its input, each with scales of its own."""

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


def test_groups_of_channels_that_do_not_lie_together_are_of_the_ops_of_torch(plans):
    options = {"weight_quant": MXInt8Weight, "weight_group_size": GROUP}
    compare(lambda: qnn.QuantConv2d(32, 8, 3, bias=False, **options), (2, 32, 8, 8))
    assert plans and not any(plans)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_scales_of_channels_of_16_bits(kind, dtype, plans):
    def make():
        options = {"bias": False, "weight_quant": Int8WeightPerChannelFloat, "weight_bit_width": 4}
        layer = qnn.QuantLinear(FEATURES, 32, **options) if kind == "linear" else qnn.QuantConv2d(8, 16, 3, **options)
        return nn.Sequential(layer)

    compare(make, (ROWS, FEATURES) if kind == "linear" else (4, 8, 9, 9), dtype)
    assert plans and all(plan is not None and plan.plan.groups in (16, 32) for plan in plans)


def test_groups_of_says_how_numbers_lie_in_memory():
    layout = Layout.of(torch.empty(3, 4, 5, 6))
    of = {
        (): (360, 1),
        (1, 1, 1): (360, 1),
        (4, 1, 1): (30, 4),
        (3, 4, 1, 1): (30, 12),
        (4, 5, 1): (6, 20),
        (3, 4, 5, 6): (1, 360),
        (3, 1, 5, 1): None,  # no neighbours
    }
    for sizes, expected in of.items():
        assert groups_of(layout, torch.Size(sizes), torch.Size(())) == expected
        assert groups_of(layout, torch.Size(()), torch.Size(sizes)) == expected
    assert groups_of(layout, torch.Size((4, 1, 1)), torch.Size((3, 1, 1, 1))) is None  # of other dimensions each
    last = Layout.of(torch.empty(3, 4, 5, 6).to(memory_format=torch.channels_last))
    assert groups_of(last, torch.Size((4, 1, 1))) == (1, 4)
    assert groups_of(last, torch.Size((3, 4, 1, 1))) is None and groups_of(last, torch.Size((5, 6))) == (4, 30)
