"""Any model: measure a training step's saved bytes, layer by layer. Nothing changes."""

import torch

import brevact

model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.SiLU(), torch.nn.Flatten())
report = brevact.memory_report(model, torch.randn(16, 3, 32, 32))
print(report)
print(f"{report.plain_bytes / report.saved_bytes:.1f} times less")
