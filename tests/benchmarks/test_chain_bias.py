"""What derives from a packed tensor is biased by curvature: far less than minibatches differ, in nets that learnt."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from brevact.reports.gradient_noise import exact_gradients, gradient_noise


class Loss(nn.Module):
    """A convolutional net of norms and activation functions, and its loss."""

    def __init__(self, act: type[nn.Module]) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), act()),
            *(nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(32), act()),
            *(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), act()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
        )

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(images), labels)


def batches(count: int, first: int = 0) -> list[dict[str, Tensor]]:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(first))
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    chosen = [order[i * 64 % 1728 :][:64] for i in range(count)]
    return [{"images": images[index], "labels": labels[index]} for index in chosen]


@pytest.mark.exhaustive
@pytest.mark.parametrize("act", [nn.SiLU, nn.GELU, nn.Hardswish, nn.ReLU])
def test_the_bias_of_chains_is_below_a_hundredth_of_minibatch_noise(act):
    torch.manual_seed(0)
    model = Loss(act)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(3):
        for batch in batches(27, first=epoch):
            optimizer.zero_grad()
            loss = model(**batch)
            loss.backward()
            optimizer.step()
    assert loss < 0.7  # it has learnt: chance is 2.3
    exact = exact_gradients(model, batches(24, first=3), lambda model, batch: model(**batch))
    brevact.quantize_backward(model)
    noise, bias = gradient_noise(model, batches(6, first=3), lambda model, batch: model(**batch), exact, draws=24)
    assert 0 < noise.value < 0.5
    assert bias.value < 0.01 and bias.error < 0.002  # the estimate is sharp enough for 5 standard errors to tell
