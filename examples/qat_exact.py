"""A Brevitas model, and gradients that must not change: `LosslessBackward` keeps them to the last bit."""

import brevitas.nn as qnn
import torch
from brevitas.quant import Int8WeightPerChannelFloat, Uint8ActPerTensorFloat

import brevact

conv = qnn.QuantConv2d(32, 32, 3, weight_quant=Int8WeightPerChannelFloat, weight_bit_width=4)
model = torch.nn.Sequential(qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat, bit_width=4), conv)
brevact.quantize_backward(model, brevact.LosslessBackward)
images = torch.randn(8, 32, 32, 32, requires_grad=True)
with brevact.backward_quant(model):
    loss = model(images).square().mean()
loss.backward()
print(brevact.memory_report(model, images))
