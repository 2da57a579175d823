"""A step whose shapes stay: on a GPU it is replayed as a CUDA graph, without Python."""

import torch

import brevact

device = "cuda" if torch.cuda.is_available() else "cpu"
model = brevact.quantize_backward(torch.nn.Linear(64, 8).to(device))
optimizer = torch.optim.AdamW(model.parameters(), capturable=device == "cuda")


@brevact.captured
def step(inputs, targets):
    optimizer.zero_grad()
    with brevact.backward_quant(model):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss


for _ in range(5):
    loss = step(torch.randn(128, 64, device=device), torch.randn(128, 8, device=device))
