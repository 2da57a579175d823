"""A quantizer of your own: a subclass, or `.let(...)`."""

import torch

import brevact


class SmallBuckets(brevact.StochBackward2bit):
    bucket_size = 128


model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.SiLU(), torch.nn.Linear(128, 8))
nearest = brevact.StochBackward4bit.let(rounding="nearest")
brevact.quantize_backward(model, {"2": nearest, "*": SmallBuckets})
with brevact.backward_quant(model):
    loss = model(torch.randn(128, 64)).square().mean()
loss.backward()
