"""Statistics that forward quantizers compute for their scales: backward needs existing tensors, or one element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from brevact.autograd.ops.base import Needs, OfWeight, compute_from_weight, save
from brevact.autograd.saving import storage_report
from brevact.autograd.saving.saved import Region
from brevact.private_names.of_torch import DisableTorchFunction

_BLOCK = 512
_MOST_OF_BLOCKS = 8  #: At most one block in this many is searched.


def kth_magnitude(x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return ``torch.kthvalue(x.abs(), rank, keepdim=True)`` of (n,) floats, with the same choice among equal ones."""
    found = _among_the_largest(x, rank) if x.is_contiguous() else None
    if found is None:
        value, index = torch.kthvalue(x.abs(), rank, dim=0, keepdim=True)
        return value, index
    return found


def _among_the_largest(x: Tensor, rank: int) -> tuple[Tensor, Tensor] | None:
    """Select in blocks; None where that is no faster, for NaN, and if several elements are the k-th.

    With r = n - k + 1, the r-th largest of the blocks' largest magnitudes bounds the r-th largest of all from below:
    the blocks that reach it, about r, hold every element that does.
    """
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


def weight_statistics(region: Region, compute: Callable[..., Tensor], *weights: Tensor) -> Tensor:
    """Statistics of one or several weights; backward reruns ``compute``, which has no random numbers and no state."""
    storage_report.report_op(weight_statistics)
    return compute_from_weight(region, compute, *weights)


def absolute_percentile(region: Region, x: Tensor, q: float, dim: int | None, keepdim: bool) -> Tensor:
    """Percentile of magnitudes, as ``AbsPercentile``; one element has the gradient."""
    storage_report.report_op(absolute_percentile)
    with DisableTorchFunction(), region.hooks.suspended:
        flat, known = x.view(-1) if dim is None else x.reshape(-1), x.detach()
        if dim is None:
            index = kth_magnitude(known.view(-1), _rank(q, known.numel()))[1].view(1)
        else:
            index = torch.kthvalue(known.abs(), _rank(q, known.shape[dim]), dim=dim, keepdim=True)[1]
            others = torch.arange(index.numel(), device=x.device).view(index.shape)
            index = index * x.shape[1] + others if dim in (0, -2) else others * x.shape[1] + index
        found = flat.index_select(0, index.view(-1)).view(() if dim is None else index.shape).abs()
        return found if keepdim or dim is None else found.squeeze(dim)


def magnitude_of_all(x: Tensor, q: float) -> Tensor:
    with DisableTorchFunction():
        flat = x.detach().reshape(-1)
        return kth_magnitude(flat, _rank(q, flat.numel()))[0].squeeze(0)


def _rank(q: float, numel: int) -> int:
    return math.floor(0.01 * q * numel + 0.5)


def _scale(value: Tensor, threshold: Tensor, least: float | None, learns: bool) -> Tensor:
    """s = max(|v|, least) / t, with dL/dv = sgn(v) (dL/ds / t) for parameters (brevitas.core.scaling.ParameterScaling).

    For nonnegative statistics v (StatsFromParameterScaling) the sign is that of max(v, least).
    """

    def run(ctx: Any, value: Tensor, threshold: Tensor) -> Tensor:
        magnitude = value.abs() if learns else value
        bounded = magnitude if least is None else magnitude.clamp_min(least)
        save(ctx, exact=(value if learns else bounded, threshold))
        return bounded / threshold

    return OfWeight.record(None, run, _of_scale, value, threshold)


def _of_scale(needs: Needs, grad: Tensor, signed: Tensor, threshold: Tensor) -> tuple[Tensor, None]:
    return (grad / threshold).to(signed.dtype).mul_(signed.sgn()), None


def learned_scale(value: Tensor, threshold: Tensor, least: float | None) -> Tensor:
    """Return scales of a parameter; ``threshold``: positive, 0-d; ``least``: smallest magnitude, None for none."""
    if value.numel() == 1 and value.is_cpu and (least is None or not abs(value.item()) < least):
        return value.abs() / threshold  # its gradient in C++ is the same
    return _scale(value, threshold, least, True)


def scale_of_magnitudes(magnitudes: Tensor, threshold: Tensor, least: float) -> Tensor:
    """Return scales of nonnegative statistics, NaN for NaN; ``threshold``: positive, 0-d, of the same dtype."""
    return _scale(magnitudes, threshold, least, False)
