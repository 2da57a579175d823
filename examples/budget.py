"""A budget of memory: `fit` gives each layer the bits that make the least noise within it."""

import torch

import brevact

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.SiLU(), torch.nn.Linear(128, 8))
batches = list(torch.randn(4, 128, 64))
policy = brevact.fit(model, batches, lambda model, batch: model(batch).square().mean(), ratio=8, progress=False)
brevact.quantize_backward(model, policy)
policy.save("policy.json")
print(policy.report)
