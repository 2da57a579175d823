"""A model with checkpoints: tensors outside of them are packed; a rule packs their inputs, too."""

import torch
from torch.utils.checkpoint import checkpoint

import brevact

block = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
rows = torch.randn(256, 64, requires_grad=True)
policy = brevact.Policy({checkpoint: brevact.StochBackward8bit, "*": brevact.DitherBackward4bit})
with brevact.backward_quant(policy):
    loss = checkpoint(block, rows, use_reentrant=False).square().mean()
loss.backward()
