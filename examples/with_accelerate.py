"""Accelerate, or a loop of your own with a policy as text: `begin`, `step`, `end`."""

import torch
from accelerate import Accelerator

import brevact
from brevact.trainers import TrainingPolicy

accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.SiLU(), torch.nn.Linear(128, 8))
loader = torch.utils.data.DataLoader(torch.randn(512, 64), 128)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
policy = TrainingPolicy("default")
policy.begin(accelerator.unwrap_model(model), loader, lambda model, batch: model(batch).square().mean())
for batch in loader:
    with brevact.backward_quant(model):
        loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    policy.step()
policy.end()
