"""Brevitas' activation quantizers as backward quantizers: stored bytes, decoded values, layers and models."""

import copy
import math
import pickle

import pytest
import torch
from brevitas.inject import ExtendedInjector
from brevitas.quant import (
    Int8ActPerTensorFixedPoint,
    Int8ActPerTensorFloat,
    Int8ActPerTensorFloatMSE,
    Int8WeightPerTensorFloat,
    NoneActQuant,
    ShiftedUint8ActPerTensorFloat,
    SignedBinaryActPerTensorConst,
    SignedTernaryActPerTensorConst,
    Uint8ActPerTensorFloat,
    Uint8ActPerTensorFloatMaxInit,
)
from brevitas.quant.float_quant_ocp import Fp8e4m3OCPActPerTensorFloat
from brevitas.quant.mx_quant_ocp import MXInt8Act
from brevitas.quant.scaled_int import Int8ActPerTensorFloatBatchQuant2d
from torch import Tensor, nn

import brevact
import brevact.nn as bnn
from brevact.injectors import backward_settings_from
from tests.saving import by_torch_save

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PER_CHANNEL = {
    "scaling_per_output_type": "channel",
    "per_channel_broadcastable_shape": (1, 6, 1, 1),
    "scaling_stats_permute_dims": (1, 0, 2, 3),
}


#: Injector, overrides, bits a code, numbers of metadata a group.
SUBJECTS = {
    "thesis": (Int8ActPerTensorFloat, {"bit_width": 2}, 2, 1),
    "narrow": (Int8ActPerTensorFloat, {"narrow_range": True, "bit_width": 3}, 3, 1),
    "uint5": (Uint8ActPerTensorFloat, {"bit_width": 5}, 5, 1),
    "shifted": (ShiftedUint8ActPerTensorFloat, {}, 8, 2),
    "fixed point": (Int8ActPerTensorFixedPoint, {"bit_width": 6}, 6, 1),
    "parameter": (Uint8ActPerTensorFloatMaxInit, {"max_val": 2.0}, 8, 1),
    "mean square": (Int8ActPerTensorFloatMSE, {"bit_width": 4}, 4, 1),
    "batch": (Int8ActPerTensorFloatBatchQuant2d, {}, 8, 1),
    "signed scale": (Int8ActPerTensorFloat, {"scaling_stats_op": "signed_max"}, 8, 1),
    "per channel": (Int8ActPerTensorFloat, PER_CHANNEL, 8, 6),
    "shifted per channel": (ShiftedUint8ActPerTensorFloat, PER_CHANNEL, 8, 12),
    "binary": (SignedBinaryActPerTensorConst, {}, 1, 1),
    "ternary": (SignedTernaryActPerTensorConst, {}, 2, 1),
    "ternary core": (SignedTernaryActPerTensorConst, {"quant_type": "ternary", "threshold": 0.5}, 2, 1),
}
subjects = pytest.mark.parametrize("subject", [pytest.param(value, id=key) for key, value in SUBJECTS.items()])
injectors = pytest.mark.parametrize(
    "injector", [Int8ActPerTensorFloat, ShiftedUint8ActPerTensorFloat, SignedBinaryActPerTensorConst]
)


def activations(dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(5, 6, 7, 9, generator=torch.Generator().manual_seed(0)) * 1.5).to(dtype)


def fake_quantized(injector: type, overrides: dict, x: Tensor) -> Tensor:
    injector = injector.let(**overrides)
    with torch.no_grad():
        result = injector.proxy_class(nn.Identity(), injector)(x.to(torch.promote_types(x.dtype, torch.float32)))
    return (result if type(result) is Tensor else result.value).to(x.dtype)


@subjects
@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_gives_brevitas_own_values_of_codes_of_their_true_width(subject, dtype):
    injector, overrides, bit_width, metadata = subject
    packed = brevact.quantizer(injector, **overrides).quantize(activations(dtype))
    codes, size = bit_width * -(-activations().numel() // 8), 8 if dtype is torch.float64 else 4
    assert codes == packed.codes.numel() and 0 <= packed.nbytes - codes - size * metadata < size
    decoded = packed.dequantize()
    assert torch.equal(decoded, fake_quantized(injector, overrides, activations(dtype)))
    other = activations(dtype).flip(0)
    assert torch.equal(packed.dequantize_multiply(other), decoded * other)


MEMORY_ORDERS = {
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 2),
    "with gaps": lambda x: x[:, ::2, 1:],
    "expanded": lambda x: x[:, :1].expand(-1, 6, -1, -1),
    "one element": lambda x: x[:1, :1, :1, :1],
    "vector": lambda x: x.reshape(-1),
    "negative": lambda x: torch._neg_view(x),
}


@pytest.mark.parametrize("name", ["thesis", "shifted", "binary", "per channel"])
@pytest.mark.parametrize("order", MEMORY_ORDERS.values(), ids=MEMORY_ORDERS)
def test_memory_order_changes_nothing(name, order):
    injector, overrides, *_ = SUBJECTS[name]
    x = order(activations())
    if name == "per channel":
        if x.dim() != 4:
            pytest.skip("its channels are those of four dimensions")
        overrides = {**overrides, "per_channel_broadcastable_shape": (1, x.shape[1], 1, 1)}
    packed = brevact.quantizer(injector, **overrides).quantize(x)
    assert torch.equal(packed.dequantize(), fake_quantized(injector, overrides, x.contiguous()))
    if 0 not in x.stride():
        assert packed.dequantize().stride() == x.stride()


@pytest.mark.parametrize("name", ["thesis", "shifted", "binary"])
def test_empty_and_scalar_tensors(name):
    injector, overrides, *_ = SUBJECTS[name]
    quantizer = brevact.quantizer(injector, **overrides)
    empty = quantizer.quantize(torch.empty(0, 6, 7, 9))
    assert empty.dequantize().shape == (0, 6, 7, 9) and empty.nbytes == 0
    assert quantizer.quantize(torch.tensor(0.75)).dequantize().shape == ()


@subjects
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_elements_that_are_not_finite_make_those_that_share_their_scale_nan(subject, value):
    injector, overrides, *_ = subject
    quantizer, x = brevact.quantizer(injector, **overrides), activations()
    x[0, 0, 0, 0] = value
    decoded, expected = quantizer.quantize(x).dequantize(), fake_quantized(injector, overrides, x.nan_to_num(0, 0, 0))
    lost = torch.zeros(x.shape, dtype=torch.bool)
    lost[:, : 1 if overrides is PER_CHANNEL else None] = True
    assert torch.equal(decoded.isnan(), lost)
    assert torch.equal(decoded[~lost], expected[~lost])


def test_zeros_decode_to_zero():
    x = torch.tensor([0.0, -0.0, 1.0, -1.0])
    for name in ("thesis", "shifted", "ternary"):
        injector, overrides, *_ = SUBJECTS[name]
        assert brevact.quantizer(injector, **overrides).quantize(x).dequantize()[:2].tolist() == [0.0, 0.0]
        assert not brevact.quantizer(injector, **overrides).quantize(torch.zeros(64)).dequantize().any()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q)), by_torch_save])
def test_copies_are_equal_and_packed_activations_need_no_quantizer(copied):
    quantizer = brevact.quantizer(ShiftedUint8ActPerTensorFloat, bit_width=4)
    packed = copied(quantizer.quantize(activations()))
    assert torch.equal(packed.dequantize(), quantizer.quantize(activations()).dequantize())
    plain = brevact.quantizer(Int8ActPerTensorFloat)
    assert copied(plain) == plain and hash(copied(plain)) == hash(plain) and plain != quantizer


def test_autocast_and_earlier_tensors_change_nothing():
    x, quantizer = activations(torch.bfloat16), brevact.quantizer(Int8ActPerTensorFloat, collect_stats_steps=1)
    expected = quantizer.quantize(x).dequantize()
    quantizer.quantize(x * 100)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(quantizer.quantize(x).dequantize(), expected)


@pytest.mark.parametrize(
    ("error", "source", "overrides", "message"),
    [
        (TypeError, Int8ActPerTensorFloat, {"bit_widht": 2}, "bit_widht=2 is not a setting .*did you mean bit_width"),
        (TypeError, Int8ActPerTensorFloat, {"group_size": 64}, "group_size of Int8.*no groups"),
        (TypeError, MXInt8Act, {}, "group_size of MXInt8Act.*StochBackward8bit"),
        (TypeError, SignedBinaryActPerTensorConst, {"bit_width": 2}, "bit_width=2 is not a setting"),
        (TypeError, Int8ActPerTensorFloat, {"act_impl": nn.ReLU}, "act_impl=.* is not a setting"),
        (TypeError, Int8ActPerTensorFloat, {"forward_quant": NoneActQuant}, "forward_quant=.* is not a setting"),
        (TypeError, Uint8ActPerTensorFloatMaxInit, {}, "is incomplete: .*'max_val'.* State the missing setting"),
        (TypeError, NoneActQuant, {}, "NoneActQuant quantizes nothing"),
        (TypeError, Fp8e4m3OCPActPerTensorFloat, {}, "is a FloatQuant, without integers; .*StochBackward8bit"),
        (TypeError, Int8ActPerTensorFloat, {"bit_width_impl_type": "parameter"}, "bit_width_impl_type='const'"),
        (TypeError, Int8ActPerTensorFloat, {"bit_width_impl_type": "stateful_const"}, "bit_width_impl_type='const'"),
        (TypeError, Int8WeightPerTensorFloat, {}, "Int8WeightPerTensorFloat, which quantizes a weight or a bias"),
        (ValueError, Int8ActPerTensorFloat, {"bit_width": 9}, "bit_width=9 of Int8.* is an integer from 1 to 8"),
        (ValueError, Int8ActPerTensorFloat, {"bit_width": 0}, "bit_width=0 of Int8.* is out of range"),
        (ValueError, Int8ActPerTensorFloat, {"collect_stats_steps": 0}, "cannot be built: AssertionError"),
        (ValueError, Int8ActPerTensorFloat, {"quant_delay_steps": 3}, "quant_delay_steps=3"),
        (ValueError, Int8ActPerTensorFloat, {"float_to_int_impl_type": "stochastic_round"}, "StochBackward8bit"),
        (ValueError, Int8ActPerTensorFloat, {"save_mode": "later"}, "save_mode='later' is unknown"),
        (ValueError, Int8ActPerTensorFloat, {"min_numel": -1}, "min_numel: got -1"),
    ],
)
def test_quantizer_refuses_settings(error, source, overrides, message):
    with pytest.raises(error, match=message):
        brevact.quantizer(source, **overrides)


def test_shapes_that_do_not_fit_raise():
    with pytest.raises(ValueError, match="per_channel_broadcastable_shape="):
        brevact.quantizer(Int8ActPerTensorFloat, **PER_CHANNEL).quantize(torch.ones(4, 8))


class Composed(ExtendedInjector):
    bit_width = 3


class Mine(Int8ActPerTensorFloat):
    bit_width = 5
    min_numel = 7


def test_subclasses_and_composition_keep_their_meaning():
    settings = backward_settings_from(Mine, save_mode="quantize_on_backward")
    changed = backward_settings_from(settings, bit_width=2)
    assert (settings.quantizer.integers.bit_width, changed.quantizer.integers.bit_width) == (5, 2)
    assert settings.min_numel == changed.min_numel == 7
    assert settings.save_mode is changed.save_mode is brevact.SaveMode.QUANTIZE_ON_BACKWARD
    assert brevact.quantizer(Composed & Int8ActPerTensorFloat).integers.bit_width == 3


@injectors
@pytest.mark.parametrize("mode", brevact.SaveMode)
def test_layer_keeps_its_forward_and_decodes_for_backward(injector, mode, saved_bytes):
    plain = bnn.QuantConv2d(6, 4, 3, weight_quant=None)
    layer = bnn.QuantConv2d(6, 4, 3, weight_quant=None, act_quant=injector, act_min_numel=0, act_save_mode=mode)
    layer.load_state_dict(plain.state_dict())
    assert layer.state_dict().keys() == plain.state_dict().keys()
    x = activations()
    (result, kept), (expected, kept_plain) = saved_bytes(layer, x), saved_bytes(plain, x)
    assert torch.equal(result, expected) and (kept < kept_plain or mode is brevact.SaveMode.QUANTIZE_ON_BACKWARD)
    grads = []
    for _ in range(2):
        layer.weight.grad = None
        result.sum().backward(retain_graph=True)
        grads.append(layer.weight.grad)
    decoded = brevact.quantizer(injector).quantize(x)
    grad = torch.nn.grad.conv2d_weight(decoded.dequantize(), layer.weight.shape, torch.ones_like(result))
    assert torch.equal(*grads) and torch.allclose(grads[0], grad, rtol=1e-4, atol=1e-4)


def test_overrides_take_the_prefix_of_the_slot():
    layer = bnn.SiLU(act_quant=Int8ActPerTensorFloat, act_bit_width=2, act_save_mode="quantize_on_backward")
    assert layer.act_quant.extra_repr() == "Int8ActPerTensorFloat, bit_width=2, save_mode=quantize_on_backward"
    with pytest.raises(TypeError, match=r"bit_widht=2 is not a setting of Int8Act.*; did you mean bit_width"):
        bnn.SiLU(act_quant=Int8ActPerTensorFloat, act_bit_widht=2)
    bnn.SiLU(act_quant=None, act_collect_stats_steps=3)
    with pytest.raises(TypeError, match="act_colect_stats_steps=3 is not an argument"):
        bnn.SiLU(act_quant=None, act_colect_stats_steps=3)


@injectors
def test_policy_gives_the_gradients_of_layers_with_the_quantizer(injector):
    torch.manual_seed(0)
    settings = {"act_quant": injector, "act_min_numel": 0}
    layers = nn.Sequential(
        bnn.QuantConv2d(6, 8, 3, weight_quant=None, **settings),
        bnn.SiLU(**settings),
        nn.Flatten(),
        bnn.QuantLinear(280, 5, weight_quant=None, **settings),
    )
    model = nn.Sequential(nn.Conv2d(6, 8, 3), nn.SiLU(), nn.Flatten(), nn.Linear(280, 5))
    model.load_state_dict(layers.state_dict())
    grads = []
    for net in (layers, copy.deepcopy(brevact.quantize_backward(model, injector, min_numel=0))):
        net(activations()).square().sum().backward()
        grads.append([p.grad for p in net.parameters()])
    assert all(map(torch.equal, *grads))


def test_a_block_quantizes_each_tensor_by_its_own_statistics():
    x, weight = activations().flatten(1), torch.randn(4, 378, requires_grad=True)
    for factor in (0.01, 100.0):
        with brevact.backward_quant(Int8ActPerTensorFloat, collect_stats_steps=1, min_numel=0):
            out = nn.functional.linear(x * factor, weight)
        (grad,) = torch.autograd.grad(out.sum(), weight)
        decoded = brevact.quantizer(Int8ActPerTensorFloat).quantize(x * factor).dequantize()
        torch.testing.assert_close(grad, decoded.sum(0).expand(4, -1), rtol=1e-5, atol=1e-3 * factor)


def test_compiled_models_run_it_without_a_compiler():
    torch.manual_seed(0)
    model = brevact.quantize_backward(nn.Sequential(nn.Conv2d(6, 8, 3), nn.SiLU()), Int8ActPerTensorFloat, min_numel=0)
    grads = []
    for each in (model, torch.compile(model, backend="eager")):
        grads.append(torch.autograd.grad(each(activations()).square().sum(), [*model.parameters()]))
    assert all(map(torch.equal, *grads))
    torch.compiler.reset()
    with pytest.raises(Exception, match="without fullgraph=True"):
        torch.compile(model, backend="eager", fullgraph=True)(activations())
    torch.compiler.reset()
