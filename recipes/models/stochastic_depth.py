"""Residual branches that are left out at random."""

import torch
from torch import Tensor, nn


class StochasticDepth(nn.Module):
    """Drops whole samples of a residual branch: y = x * keep / (1 - p), keep ~ Bernoulli(1 - p) for each sample.

    Source: Huang et al., Deep Networks with Stochastic Depth, arXiv:1603.09382.
    """

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.probability == 0.0:
            return x
        kept = 1.0 - self.probability
        draws = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device)
        return x * ((draws < kept).to(x.dtype) / kept)
