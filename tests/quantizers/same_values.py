"""Comparison of values to the bit."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_same_values(got: Tensor, want: Tensor) -> None:
    """Check for the same bytes, on whatever device, but for those of NaNs, which are written in several ways."""
    got = got.cpu()
    assert torch.equal(got.isnan(), want.isnan())
    got, want = (x.masked_fill(x.isnan(), 0.0) for x in (got, want))
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
