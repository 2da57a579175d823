import brevitas.config
import brevitas.nn as qnn
import pytest
import torch
from brevitas.quant import (
    Int4WeightPerTensorFloatDecoupled,
    Int8WeightNormL2PerChannelFixedPoint,
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorFixedPoint,
    Int8WeightPerTensorFloat,
    ShiftedUint8WeightPerTensorFloat,
    SignedBinaryWeightPerTensorConst,
    SignedTernaryWeightPerTensorConst,
)
from torch import nn

import brevact.nn as bnn
from brevact.injectors import StochBackward2bit

ATTENTION = dict.fromkeys(
    (
        "in_proj_input_quant",
        "in_proj_weight_quant",
        "in_proj_bias_quant",
        "attn_output_weights_quant",
        "q_scaled_quant",
        "k_transposed_quant",
        "v_quant",
        "out_proj_input_quant",
        "out_proj_weight_quant",
        "out_proj_bias_quant",
    )
)
RECURRENT = dict.fromkeys(("weight_quant", "bias_quant", "io_quant", "gate_acc_quant"))
GATES = dict.fromkeys(("sigmoid_quant", "tanh_quant", "cell_state_quant"))
#: Arguments and input shape of each layer. Weights are large enough to be packed, were they taken for activations.
CASES = {
    "QuantConv1d": ((16, 32, 3), {}, (4, 16, 100)),
    "QuantConv2d": ((8, 16, 3), {"padding": 1}, (4, 8, 12, 12)),
    "QuantConv3d": ((8, 6, 3), {}, (4, 8, 6, 6, 6)),
    "QuantConvTranspose1d": ((16, 32, 3), {}, (4, 16, 100)),
    "QuantConvTranspose2d": ((8, 16, 3), {"stride": 2}, (4, 8, 12, 12)),
    "QuantConvTranspose3d": ((8, 6, 3), {}, (4, 8, 6, 6, 6)),
    "QuantLinear": ((64, 32), {}, (5, 16, 64)),
    "QuantScaleBias": ((8, True), {}, (4, 8, 12, 12)),
    "BatchNorm1dToQuantScaleBias": ((8,), {}, (4, 8, 200)),
    "BatchNorm2dToQuantScaleBias": ((8,), {}, (4, 8, 12, 12)),
    "QuantMultiheadAttention": ((64, 4), ATTENTION, (16, 4, 64)),
    "QuantRNN": ((64, 32), RECURRENT, (12, 128, 64)),
    "QuantLSTM": ((64, 32), RECURRENT | GATES, (12, 128, 64)),
}
WEIGHT_QUANTIZERS = [
    Int8WeightPerTensorFloat,
    Int8WeightPerChannelFloat,
    Int8WeightPerTensorFixedPoint,
    Int8WeightNormL2PerChannelFixedPoint,
    Int4WeightPerTensorFloatDecoupled,
    ShiftedUint8WeightPerTensorFloat,
    SignedBinaryWeightPerTensorConst,
    SignedTernaryWeightPerTensorConst,
]
cases = pytest.mark.parametrize("name", CASES)
#: One operation that is linear in its input: its input gradient does not read the stored input.
LINEAR_IN_INPUT = [name for name in CASES if "Conv" in name or name == "QuantLinear"]


def build(module, name, seed=0, **kwargs):
    torch.manual_seed(seed)
    args, fixed, _ = CASES[name]
    layer = getattr(module, name)(*args, **fixed, **kwargs)
    if name.startswith("QuantMulti"):
        nn.init.normal_(layer.in_proj.bias)
    return layer


def forward(layer, x):
    y = layer(x, x, x) if isinstance(layer, qnn.QuantMultiheadAttention) else layer(x)
    return y[0] if isinstance(y, tuple) else y


def step(layer, x, seed=1):
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    y = forward(layer, x * 1.0)
    loss = (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum()
    return y, torch.autograd.grad(loss, [x, *layer.parameters()])


@cases
def test_forward_and_state_are_those_of_the_brevitas_layer(name):
    plain, packed = build(qnn, name), build(bnn, name, act_quant=StochBackward2bit)
    assert isinstance(packed, getattr(qnn, name))
    assert packed.state_dict().keys() == plain.state_dict().keys()
    packed.load_state_dict(plain.state_dict())
    plain.load_state_dict(packed.state_dict())
    x = torch.randn(CASES[name][2])
    assert torch.equal(step(packed, x)[0], step(plain, x)[0])
    packed.eval(), plain.eval()
    assert torch.equal(step(packed, x)[0], step(plain, x)[0])


@cases
def test_layer_stores_less(name, saved_bytes):
    plain, packed = build(qnn, name), build(bnn, name, act_quant=StochBackward2bit)
    x = torch.randn(CASES[name][2])
    plain_bytes, packed_bytes = (saved_bytes(forward, layer, x)[1] for layer in (plain, packed))
    # 2 bits for 32, and for each bucket of 512 six bytes; weights and their fake-quantized copies stay as they are.
    weights = saved_bytes(forward, packed, x[:0])[1] if name in LINEAR_IN_INPUT else packed_bytes - x.nbytes // 2
    assert packed_bytes <= weights + x.nbytes / 2
    assert packed_bytes < plain_bytes


@pytest.mark.parametrize("name", LINEAR_IN_INPUT)
def test_input_gradient_is_exact_and_weight_gradient_is_not(name):
    plain, packed = build(qnn, name), build(bnn, name, act_quant=StochBackward2bit)
    x = torch.randn(CASES[name][2])
    (_, expected), (_, result) = step(plain, x), step(packed, x)
    assert torch.equal(result[0], expected[0])
    for (parameter, _), a, b in zip(packed.named_parameters(), result[1:], expected[1:], strict=True):
        assert torch.equal(a, b) == (parameter == "bias")


@pytest.mark.parametrize("weight_quant", WEIGHT_QUANTIZERS, ids=lambda quant: quant.__name__)
@pytest.mark.parametrize("name", ["QuantConv2d", "QuantConvTranspose2d", "QuantLinear"])
def test_fake_quantized_weights_are_not_packed(name, weight_quant):
    plain, packed = (
        build(module, name, weight_quant=weight_quant, bias=False, **slot)
        for module, slot in ((qnn, {}), (bnn, {"act_quant": StochBackward2bit}))
    )
    x = torch.randint(0, 4, CASES[name][2]).float()  # decodes exactly: a difference is a packed weight
    (_, expected), (_, result) = step(plain, x), step(packed, x)
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@cases
def test_gradients_without_rounding_are_those_of_the_brevitas_layer(name):
    plain, packed = build(qnn, name), build(bnn, name, act_quant=StochBackward2bit, act_bit_width=32)
    x = torch.randn(CASES[name][2])
    (_, expected), (_, result) = step(plain, x), step(packed, x)
    for a, b in zip(result, expected, strict=True):  # up to float32 rounding in another order
        assert torch.linalg.vector_norm(a - b) <= 100 * torch.finfo(a.dtype).eps * torch.linalg.vector_norm(b)


def test_embedding_is_exact():
    plain, packed = qnn.QuantEmbedding(100, 16), bnn.QuantEmbedding(100, 16, act_quant=StochBackward2bit)
    packed.load_state_dict(plain.state_dict())
    index = torch.randint(0, 100, (4096,))
    for layer in (plain, packed):
        layer(index).square().sum().backward()
    assert torch.equal(packed.weight.grad, plain.weight.grad)


def test_batch_norm_to_scale_bias_loads_a_trained_batch_norm(monkeypatch):
    monkeypatch.setattr(brevitas.config, "IGNORE_MISSING_KEYS", True)
    norm = nn.BatchNorm2d(8)
    norm(torch.randn(4, 8, 12, 12) * 3 + 1)
    layer = bnn.BatchNorm2dToQuantScaleBias(8, weight_quant=None, act_quant=StochBackward2bit)
    layer.load_state_dict(norm.state_dict())
    x = torch.randn(4, 8, 12, 12)
    # Folding rounds twice more than the norm itself: a few units in the last place of values of size 1.
    assert torch.allclose(layer(x), norm.eval()(x), rtol=0, atol=16 * torch.finfo(torch.float32).eps)


def test_recurrent_layer_works_with_forward_quantizers(saved_bytes):
    torch.manual_seed(0)
    stock = qnn.QuantLSTM(32, 32)
    torch.manual_seed(0)
    layer = bnn.QuantLSTM(32, 32, act_quant=StochBackward2bit)
    x = torch.randn(6, 128, 32)  # each step has as many elements as the smallest tensor that is packed
    expected, stock_bytes = saved_bytes(lambda: stock(x)[0])
    result, packed_bytes = saved_bytes(lambda: layer(x)[0])
    assert torch.equal(result, expected)
    assert packed_bytes < stock_bytes / 3
