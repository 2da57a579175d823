"""Fake quantization in one pass of 16-bit activations, which every op rounds, and under autocast."""

import pytest
import torch
from torch import nn

import brevact
from brevact import LosslessBackward, StochBackward2bit
from tests.qat.test_one_pass import CHANNELS, SHAPES, activation, gradients, layer

TYPES = (torch.bfloat16, torch.float16)


def compare(make, x, grad, policy=LosslessBackward):
    expected, found = (
        gradients(make(), x, grad),
        gradients(brevact.quantize_backward(make(), policy, min_numel=0), x, grad),
    )
    for one, other in list(zip(expected, found, strict=True))[: None if policy is LosslessBackward else 2]:
        assert one.dtype is other.dtype
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("name", ["uint4", "int8", "narrow", "per_channel", "constant"])
@pytest.mark.parametrize("dtype", TYPES)
def test_layers_of_16_bits_are_those_of_brevitas(dtype, name, relu):
    x, grad = activation(SHAPES["ragged"]).to(dtype), activation(SHAPES["ragged"], 5).to(dtype)
    for policy in (LosslessBackward, StochBackward2bit):
        compare(lambda: layer(name, relu=relu).to(dtype), x, grad, policy)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("name", ["uint4", "int8", "per_channel"])
@pytest.mark.parametrize("dtype", TYPES)
def test_activations_of_16_bits_with_float32_scales_as_under_autocast(dtype, name, relu):
    x = activation(SHAPES["blocks"]).to(dtype)
    out = layer(name, relu=relu)(x)
    compare(lambda: layer(name, relu=relu), x, activation(SHAPES["blocks"], 5).to(out.dtype))


def test_a_net_under_autocast():
    results = []
    for policy in (None, LosslessBackward):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, CHANNELS, 3), layer("uint4", relu=True), nn.Conv2d(CHANNELS, 4, 3))
        if policy is not None:
            brevact.quantize_backward(net, policy)
        images = torch.randn(4, 3, 20, 20, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(images).float().square().mean()
        results.append([loss, *torch.autograd.grad(loss, (images, *net.parameters()))])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
