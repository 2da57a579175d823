"""A memory limit: two small batches predict the largest one that fits, plain and packed. Nothing changes."""

import torch

import brevact

LIMIT = 2**28  # bytes for a step, beside weights and optimizer
model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.SiLU(), torch.nn.Flatten())


def peaks(size):
    batch = torch.randn(size, 3, 32, 32)
    report = brevact.step_report(model, batch, lambda model, batch: model(batch).square().mean(), rounds=2)
    return report.plain_peak, report.packed_peak


for name, less, more in zip(("plain", "packed"), peaks(16), peaks(32), strict=True):
    print(f"{name}: batches of up to {32 + (LIMIT - more) * 16 // (more - less)}")
