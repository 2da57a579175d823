"""A model, and doubts: measure the noise that packing adds, in units of the noise between minibatches."""

import torch

import brevact

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.SiLU(), torch.nn.Linear(128, 8))
batches = list(torch.randn(4, 128, 64))


def loss(model, batch):
    return model(batch).square().mean()


report = brevact.gradient_report(model, batches, loss, layers=None, progress=False)
print(f"noise {report.noise:.4f} ± {report.noise_error:.4f}")
