"""A Brevitas model, and memory above all: the default keeps forward integers exactly and packs the rest."""

import brevitas.nn as qnn
import torch
from brevitas.quant import Int8WeightPerChannelFloat, Uint8ActPerTensorFloat

import brevact

conv = qnn.QuantConv2d(3, 32, 3, weight_quant=Int8WeightPerChannelFloat, weight_bit_width=4)
relu = qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat, bit_width=4)
model = torch.nn.Sequential(conv, torch.nn.BatchNorm2d(32), relu, torch.nn.AvgPool2d(2))
brevact.quantize_backward(model)
images = torch.randn(8, 3, 32, 32)
with brevact.backward_quant(model):
    loss = model(images).square().mean()
loss.backward()
print(brevact.memory_report(model, images))
