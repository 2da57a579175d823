"""Ways to train in less memory: the models that they are compared on."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.alternatives import Blocks, Residual


def test_blocks_that_are_recomputed_have_the_same_gradients():
    torch.manual_seed(0)
    modules = nn.Conv2d(3, 8, 1), Residual(8), Residual(8), nn.Flatten()
    x, found = torch.randn(2, 3, 8, 8), []
    for recomputes in (False, True):
        model = Blocks(*modules, recomputes=recomputes)
        model(x).square().mean().backward()
        found.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    assert all(map(torch.equal, *found)) and all(grad.any() for grad in found[0])
