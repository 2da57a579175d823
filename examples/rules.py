"""Parts of a model that need other bits: rules by name, type or function. The first match wins."""

import torch

import brevact

block = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
model = torch.nn.Sequential(torch.nn.Embedding(100, 64), block, torch.nn.Linear(64, 100))
rules = {
    "2": None,  # full precision
    torch.nn.LayerNorm: brevact.StochBackward8bit,
    "*": brevact.DitherBackward4bit,
}
brevact.quantize_backward(model, rules)
with brevact.backward_quant(model):
    loss = model(torch.randint(0, 100, (8, 128))).square().mean()
loss.backward()
print(brevact.backward_policy(model))
