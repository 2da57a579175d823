"""Forward quantizers that somebody has changed, watches, or changes between the forward and the backward pass."""

import brevitas.nn as qnn
import pytest
import torch
from brevitas.core.quant import IntQuant
from brevitas.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerChannelFloat,
    ShiftedUint8ActPerTensorFloat,
    Uint8ActPerTensorFloat,
)
from torch import nn

import brevact
from brevact import LosslessBackward
from brevact.qat.forward_statistics import scale_of_magnitudes
from tests.qat.cases import CHANNELS, activation, gradients

CONSTANT = {"scaling_impl_type": "const", "scaling_init": 2.0}


class _SameView(nn.Module):
    def forward(self, x):
        return x.view(x.shape)


class _OneMore(IntQuant):
    def to_int(self, *args):
        return super().to_int(*args) + 1


def tensor_quant(layer):
    return layer.act_quant.fused_activation_quant_proxy.tensor_quant


def compare(make):
    """Gradients of the same model with and without backward quantization, bit for bit."""
    found = []
    for quantize in (False, True):
        torch.manual_seed(0)
        model = make()
        if quantize:
            brevact.quantize_backward(model, LosslessBackward, min_numel=0)
        found.append(gradients(model, activation()))
    (out, grad, grads), (packed_out, packed_grad, packed_grads) = found
    assert torch.equal(packed_out, out)
    assert torch.equal(packed_grad, grad)
    assert all(torch.equal(packed_grads[key], grads[key]) for key in grads)


def test_relu_passes_gradients_to_a_quantizer_with_its_own_view():
    def make():
        layer = qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat, **CONSTANT)
        tensor_quant(layer).int_quant.input_view_impl = _SameView()
        return nn.Sequential(layer, nn.Conv2d(CHANNELS, 4, 3))

    compare(make)


def test_integers_of_a_subclass_are_its_own():
    def make():
        layer = qnn.QuantIdentity(act_quant=Int8ActPerTensorFloat, **CONSTANT)
        tensor_quant(layer).int_quant.__class__ = _OneMore
        return nn.Sequential(layer, nn.Conv2d(CHANNELS, 4, 3))

    compare(make)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [torch.tensor(0.37), torch.full((1, CHANNELS, 1, 1), 0.37)], ids=["one", "channels"])
def test_product_with_a_scale_has_the_gradient_of_torch(dtype, scale):
    """For a float32 scale, and for a gradient in another memory order than the factors."""
    x = activation().to(dtype).transpose(2, 3).requires_grad_()
    scale = scale.clone().requires_grad_()
    expected = x * 1 * scale
    with brevact.backward_quant(LosslessBackward, min_numel=0):
        found = x * 1 * scale
    grads = [torch.autograd.grad(y, (x, scale), activation(1).to(y.dtype)) for y in (expected, found)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("kind", ["parameter", "parameter_from_stats"])
@pytest.mark.parametrize("value", [0.7, -0.7, 1e-12, 0.0, -1e-12])
@pytest.mark.parametrize("least", [None, 1e-3])
def test_learned_scales_are_those_of_brevitas_whatever_the_parameter_is(kind, value, least):
    """Below the smallest magnitude, and of any sign; their gradients add to others of the parameter."""

    def make():
        options = {"scaling_init": 1.0} if kind == "parameter" else {"collect_stats_steps": 1}
        if least is not None or value != 0.0:
            options["scaling_min_val"] = least
        layer = qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat, bit_width=4, scaling_impl_type=kind, **options)
        with torch.no_grad():
            for _ in range(3):
                layer(activation())
            tensor_quant(layer).scaling_impl.value.fill_(value)
        return nn.Sequential(layer, layer)

    found = []
    for quantize in (False, True):
        model = make()
        if quantize:
            brevact.quantize_backward(model, LosslessBackward, min_numel=0)
        x = activation().requires_grad_()
        out = model(x)
        loss = out.square().sum() + tensor_quant(model[0]).scaling_impl.value.square().sum()
        found.append([out.detach(), *torch.autograd.grad(loss, (x, *model.parameters()))])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.nan_to_num(7.7, 8.8, 9.9), other.nan_to_num(7.7, 8.8, 9.9))


def _set_width(quant):
    quant.msb_clamp_bit_width_impl.bit_width.value.data.fill_(3)


def _raise_smallest_scale(quant):
    quant.scaling_impl.clamp_scaling.clamp_min_ste.min_val = 10.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", [_set_width, _raise_smallest_scale])
def test_settings_that_change_between_steps_without_a_version_count(change, dtype):
    found = []
    for quantize in (False, True):
        layer = qnn.QuantReLU(
            act_quant=Uint8ActPerTensorFloat, bit_width=4, collect_stats_steps=1, scaling_min_val=1e-3
        ).to(dtype)
        if quantize:
            brevact.quantize_backward(layer, LosslessBackward, min_numel=0)
        for _ in range(3):
            before = gradients(layer, activation().to(dtype))
        change(tensor_quant(layer))
        after = gradients(layer, 2 * activation().to(dtype))  # some are clipped
        assert not torch.equal(before[0], after[0])
        found.append([*after[:2], *after[2].values()])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("options", [{}, {"narrow_range": True}, {"high_percentile_q": 90.0}, {"learns": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_nan_in_what_statistics_are_collected_of_leaves_the_gradient_of_negative_elements_0(dtype, options):
    """Behind a scale that is NaN, too."""
    learns, found = "learns" in options, []
    quant, options = (ShiftedUint8ActPerTensorFloat, {}) if learns else (Uint8ActPerTensorFloat, options)
    for quantize in (False, True):
        layer = qnn.QuantReLU(act_quant=quant, bit_width=4, collect_stats_steps=1 if learns else 9, **options).to(dtype)
        if learns:  # the zero point, too
            layer(activation().to(dtype))
            layer(activation().to(dtype))
            tensor_quant(layer).scaling_impl.value.data.fill_(float("nan"))
        if quantize:
            brevact.quantize_backward(layer, LosslessBackward, min_numel=0)
        x = activation().to(dtype)
        x[0, 0, 0, :3] = float("nan")
        x.requires_grad_()
        out = layer(x)
        out.backward(activation(1).to(dtype))
        found.append((out.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())))
    assert (found[0][1] == 0).any()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.nan_to_num(7.7), other.nan_to_num(7.7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("least", [None, 1e-3])
def test_scales_of_magnitudes_are_those_of_brevitas(least, dtype):
    """Below the bound, zero, and not finite: no condition reads the elements, so that nothing waits for a GPU."""
    layer = qnn.QuantConv2d(3, 8, 1, weight_quant=Int8WeightPerChannelFloat, weight_scaling_min_val=least)
    scaling = layer.weight_quant.tensor_quant.scaling_impl
    magnitudes = torch.tensor([0.7, 1e-12, 0.0, 5e-4, torch.inf, torch.nan, 1e30, 1e-3], dtype=dtype).requires_grad_()
    threshold, grad = torch.tensor(127.0, dtype=dtype), torch.randn(8, generator=torch.Generator().manual_seed(0))
    stock = scaling.stats_scaling_impl(magnitudes, threshold)
    own = scale_of_magnitudes(magnitudes, threshold, least or 0.0)
    for one, other in (
        (stock, own),
        *zip(*(torch.autograd.grad(each, magnitudes, grad.to(dtype)) for each in (stock, own)), strict=True),
    ):
        assert one.dtype is other.dtype and torch.equal(one.nan_to_num(7.7), other.nan_to_num(7.7))
