"""A compiled model: compile after `quantize_backward`; the kernels become ops of the graph."""

import torch

import brevact

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.SiLU(), torch.nn.Linear(128, 8))
brevact.quantize_backward(model)
compiled = torch.compile(model, fullgraph=True)
compiled(torch.randn(128, 64)).square().mean().backward()
