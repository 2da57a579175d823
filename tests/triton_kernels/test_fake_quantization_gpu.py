"""Fake quantization by compiled kernels on a real device: stock Brevitas' bits on that device, and nothing waits."""

from __future__ import annotations

import contextlib

import brevitas.nn as qnn
import pytest
import torch
from brevitas.quant import Int8WeightPerChannelFloat, Uint8ActPerTensorFloat
from torch import nn

import brevact
from brevact import LosslessBackward, StochBackward2bit
from brevact.triton_kernels.launch import Program
from tests.qat.test_one_pass import CHANNELS, LAYERS, SHAPES, activation, gradients, layer

pytestmark = pytest.mark.gpu

TYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = (torch.contiguous_format, torch.channels_last)
KERNELS = ("fake_quantize_kernel", "fake_quantize_backward_kernel")


@pytest.fixture
def ran(monkeypatch):
    names, run = [], Program.run
    monkeypatch.setattr(Program, "run", lambda self, *x: (names.append(self.kernel.__name__), run(self, *x)))
    return names


def compare(make, x, grad, policy=LosslessBackward, ran=None):
    """A layer by stock ops and one in a region, of the same seeds: bits, types and strides."""
    expected = gradients(make(), x, grad)
    found = gradients(brevact.quantize_backward(make(), policy, min_numel=0), x, grad)
    if ran is not None:
        assert all(name in ran for name in KERNELS), ran
    exact = len(expected) if policy is LosslessBackward else 2
    for one, other in zip(expected[:exact], found[:exact], strict=True):
        assert one.dtype is other.dtype and one.stride() == other.stride()
        assert torch.equal(one, other), (one - other).abs().max()
    return expected, found


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_those_of_stock_ops(name, relu, dtype, ran):
    for shape in SHAPES.values():
        for of_x in FORMATS:
            for of_grad in FORMATS:
                x = activation(shape).to("cuda", dtype).contiguous(memory_format=of_x)
                grad = activation(shape, 5).to("cuda", dtype).contiguous(memory_format=of_grad)
                for policy in (LosslessBackward, StochBackward2bit):
                    compare(lambda: layer(name, relu=relu).to("cuda", dtype), x, grad, policy, ran)


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
@pytest.mark.parametrize("name", ["uint4", "int8", "constant"])
def test_float32_scales_of_16_bit_activations_are_rounded_as_by_stock_ops(name, dtype, ran):
    """Such as under autocast: CUDA rounds a 0-d tensor to the type of the others before it computes."""
    x = activation(SHAPES["ragged"]).to("cuda", dtype)
    out = layer(name, relu=True).cuda()(x)
    compare(lambda: layer(name, relu=True).cuda(), x, activation(x.shape, 5).to("cuda", out.dtype), ran=ran)


@pytest.mark.parametrize("numel", [1 << 22, (1 << 22) + 13])
def test_large_activations(numel, ran):
    """The scale's gradient is a sum by several thousand threads."""
    x, grad = activation((numel,)).cuda(), activation((numel,), 5).cuda()
    for dtype in (torch.float32, torch.bfloat16):
        compare(lambda dtype=dtype: layer("uint4", relu=True).to("cuda", dtype), x.to(dtype), grad.to(dtype), ran=ran)


def net(normalizes):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d if normalizes else lambda channels: nn.Identity()
    weights = {"weight_quant": Int8WeightPerChannelFloat, "weight_bit_width": 4}
    return nn.Sequential(
        qnn.QuantConv2d(3, CHANNELS, 3, bias=False, **weights),
        norm(CHANNELS),
        qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat, bit_width=4, collect_stats_steps=3),
        qnn.QuantConv2d(CHANNELS, 2 * CHANNELS, 3, bias=False, **weights),
        norm(2 * CHANNELS),
        qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat, bit_width=4, collect_stats_steps=3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        qnn.QuantLinear(2 * CHANNELS, 10, bias=True, **weights),
    ).cuda()


@pytest.mark.parametrize("normalizes", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
def test_steps_with_statistics_and_learned_scales_end_in_the_same_state(memory_format, autocast, normalizes, ran):
    states = []
    for policy in (None, LosslessBackward):
        model = net(normalizes).to(memory_format=memory_format).train()
        if policy is not None:
            brevact.quantize_backward(model, policy, min_numel=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        generator = torch.Generator().manual_seed(0)
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            for _ in range(6):
                images = torch.randn(16, 3, 24, 24, generator=generator).cuda()
                images = images.contiguous(memory_format=memory_format)
                with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                    loss = nn.functional.cross_entropy(model(images), torch.arange(16, device="cuda") % 10)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        states.append(model.state_dict())
    assert all(name in ran for name in KERNELS)
    differ = [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]
    assert not differ, differ


@contextlib.contextmanager
def no_waiting():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("policy", [LosslessBackward, StochBackward2bit])
@pytest.mark.parametrize("name", ["uint4", "narrow", "per_channel", "constant"])
def test_nothing_waits_for_the_device(name, policy):
    model = brevact.quantize_backward(layer(name, relu=True).cuda(), policy)
    x, grad = activation(SHAPES["runs"]).cuda().requires_grad_(), activation(SHAPES["runs"], 5).cuda()
    weights = [x, *model.parameters()]
    torch.autograd.grad(model(x), weights, grad)
    with no_waiting():
        torch.autograd.grad(model(x), weights, grad)


@pytest.mark.parametrize("policy", [LosslessBackward, StochBackward2bit])
def test_a_captured_step_quantizes_by_the_scale_of_the_replay(policy):
    made = layer("uint4", relu=True).cuda()
    model = brevact.quantize_backward(made, policy)
    x, grad = activation(SHAPES["runs"]).cuda().requires_grad_(), activation(SHAPES["runs"], 5).cuda()
    (scale,) = model.parameters()

    @brevact.captured
    def run():
        out = model(x)
        return out.detach(), *torch.autograd.grad(out, [x, scale], grad)

    for _ in range(4):
        run()
    for factor in (1.0, 1.7):
        with torch.no_grad():
            scale.mul_(factor)
        out, found_of_x, found_of_scale = run()
        stock = layer("uint4", relu=True).cuda()
        with torch.no_grad():
            next(stock.parameters()).copy_(scale)  # loading would make Brevitas' quantizer anew, on the CPU
        expected_out, of_x, of_scale = gradients(stock, x, grad)
        assert torch.equal(out, expected_out) and torch.equal(found_of_x, of_x)
        if policy is LosslessBackward:
            assert torch.equal(found_of_scale, of_scale)


@pytest.mark.parametrize("name", ["uint4", "narrow", "per_channel"])
def test_missing_elements_are_where_stock_ops_have_them(name):
    x = activation(SHAPES["ragged"])
    x[1, 2, 3, 4] = torch.nan
    x, grad = x.cuda(), activation(x.shape, 5).cuda()
    expected = gradients(layer(name, relu=True).cuda(), x, grad)
    found = gradients(brevact.quantize_backward(layer(name, relu=True).cuda(), LosslessBackward), x, grad)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.nan_to_num(7.7), other.nan_to_num(7.7))
    assert found[0].isnan().sum() == 1
