"""Ranges of groups as kernels leave them: integers of the order of the floats, for parts of the groups."""

from __future__ import annotations

import torch
from torch import Tensor


def ranges_of_keys(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Join the ranges of parts; see `grid_reference.ranges`.

    Args:
        keys: (parts, 3, G) int32 keys of the lowest and the highest finite value, and numbers of the other elements.

    Returns:
        `(low, high, missing)`, each (G,): float32, float32 and int64.
    """
    joined = keys[:, 0].amin(0), keys[:, 1].amax(0)
    empty = joined[0] > joined[1]
    low, high = ((key ^ ((key >> 31) & 0x7FFFFFFF)).view(torch.float32) for key in joined)
    low, high = (low + 0.0).masked_fill(empty, float("nan")), (high + 0.0).masked_fill(empty, float("nan"))
    return low, high, keys[:, 2].sum(0)
