"""Pooling: the fewest bits, torch's indices, and the arguments that torch takes and refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from brevact.autograd import region
from tests.autograd.measuring import settings, watch_saved


@pytest.mark.parametrize("window", [(1, 2), (2, 2), (3, 3), (5, 5), (16, 17)])
def test_max_pool_stores_the_fewest_bits(window):
    x = torch.randn(8, 16, 40, 40, requires_grad=True).clone()
    with watch_saved() as saved, region(settings()):
        out = torch.nn.functional.max_pool2d(x, window, stride=2)
    bits = (window[0] * window[1] - 1).bit_length()
    assert saved.nbytes == -(-out.numel() // 8) * bits


def test_max_pool_returns_torchs_indices():
    x = torch.randn(2, 3, 10, 10, requires_grad=True)
    pool = nn.MaxPool2d(3, 2, 1, return_indices=True)
    expected = pool(x)
    with region(settings()):
        out = pool(x)
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))
    out[0].sum().backward()


POOLINGS = {
    F.max_pool1d: (2, 4, 1024),
    F.max_pool2d: (2, 4, 32, 32),
    F.max_pool3d: (2, 4, 8, 16, 16),
}


WINDOWS = [
    *({"kernel_size": size} for size in (0, 5000, True, 3.0, None, [], (3, 2), (2,), torch.tensor(3))),
    *({"kernel_size": 3, "stride": stride} for stride in (0, [], (1, 1), torch.tensor(2), 2)),
    *({"kernel_size": 3, "padding": padding} for padding in (-1, 1, 2, (), (1, 1), True)),
]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("pool", POOLINGS, ids=lambda pool: pool.__name__)
def test_pooling_takes_and_refuses_what_torch_does(pool, window):
    leaf = torch.randn(POOLINGS[pool], requires_grad=True)
    outcomes = []
    for chosen in (None, settings(bit_width=2)):
        try:
            with region(chosen):
                y = pool(leaf * 1, **window)
        except Exception as error:
            outcomes.append((type(error), str(error).split("\n")[0]))
        else:
            outcomes.append((y.detach().tolist(), torch.autograd.grad(y, leaf, torch.ones_like(y))[0].tolist()))
    assert outcomes[0] == outcomes[1]
