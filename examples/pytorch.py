"""A PyTorch model: call `quantize_backward` once, and run the forward pass and the loss in the model's region."""

import torch

import brevact

model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.SiLU(), torch.nn.Flatten())
optimizer = torch.optim.AdamW(model.parameters())
brevact.quantize_backward(model)
for images in torch.randn(3, 16, 3, 32, 32):
    with brevact.backward_quant(model):
        loss = model(images).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
