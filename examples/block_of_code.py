"""A block of code, without a model to change: ops in the region are packed."""

import torch

import brevact

net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
rows = torch.randn(128, 64)
with brevact.backward_quant(brevact.DitherBackward4bit):
    loss = net(rows).square().mean()
loss.backward()
