"""The examples of the public interface that concern layers and injectors, as a user writes them."""

import brevitas.nn as qnn
import torch
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat, Uint8ActPerTensorFloat

import brevact.nn as bnn
from brevact import NearestBackward4bit, SaveMode, StochBackward2bit


def train_one_step(layer, x):
    y = layer(x)
    y.square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters() if parameter.requires_grad)
    return y


def test_example_layers_with_a_slot_beside_the_forward_ones():
    conv = bnn.QuantConv2d(
        64,
        128,
        3,
        padding=1,
        weight_quant=Int8WeightPerTensorFloat,
        input_quant=Int8ActPerTensorFloat,
        act_quant=StochBackward2bit,
        act_bucket_size=256,
    )
    norm = bnn.BatchNorm2d(128, act_quant=NearestBackward4bit)
    act = bnn.SiLU(act_quant=StochBackward2bit)
    assert conv.act_quant.settings.quantizer.bucket_size == 256
    assert conv.input_quant.is_quant_enabled and conv.weight_quant.is_quant_enabled
    y = train_one_step(torch.nn.Sequential(conv, norm, act), torch.randn(2, 64, 8, 8))
    assert y.shape == (2, 128, 8, 8)


def test_example_stock_brevitas_layers():
    relu = qnn.QuantReLU(act_quant=StochBackward2bit)
    both = qnn.QuantReLU(act_quant=StochBackward2bit, forward_quant=Uint8ActPerTensorFloat, bucket_size=128)
    conv = qnn.QuantConv2d(3, 64, 3, input_quant=StochBackward2bit, input_bit_width=4)
    assert relu.act_quant.backward_quant.settings.quantizer.bucket_size == 512
    assert both.act_quant.backward_quant.settings.quantizer.bucket_size == 128
    assert both.act_quant.bit_width() == 8
    assert conv.input_quant.backward_quant.settings.quantizer.bit_width == 4
    train_one_step(torch.nn.Sequential(conv, relu, both), torch.randn(2, 3, 16, 16))


def test_example_injectors_compose_as_in_brevitas():
    class MyBackward(StochBackward2bit):
        bucket_size = 128

    ablation = StochBackward2bit.let(save_mode=SaveMode.QUANTIZE_ON_BACKWARD)
    assert bnn.SiLU(act_quant=MyBackward).act_quant.settings.quantizer.bucket_size == 128
    assert bnn.SiLU(act_quant=ablation).act_quant.settings.save_mode is SaveMode.QUANTIZE_ON_BACKWARD
