"""A loss on gradients, as forces and penalties are: `double_backward=True` lets them be differentiated again."""

import torch

import brevact

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.SiLU(), torch.nn.Linear(256, 1))
brevact.quantize_backward(model, double_backward=True)
positions = torch.randn(128, 64, requires_grad=True)
with brevact.backward_quant(model):
    (forces,) = torch.autograd.grad(model(positions).sum(), positions, create_graph=True)
    loss = forces.square().mean()
loss.backward()
