"""A compiled model: the compiler chooses the saved tensors, and these are packed."""

import torch

import brevact

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.SiLU(), torch.nn.Linear(128, 8))
compiled = brevact.compile(model, fullgraph=True)
compiled(torch.randn(128, 64)).square().mean().backward()
