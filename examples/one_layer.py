"""One layer of a model: `act_quant=` with a backward quantizer, on Brevitas' layers and on those of `brevact.nn`."""

import brevitas.nn as qnn
import torch
from brevitas.quant import Int8WeightPerTensorFloat

import brevact
import brevact.nn as bnn

conv = qnn.QuantConv2d(3, 32, 3, weight_quant=Int8WeightPerTensorFloat, act_quant=brevact.StochBackward2bit)
norm = bnn.BatchNorm2d(32, act_quant=brevact.StochBackward4bit, act_bucket_size=256)
model = torch.nn.Sequential(conv, norm, torch.nn.SiLU())
model(torch.randn(8, 3, 32, 32)).square().mean().backward()
