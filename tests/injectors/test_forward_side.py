import brevitas.nn as qnn
import pytest
import torch
from brevitas.quant import (
    Int8ActPerTensorFloat,
    Int8WeightPerTensorFloat,
    ShiftedUint8ActPerTensorFloat,
    Uint8ActPerTensorFloat,
)

from brevact.injectors import NearestBackward4bit, StochBackward2bit

FORWARD_QUANTIZERS = [Uint8ActPerTensorFloat, ShiftedUint8ActPerTensorFloat, Int8ActPerTensorFloat]


def train_then_eval(layer, x):
    outputs = [layer(x) for _ in range(2)]
    outputs.append(layer.eval()(x))
    return outputs, layer.state_dict()


@pytest.mark.exhaustive
@pytest.mark.parametrize("forward_quant", FORWARD_QUANTIZERS)
def test_forward_quant_gives_the_forward_and_state_of_the_stock_layer(forward_quant):
    x = torch.randn(4, 2048)
    expected, expected_state = train_then_eval(qnn.QuantReLU(act_quant=forward_quant), x)
    layer = qnn.QuantReLU(act_quant=StochBackward2bit, forward_quant=forward_quant, bucket_size=128)
    result, state = train_then_eval(layer, x)
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert state.keys() == expected_state.keys()
    assert all(torch.equal(state[name], expected_state[name]) for name in state)


def test_state_loads_both_ways():
    x = torch.randn(4, 2048)
    stock = qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat)
    layer = qnn.QuantReLU(act_quant=StochBackward2bit, forward_quant=Uint8ActPerTensorFloat)
    _, state = train_then_eval(stock, x)
    layer.load_state_dict(state)
    assert torch.equal(layer.eval()(x), stock(x))
    stock.load_state_dict(layer.state_dict())


def test_input_slot_takes_a_forward_quantizer():
    torch.manual_seed(0)
    stock = qnn.QuantConv2d(4, 4, 3, input_quant=Int8ActPerTensorFloat, input_bit_width=6)
    layer = qnn.QuantConv2d(
        4, 4, 3, input_quant=StochBackward2bit, input_forward_quant=Int8ActPerTensorFloat, input_forward_bit_width=6
    )
    with torch.no_grad():
        layer.weight.copy_(stock.weight)
        layer.bias.copy_(stock.bias)
    x = torch.randn(2, 4, 16, 16)
    assert torch.equal(layer(x), stock(x))
    assert layer.state_dict().keys() == stock.state_dict().keys()


@pytest.mark.parametrize("forward_quant", [Int8WeightPerTensorFloat, NearestBackward4bit, "Uint8ActPerTensorFloat", 8])
def test_forward_quant_refuses_what_quantizes_no_activation(forward_quant):
    with pytest.raises(TypeError, match="is no forward activation quantizer; accepted"):
        qnn.QuantReLU(act_quant=StochBackward2bit, forward_quant=forward_quant)


def test_forward_keyword_without_forward_quantizer_raises():
    with pytest.raises(ValueError, match="forward_bit_width=4 sets a forward quantizer, but there is none"):
        qnn.QuantReLU(act_quant=StochBackward2bit, forward_bit_width=4)


def test_hard_tanh_works_without_forward_quantizer():
    x = torch.linspace(-2, 2, 4096, requires_grad=True)
    layer = qnn.QuantHardTanh(act_quant=StochBackward2bit)
    narrow = qnn.QuantHardTanh(act_quant=StochBackward2bit, min_val=-0.5, max_val=0.25)
    assert torch.equal(layer(x), x.clamp(-1, 1))
    assert torch.equal(narrow(x), x.clamp(-0.5, 0.25))
    layer(x).sum().backward()
    assert torch.equal(x.grad, (x.abs() < 1).float())


def test_activation_keyword_reaches_the_activation():
    layer = qnn.QuantReLU(act_quant=StochBackward2bit, forward_quant=None, inplace=True)
    x = torch.randn(16)
    assert layer(x).data_ptr() == x.data_ptr()
    assert (x >= 0).all()
