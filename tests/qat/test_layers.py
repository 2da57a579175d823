"""Brevitas' layers in a region, and those of `brevact.nn`: forward values, metadata, state, copies, graph modes."""

import copy

import brevitas.nn as qnn
import pytest
import torch
from brevitas.graph.calibrate import bias_correction_mode, calibration_mode
from brevitas.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerTensorFloat,
    ShiftedUint8ActPerTensorFloat,
    SignedTernaryActPerTensorConst,
    Uint8ActPerTensorFloat,
)
from brevitas.quant_tensor import IntQuantTensor
from torch import nn
from torch.utils.checkpoint import checkpoint

import brevact
import brevact.nn as bnn
from brevact import LosslessBackward, StochBackward2bit
from tests.qat.cases import CHANNELS, activation, gradients

SMALL = {"act_quant": StochBackward2bit, "act_min_numel": 0}


def net(quant_tensors=True):
    torch.manual_seed(0)
    return nn.Sequential(
        qnn.QuantIdentity(act_quant=Int8ActPerTensorFloat, return_quant_tensor=quant_tensors),
        qnn.QuantConv2d(
            CHANNELS, CHANNELS, 3, weight_quant=Int8WeightPerTensorFloat, return_quant_tensor=quant_tensors, bias=True
        ),
        qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat, bit_width=4, return_quant_tensor=quant_tensors),
        qnn.QuantConv2d(CHANNELS, 4, 3, weight_quant=Int8WeightPerTensorFloat, bias=True),
    ).train()


@pytest.mark.parametrize("quant_tensors", [True, False])
def test_quant_tensors_propagate_and_gradients_stay(quant_tensors):
    plain, packed = net(quant_tensors), brevact.quantize_backward(net(quant_tensors), LosslessBackward, min_numel=0)
    x = activation()
    for a, b in zip(gradients(plain, x)[:2], gradients(packed, x)[:2], strict=True):
        assert torch.equal(a, b)
    expected, found = plain[2](plain[1](plain[0](x))), packed[2](packed[1](packed[0](x)))
    assert isinstance(found, IntQuantTensor) == quant_tensors
    if quant_tensors:
        for name in ("value", "scale", "zero_point", "bit_width"):
            assert torch.equal(getattr(found, name), getattr(expected, name))
        assert torch.equal(found.int(), expected.int())


def test_views_of_an_output_share_its_codes():
    act = qnn.QuantIdentity(act_quant=Int8ActPerTensorFloat, bit_width=4)
    weight = nn.Parameter(torch.randn(6, CHANNELS * 16))
    x = activation()[:, :, ::2, ::2].contiguous().requires_grad_()
    grads = []
    for settings in (None, StochBackward2bit):
        layer = copy.deepcopy(act)
        if settings is None:
            y = layer(x)
            loss = nn.functional.linear(y.flatten(1), weight).sum() + (y.transpose(2, 3)[:, 1:] * y[:, 1:]).sum()
        else:
            with brevact.backward_quant(settings, min_numel=0):
                y = layer(x)
                loss = nn.functional.linear(y.flatten(1), weight).sum() + (y.transpose(2, 3)[:, 1:] * y[:, 1:]).sum()
        grads.append(torch.autograd.grad(loss, (x, weight)))
    assert torch.equal(grads[0][1], grads[1][1])


def test_layers_of_brevact_store_their_forward_quantizers_codes():
    options = {"weight_quant": Int8WeightPerTensorFloat, "input_quant": Int8ActPerTensorFloat}
    torch.manual_seed(0)
    plain = qnn.QuantConv2d(CHANNELS, CHANNELS, 3, **options)
    torch.manual_seed(0)
    packed = bnn.QuantConv2d(CHANNELS, CHANNELS, 3, **options, **SMALL)
    assert packed.state_dict().keys() == plain.state_dict().keys()
    x = activation()
    expected, found = gradients(plain, x), gradients(packed, x)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2]["weight"], expected[2]["weight"])
    report = brevact.memory_report(packed, x)
    assert 8 * report.saved_bytes / x.numel() < 8 + 2 + 1


def test_forward_quant_in_a_slot_stores_its_codes():
    layer = qnn.QuantReLU(
        act_quant=StochBackward2bit, forward_quant=Uint8ActPerTensorFloat, forward_bit_width=4, min_numel=0
    )
    plain = qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat, bit_width=4)
    x = activation()
    assert torch.equal(layer(x), plain(x))
    assert layer.state_dict().keys() == plain.state_dict().keys()
    report = brevact.memory_report(layer, x)
    assert 8 * report.saved_bytes / x.numel() < 4 + 2 + 1
    assert report.plain_bytes > 2 * x.nbytes


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def test_checkpointed_layers():
    plain, packed = net(False), brevact.quantize_backward(net(False), LosslessBackward, min_numel=0)
    x = activation()
    assert torch.equal(gradients(Checkpointed(packed), x)[0], gradients(plain, x)[0])


def test_checkpoints_go_on_where_a_scale_ends_its_statistics():
    """Each step collects twice; the third one's two passes read the learned scale, and save as many tensors."""
    found = []
    for policy in (None, LosslessBackward):
        model = Checkpointed(qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat.let(collect_stats_steps=4)))
        if policy is not None:
            brevact.quantize_backward(model, policy, min_numel=0)
        found.append([gradients(model, activation())[0] for _ in range(4)])
    assert all(map(torch.equal, *found))


def test_calibration_bias_correction_and_export_are_those_of_brevitas():
    outputs = []
    for quantize in (False, True):
        model = net(False)
        if quantize:
            brevact.quantize_backward(model, StochBackward2bit, min_numel=0)
        with torch.no_grad(), calibration_mode(model):
            model(activation(1))
        with torch.no_grad(), bias_correction_mode(model):
            model(activation(2))
        model(activation(3)).sum().backward()
        model.eval()
        exported = torch.export.export(model, (activation(4),)).module()
        outputs.append((model(activation(4)).detach(), exported(activation(4)).detach()))
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][1], outputs[1][1])
    assert torch.allclose(outputs[1][0], outputs[1][1], atol=1e-5)


def test_backward_on_a_compiled_model_is_that_of_the_compiler():
    model = nn.Sequential(qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat, collect_stats_steps=1), nn.Conv2d(8, 4, 3))
    with torch.no_grad():
        for seed in range(3):
            model(activation(seed))
    expected = gradients(copy.deepcopy(model), activation())
    brevact.quantize_backward(model, LosslessBackward, min_numel=0)
    found = gradients(torch.compile(model, backend="aot_eager"), activation())
    assert torch.allclose(found[0], expected[0], atol=1e-5)
    assert torch.allclose(found[1], expected[1], atol=1e-4)


def test_lossless_attention_is_that_of_torch():
    q, k, v = (torch.randn(2, 2, 16, 8, requires_grad=True) for _ in range(3))
    expected = torch.autograd.grad(nn.functional.scaled_dot_product_attention(q, k, v).square().sum(), (q, k, v))
    with brevact.backward_quant(LosslessBackward, min_numel=0):
        loss = nn.functional.scaled_dot_product_attention(q, k, v).square().sum()
    found = torch.autograd.grad(loss, (q, k, v))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "act",
    [
        lambda: qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat),
        lambda: qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat, scaling_impl_type="const", scaling_init=1.0),
        lambda: qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat, scaling_impl_type="parameter", scaling_init=1.0),
        lambda: qnn.QuantIdentity(act_quant=ShiftedUint8ActPerTensorFloat),
        lambda: qnn.QuantIdentity(act_quant=SignedTernaryActPerTensorConst, scaling_init=1.0),
    ],
    ids=["collected", "constant", "learned", "shifted", "ternary"],
)
@pytest.mark.parametrize("policy", [LosslessBackward, StochBackward2bit])
@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13), reason="Brevitas renames dimensions, NYI on meta"
)
def test_layers_on_the_meta_device_run_as_those_of_brevitas(act, policy):
    conv = qnn.QuantConv2d(CHANNELS, 4, 3, weight_quant=Int8WeightPerTensorFloat)
    model = brevact.quantize_backward(nn.Sequential(act(), conv).to("meta"), policy, min_numel=0)
    x = activation().to("meta").requires_grad_()
    for _ in range(2):
        model(x).sum().backward()
    assert x.grad.is_meta and x.grad.shape == x.shape and conv.weight.grad.shape == conv.weight.shape
