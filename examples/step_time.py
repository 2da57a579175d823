"""Any model: measure time and peak memory of a training step, plain and packed, in turns. Nothing changes."""

import torch

import brevact


def loss(model, batch):
    return model(batch).square().mean()


model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.SiLU(), torch.nn.Flatten())
print(brevact.step_report(model, torch.randn(16, 3, 32, 32), loss, rounds=3))
