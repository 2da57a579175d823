"""Ranges of groups as kernels leave them: integers of the order of the floats, for parts of the groups."""

from __future__ import annotations

import torch
from torch import Tensor


def ranges_of_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Join the ranges of parts; see `grid_reference.ranges`.

    Args:
        keys: (parts, 2, G) int32 keys of the lowest and the highest value.

    Returns:
        `(low, high)`, each (G,) float32.
    """
    joined = keys[:, 0].amin(0), keys[:, 1].amax(0)
    low, high = ((key ^ ((key >> 31) & 0x7FFFFFFF)).view(torch.float32) for key in joined)
    broken = ~(torch.isfinite(low) & torch.isfinite(high))
    return (low + 0.0).masked_fill(broken, float("nan")), (high + 0.0).masked_fill(broken, float("nan"))
