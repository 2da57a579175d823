"""The k-th smallest magnitude of many elements, for k near their number, as percentiles of activations are.

Each block of elements has a largest magnitude. With r = n - k + 1, the r-th largest of these bounds the r-th largest of
all from below, so the blocks that reach it, about r of them, hold every element that does. This takes two passes over
all elements, which PyTorch vectorizes, and a selection among few.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 512
_MOST_OF_BLOCKS = 8
"""At most one block in this many is searched."""


def kth_magnitude(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return ``torch.kthvalue(x.abs(), rank, keepdim=True)`` of (n,) floats, with the same choice among equal ones."""
    found = _among_the_largest(x, rank) if x.is_contiguous() else None
    if found is None:
        value, index = torch.kthvalue(x.abs(), rank, dim=0, keepdim=True)
        return value, index
    return found


def _among_the_largest(x: Tensor, rank: int) -> tuple[Tensor, Tensor] | None:
    """Select in blocks; None where that is no faster, for NaN, and if several elements are the k-th."""
    numel = x.numel()
    blocks, from_above = numel // _BLOCK, numel - rank + 1
    if not 1 <= from_above <= blocks // _MOST_OF_BLOCKS:
        return None
    rows = x[: blocks * _BLOCK].view(blocks, _BLOCK)
    largest = torch.maximum(rows.amax(1), rows.amin(1).neg())
    bound = torch.kthvalue(largest, blocks - from_above + 1)[0]
    places = (largest >= bound).nonzero().squeeze(1)
    if largest.amax().isnan() or len(places) > blocks // _MOST_OF_BLOCKS:
        return None
    tail = torch.arange(blocks * _BLOCK, numel, device=x.device)
    index = torch.cat(((places[:, None] * _BLOCK + torch.arange(_BLOCK, device=x.device)).view(-1), tail))
    magnitudes = x[index].abs()
    value = torch.kthvalue(magnitudes, len(magnitudes) - from_above + 1, keepdim=True)[0]
    equal = (magnitudes == value).nonzero()
    if len(equal) != 1:  # torch picks one of them; none is equal to a NaN in the tail
        return None
    return value, index[equal.view(1)]
