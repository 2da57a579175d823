"""Fake quantization in one pass each way: Brevitas' bits, whatever the sizes, strides, threads and gradients."""

import brevitas.nn as qnn
import pytest
import torch
from brevitas import quant
from brevitas.inject.enum import ScalingImplType

import brevact
from brevact import LosslessBackward, StochBackward2bit
from brevact.quantizers.backends import without_kernels

CHANNELS = 16
_PER_CHANNEL = {
    "scaling_per_output_channel": True,
    "per_channel_broadcastable_shape": (1, CHANNELS, 1, 1),
    "scaling_stats_permute_dims": (1, 0, 2, 3),
}
#: Keywords of activation layers that kernels quantize.
LAYERS = {
    "uint4": {"act_quant": quant.Uint8ActPerTensorFloat, "bit_width": 4},
    "int8": {"act_quant": quant.Int8ActPerTensorFloat},
    "narrow": {"act_quant": quant.Int8ActPerTensorFloat, "bit_width": 3, "narrow_range": True},
    "per_channel": {"act_quant": quant.Int8ActPerTensorFloat, "bit_width": 4, **_PER_CHANNEL},
    "shifted": {"act_quant": quant.ShiftedUint8ActPerTensorFloat, "bit_width": 4},
    "constant": {
        "act_quant": quant.Int8ActPerTensorFloat,
        "scaling_impl_type": ScalingImplType.CONST,
        "scaling_init": 1.5,
    },
    "power_of_two": {"act_quant": quant.Int8ActPerTensorFixedPoint},
}
#: Sizes with full and ragged blocks, several runs of a sum, and dimensions of one element.
SHAPES = {
    "blocks": (2, CHANNELS, 16, 16),
    "ragged": (3, CHANNELS, 17, 13),
    "runs": (4, CHANNELS, 32, 32),
    "ones": (64, CHANNELS, 1, 1),
}


def layer(name, *, relu):
    made = (qnn.QuantReLU if relu else qnn.QuantIdentity)(**LAYERS[name] | {"collect_stats_steps": 2}).train()
    with torch.no_grad():
        for seed in range(4):
            made(activation((2, CHANNELS, 4, 4), seed))
    return made


def activation(shape, seed=9):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1.5


def gradients(model, x, grad):
    """Output, and gradients of the input and of the parameters, for a gradient with strides of its own."""
    torch.manual_seed(0)
    model.zero_grad()
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    out = model(x)
    found = torch.autograd.grad(out, (x, *model.parameters()), grad, allow_unused=True)
    return [out.detach(), *(each for each in found if each is not None)]


def check(name, x, grad, *, relu, policy=LosslessBackward, **options):
    """Compare a layer with one in a region, bit for bit and stride for stride; return the results of the second."""
    expected = gradients(layer(name, relu=relu), x, grad)
    found = gradients(brevact.quantize_backward(layer(name, relu=relu), policy, **options), x, grad)
    exact = len(expected) if policy is LosslessBackward else 2
    for one, other in zip(expected[:exact], found[:exact], strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_those_of_brevitas(name, relu, shape):
    x = activation(SHAPES[shape])
    check(name, x, activation(x.shape, 5), relu=relu, min_numel=0)
    check(name, x, activation(x.shape, 5), relu=relu, policy=StochBackward2bit, min_numel=0)


@pytest.mark.parametrize("shape", ["blocks", "ragged", "ones"])
@pytest.mark.parametrize("name", ["uint4", "per_channel", "constant"])
def test_channels_last_activations_and_gradients(name, shape):
    x, grad = activation(SHAPES[shape]), activation(SHAPES[shape], 5)
    for of_x in (torch.contiguous_format, torch.channels_last):
        for of_grad in (torch.contiguous_format, torch.channels_last):
            pair = x.contiguous(memory_format=of_x), grad.contiguous(memory_format=of_grad)
            check(name, *pair, relu=True, min_numel=0)


@pytest.mark.parametrize("name", ["uint4", "per_channel"])
def test_expanded_and_transposed_gradients(name):
    x = activation(SHAPES["ragged"])
    for grad in (torch.tensor(0.3).expand(x.shape), activation((3, CHANNELS, 13, 17), 5).transpose(2, 3)):
        check(name, x, grad, relu=True, min_numel=0)


@pytest.mark.parametrize("name", ["uint4", "int8", "per_channel"])
def test_activations_with_gaps_and_expanded_ones(name):
    whole, grad = activation((3, CHANNELS, 17, 26)), activation(SHAPES["ragged"], 5)
    views = whole[..., ::2], whole.transpose(2, 3)[:, :, :17, :13], whole[:1, :, :, :13].expand(3, -1, -1, -1)
    for x in views:
        for relu in (False, True):
            check(name, x, grad, relu=relu, min_numel=0)
            check(name, x, grad, relu=relu, policy=StochBackward2bit, min_numel=0)


@pytest.mark.parametrize("threads", [1, 2])
def test_scale_gradients_are_summed_as_torch_sums_them_on_any_number_of_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape in ((4, CHANNELS, 32, 32), (3, CHANNELS, 31, 32), (3, CHANNELS, 31, 29)):
            check("uint4", activation(shape), activation(shape, 5), relu=True)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bit_width", [2, 5, 8])
@pytest.mark.parametrize("name", ["uint4", "int8", "per_channel"])
def test_plain_torch_stores_the_same_and_has_the_same_gradients(name, bit_width):
    """Residuals, whose rounding is random, included."""
    x, grad = activation(SHAPES["ragged"]), activation(SHAPES["ragged"], 5)
    model = brevact.quantize_backward(layer(name, relu=True), LosslessBackward, residual_bit_width=bit_width)
    found = gradients(model, x, grad)
    with without_kernels():
        assert all(torch.equal(one, other) for one, other in zip(found, gradients(model, x, grad), strict=True))
    other = gradients(model, x, grad.to(memory_format=torch.channels_last))  # by the ops of torch
    assert all(torch.allclose(one, two, rtol=1e-3, atol=1e-5) for one, two in zip(found, other, strict=True))


@pytest.mark.parametrize("name", ["uint4", "narrow", "per_channel"])
def test_missing_elements_are_where_brevitas_has_them(name):
    x = activation(SHAPES["ragged"])
    x[1, 2, 3, 4] = torch.nan
    expected = gradients(layer(name, relu=True), x, activation(x.shape, 5))
    found = gradients(brevact.quantize_backward(layer(name, relu=True), LosslessBackward), x, activation(x.shape, 5))
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one.nan_to_num(7.7), other.nan_to_num(7.7))
    assert found[0].isnan().sum() == 1


def test_input_of_a_relu_may_change_afterwards():
    """As in Brevitas, whose ReLU keeps its output."""
    results = []
    for context in (None, LosslessBackward):
        model, x = layer("uint4", relu=True), activation(SHAPES["ragged"]).requires_grad_()
        inner = x * 1
        with brevact.backward_quant(context):
            out = model(inner)
            inner.add_(1.0)
            loss = out.square().sum() + inner.sum()
        results.append(torch.autograd.grad(loss, (x, *model.parameters())))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("make", [qnn.QuantIdentity, qnn.QuantReLU])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_zero_points_between_numbers_of_16_bits_are_rounded_where_torch_rounds_them(make, dtype):
    def shifted():
        options = {"bit_width": 4, "quantize_zero_point": False, "collect_stats_steps": 2}
        made = make(act_quant=quant.ShiftedUint8ActPerTensorFloat, **options).train()
        with torch.no_grad():
            for seed in range(4):
                made(activation((512,), seed) - 0.3)
        return made

    x = activation((4096,)).to(dtype)
    found = []
    for model in (shifted(), brevact.quantize_backward(shifted(), LosslessBackward, min_numel=0)):
        with torch.autocast("cpu", dtype):
            found.append(gradients(model, x, torch.ones_like(x)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
