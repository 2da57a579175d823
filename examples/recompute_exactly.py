"""Exact gradients in fewer bytes: backward recomputes cheap layers, the rest is stored unrounded."""

import torch

import brevact

layers = [torch.nn.Conv2d(8, 32, 1), torch.nn.BatchNorm2d(32), torch.nn.SiLU()]
layers += [torch.nn.Conv2d(32, 32, 3, padding=1, groups=32), torch.nn.BatchNorm2d(32), torch.nn.SiLU()]
model = torch.nn.Sequential(*layers, torch.nn.Conv2d(32, 8, 1))
batch = torch.randn(16, 8, 32, 32)
brevact.quantize_backward(model, brevact.LosslessBackward, recompute=1024)
with brevact.backward_quant(model):
    loss = model(batch).square().mean()
loss.backward()
print(brevact.memory_report(model, batch))
