import re
import warnings

import brevitas.nn as qnn
import pytest
import torch
from brevitas.quant import Int8ActPerTensorFloat, Uint8ActPerTensorFloat

import brevact.nn as bnn
from brevact.injectors import NearestBackward4bit, StochBackward2bit
from brevact.quantizers import UniformQuantizer

ACTIVATIONS = [
    qnn.QuantReLU,
    qnn.QuantSigmoid,
    qnn.QuantTanh,
    qnn.QuantHardSwish,
]


def step(layer, x, seed=0):
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    y = layer(x + 0)  # an activation; a leaf that requires a gradient counts as a weight
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    return y.detach(), x.grad, [parameter.grad for parameter in layer.parameters()]


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation_layer_keeps_its_forward_and_stores_less(kind, saved_bytes):
    plain, packed = kind(act_quant=None), kind(act_quant=StochBackward2bit)
    x = torch.randn(4, 8, 16, 16, requires_grad=True)
    expected, plain_bytes = saved_bytes(plain, x)
    result, packed_bytes = saved_bytes(packed, x)
    assert torch.equal(result, expected)
    assert packed.state_dict().keys() == plain.state_dict().keys()
    codes_and_metadata = x.numel() * 2 // 8 + x.numel() // 512 * 6
    assert packed_bytes <= codes_and_metadata < max(plain_bytes, 1) * 0.1 or plain_bytes == packed_bytes == 0


def test_relu_gradient_is_exact():
    x = torch.randn(2, 4096)
    plain, packed = (step(qnn.QuantReLU(act_quant=quant), x) for quant in (None, StochBackward2bit))
    assert torch.equal(packed[1], plain[1])


def test_weight_gradient_is_that_of_the_decoded_input():
    layer = qnn.QuantLinear(64, 10, weight_quant=None, input_quant=NearestBackward4bit)
    x = torch.randn(80, 64)
    y = layer(x)
    y.sum().backward()
    decoded = NearestBackward4bit.quantizer.quantize(x).dequantize()
    # y.sum() has the gradient 1 everywhere: each row of the weight gradient is the column sum of the decoded input.
    expected = torch.ones_like(y).t() @ decoded
    assert torch.allclose(layer.weight.grad, expected, rtol=0, atol=80 * torch.finfo(torch.float32).eps * 40)
    assert not torch.allclose(layer.weight.grad, torch.ones_like(y).t() @ x, rtol=0, atol=1e-3)


REPLACED = (
    "{slot}=StochBackward2bit of {layer} replaces the forward quantizer {name}: .*Pass {prefix}forward_quant={name} "
)
OF_RELU = REPLACED.format(slot="act_quant", layer="QuantReLU", name="Uint8ActPerTensorFloat", prefix="")
OF_IDENTITY = REPLACED.format(slot="act_quant", layer="QuantIdentity", name="Int8ActPerTensorFloat", prefix="")
OF_SUM = REPLACED.format(slot="input_quant", layer="QuantEltwiseAdd", name="Int8ActPerTensorFloat", prefix="input_")
FORWARD = {"forward_quant": Uint8ActPerTensorFloat}
OF_INPUT = {"input_forward_quant": Int8ActPerTensorFloat}


@pytest.mark.parametrize(
    ("layer", "keywords", "bits", "bucket", "forward", "warning"),
    [
        (qnn.QuantReLU, {}, 2, 512, None, OF_RELU),
        (qnn.QuantReLU, {"forward_quant": None}, 2, 512, None, ""),
        (qnn.QuantReLU, {"act_bit_width": 4, "bucket_size": 128}, 4, 128, None, OF_RELU),
        (qnn.QuantReLU, {"bit_width": 4, "forward_quant": None}, 4, 512, None, ""),
        (qnn.QuantReLU, {"bucket_size": 128, **FORWARD}, 2, 128, 8, ""),
        (qnn.QuantReLU, {"act_bucket_size": 128, "forward_bit_width": 4, **FORWARD}, 2, 128, 4, ""),
        (qnn.QuantReLU, {"act_bit_width": 3, "forward_bit_width": 4, **FORWARD}, 3, 512, 4, ""),
        (qnn.QuantReLU, {"bit_width": 3, "forward_bit_width": 5, **FORWARD}, 3, 512, 5, ""),
        (qnn.QuantReLU, {"forward_scaling_stats_momentum": 0.2, **FORWARD}, 2, 512, 8, ""),
        (qnn.QuantIdentity, {}, 2, 512, None, OF_IDENTITY),
        (
            qnn.QuantIdentity,
            {"forward_quant": None},
            2,
            512,
            None,
            "StochBackward2bit in a QuantIdentity packs nothing",
        ),
        (qnn.QuantIdentity, FORWARD, 2, 512, 8, ""),
        (qnn.QuantHardTanh, {"min_val": -1.0, "max_val": 1.0, "forward_quant": None}, 2, 512, None, ""),
        (qnn.QuantConv2d, {"input_bit_width": 4, "weight_bit_width": 4}, 4, 512, None, ""),
        (qnn.QuantConv2d, {"input_act_bit_width": 4, "input_forward_bit_width": 5, **OF_INPUT}, 4, 512, 5, ""),
        (qnn.QuantEltwiseAdd, {"output_quant": None}, 2, 512, None, OF_SUM),
    ],
)
def test_keywords_reach_the_quantizer_they_are_for(layer, keywords, bits, bucket, forward, warning):
    slot = "input_quant" if layer in (qnn.QuantConv2d, qnn.QuantEltwiseAdd) else "act_quant"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        built = layer(*((3, 8, 3) if layer is qnn.QuantConv2d else ()), **{slot: StochBackward2bit}, **keywords)
    assert [each.filename for each in found] == [__file__] * bool(warning)
    assert all(re.match(warning, str(each.message)) for each in found)
    proxy = getattr(built, slot)
    assert proxy.backward_quant.settings.quantizer == UniformQuantizer(bit_width=bits, bucket_size=bucket)
    assert proxy.is_quant_enabled == (forward is not None)
    if forward is not None:
        assert proxy.quant_injector.bit_width == forward


UNCLEAR = (
    "bit_width=4 of QuantReLU does not say which .*act_bit_width= is .*, forward_bit_width= that of Uint8ActPerTensorF"
)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: qnn.QuantReLU(act_quant=StochBackward2bit, bit_width=4), f"{UNCLEAR}.*needs forward_quant="),
        (lambda: qnn.QuantReLU(act_quant=StochBackward2bit, bit_width=4, **FORWARD), UNCLEAR),
        (
            lambda: qnn.QuantConv2d(3, 8, 3, input_quant=StochBackward2bit, input_bit_width=4, **OF_INPUT),
            "input_bit_width=4 of QuantConv2d does not .*input_act_bit_width= is .*input_forward_bit_width= that",
        ),
        (
            lambda: qnn.QuantReLU(act_quant=StochBackward2bit, bucket_size=64, act_bucket_size=128, **FORWARD),
            "bucket_size=64 of QuantReLU does not say .*act_bucket_size= is the setting",
        ),
        (
            lambda: qnn.QuantReLU(act_quant=StochBackward2bit, forward_bit_widht=4, **FORWARD),
            "forward_bit_widht=4 is not a setting of Uint8ActPerTensorFloat; did you mean forward_bit_width",
        ),
        (
            lambda: qnn.QuantReLU(act_quant=StochBackward2bit, act_buket_size=64),
            "act_buket_size=64 is not a setting of StochBackward2bit; did you mean bucket_size",
        ),
        (
            lambda: qnn.QuantConv2d(3, 8, 3, act_quant=StochBackward2bit, bucket_size=16),
            "bucket_size=16 is not an argument of QuantConv2d; did you mean act_bucket_size",
        ),
        (
            lambda: qnn.QuantConv2d(3, 8, 3, input_quant=StochBackward2bit, bucket_size=16),
            "bucket_size=16 is not an argument of QuantConv2d; did you mean input_bucket_size",
        ),
    ],
)
def test_keywords_that_are_for_none_or_for_two_quantizers_raise(build, message):
    with pytest.raises(TypeError, match=message):
        build()


def test_keywords_of_the_other_slot_are_not_ours():
    layer = qnn.QuantReLU(
        act_quant=StochBackward2bit, bucket_size=64, input_quant=Int8ActPerTensorFloat, input_bit_width=4
    )
    assert layer.act_quant.backward_quant.settings.quantizer.bucket_size == 64
    assert layer.input_quant.quant_injector.bit_width == 4


def test_eval_and_no_grad_store_nothing(saved_bytes):
    layer = qnn.QuantReLU(act_quant=StochBackward2bit)
    x = torch.randn(8, 1024, requires_grad=True)
    with torch.no_grad():
        assert saved_bytes(layer, x)[1] == 0
    result, kept = saved_bytes(layer.eval(), x)
    assert kept == x.nbytes  # eval with gradients is plain PyTorch: ReLU keeps its output
    result.sum().backward()
    assert torch.equal(x.grad, (x > 0).float())


def test_shared_proxy_attaches_to_every_layer(saved_bytes):
    first = qnn.QuantConv2d(8, 8, 3, weight_quant=None, input_quant=StochBackward2bit)
    second = qnn.QuantConv2d(8, 8, 3, weight_quant=None, input_quant=first.input_quant)
    plain = qnn.QuantConv2d(8, 8, 3, weight_quant=None)
    assert second.input_quant is first.input_quant
    assert first.input_quant.tracked_module_list == [first, second]
    x = torch.randn(4, 8, 16, 16)
    plain_bytes = saved_bytes(plain, x)[1]
    assert saved_bytes(first, x)[1] == saved_bytes(second, x)[1] < plain_bytes / 3


def test_two_slots_with_different_settings_raise():
    with pytest.raises(ValueError, match=r"input_quant of this QuantConv2d already holds a backward quantizer"):
        qnn.QuantConv2d(3, 4, 3, input_quant=StochBackward2bit, output_quant=NearestBackward4bit)


def test_two_slots_with_equal_settings_are_one_region(saved_bytes):
    layer = qnn.QuantReLU(act_quant=StochBackward2bit, input_quant=StochBackward2bit)
    x = torch.randn(8, 1024, requires_grad=True)
    assert saved_bytes(layer, x)[1] == x.numel() // 8


@pytest.mark.parametrize("slot", ["io_quant", "gate_acc_quant", "sigmoid_quant", "cell_state_quant"])
def test_recurrent_slots_name_the_layer_that_works(slot):
    with pytest.raises(TypeError, match=r"act_quant= of QuantLSTM or QuantRNN"):
        qnn.QuantLSTM(8, 8, **{slot: StochBackward2bit})


def test_attention_slots_pack_their_projections(saved_bytes):
    def build(quant):
        return qnn.QuantMultiheadAttention(
            64,
            4,
            **dict.fromkeys(("in_proj_input_quant", "out_proj_input_quant"), quant),
            **dict.fromkeys(("in_proj_bias_quant", "out_proj_bias_quant", "attn_output_weights_quant"), None),
            **dict.fromkeys(("q_scaled_quant", "k_transposed_quant", "v_quant"), None),
        )

    plain, packed = build(None), build(StochBackward2bit)
    packed.load_state_dict(plain.state_dict())
    x = torch.randn(32, 4, 64, requires_grad=True)
    expected, plain_bytes = saved_bytes(lambda: plain(x, x, x)[0])
    result, packed_bytes = saved_bytes(lambda: packed(x, x, x)[0])
    assert torch.equal(result, expected)
    projected = 2 * x.nbytes  # the inputs of in_proj and out_proj
    assert packed_bytes < plain_bytes - 0.8 * projected


ATTENTION_SLOTS = [
    "softmax_input_quant",
    "attn_output_weights_quant",
    "q_scaled_quant",
    "k_transposed_quant",
    "v_quant",
]


@pytest.mark.parametrize("slot", ATTENTION_SLOTS)
@pytest.mark.parametrize("layer", [qnn.QuantMultiheadAttention, bnn.QuantMultiheadAttention])
def test_attention_slots_of_identities_name_the_layer_that_works(layer, slot):
    with pytest.raises(TypeError, match=r"act_quant= of QuantMultiheadAttention"):
        layer(
            64, 4, packed_in_proj=False, in_proj_bias_quant=None, out_proj_bias_quant=None, **{slot: StochBackward2bit}
        )


@pytest.mark.parametrize("slot", ["weight_quant", "bias_quant"])
@pytest.mark.parametrize("layer", [qnn.QuantLinear, bnn.QuantLinear, qnn.QuantScaleBias])
def test_slots_of_parameters_name_the_slot_that_works(layer, slot):
    with pytest.raises(
        TypeError, match=r"StochBackward2bit .* cannot quantize a weight or a bias; pass it as act_quant="
    ):
        layer(*((8, True) if layer is qnn.QuantScaleBias else (8, 8, True)), **{slot: StochBackward2bit})


def test_repr_shows_the_quantizer():
    shown = repr(qnn.QuantReLU(act_quant=StochBackward2bit, bucket_size=128, min_numel=7))
    assert "(backward_quant): BackwardQuantProxy(UniformQuantizer, bit_width=2, rounding=stochastic" in shown
    assert "bucket_size=128" in shown
    assert "min_numel=7" in shown
