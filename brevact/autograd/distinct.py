"""Save dense results of pointwise functions of expanded tensors by their distinct elements, bit-exactly.

``Normal(mean, 0.5)`` divides by ``2 * scale**2``, as large as the mean, with all elements equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from brevact.autograd import known_values, storage_report
from brevact.autograd.ops.base import is_plain
from brevact.autograd.saved import Decoder, Keeper, Saved, one_object_each
from brevact.autograd.storages import is_tracked
from brevact.autograd.strides import with_strides


@dataclass(frozen=True, slots=True)
class _Distinct(Decoder):
    shape: torch.Size
    stride: tuple[int, ...]
    lasts = allows_double_backward = True

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return with_strides(tensors[0].expand(self.shape), self.stride)

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        return storage_report.EXACT, self.shape.numel() * tensors[0].itemsize


_distinct = one_object_each(_Distinct)


def keep_distinct(x: Tensor) -> Saved | None:
    """Return the saved form of a tensor known by its distinct elements; None for others."""
    known = known_values.find(x) if is_tracked(x) else None
    return known if known is not None and type(known[1]) is _Distinct else None


def track_distinct(region: Keeper, args: tuple, tensors: list[Tensor], result: Any) -> None:
    """Record a pointwise function of numbers and tensors that are all expanded along a dimension."""
    if type(result) is not Tensor or result.numel() < region.settings.min_numel:
        return
    first = args[0] if args else None
    if type(first) is Tensor and (not is_plain(first) or (0 not in first.stride() and not is_tracked(first))):
        return  # the common case
    dims = {dim for dim, size in enumerate(result.shape) if size > 1}
    for x in tensors:
        dims &= _dims_of_same(x, result.dim())
    if dims and 0 not in result.stride():
        part = result.detach()
        for dim in dims:
            part = part.narrow(dim, 0, 1)
        region.register(result, ((part.clone(),), _distinct(result.shape, result.stride())))


def _dims_of_same(x: Tensor, count: int) -> set[int]:
    """Return those of a result's ``count`` dimensions along which ``x``, which broadcasts to it, is constant."""
    if not is_plain(x):
        return set()
    known = keep_distinct(x)
    sizes = x.shape if known is None else known[0][0].shape
    own = zip(range(count - x.dim(), count), sizes, x.stride(), strict=True)
    return {*range(count - x.dim()), *(dim for dim, size, stride in own if size == 1 or not stride)}
