"""Operands of products and attention: views of one tensor share its packed form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from brevact.autograd.call_arguments import BoundCall
from brevact.autograd.decoders import Mapped
from brevact.autograd.saved import Keeper, Saved
from brevact.private_names.of_torch import is_any_autocast_enabled


def _view(x: Tensor, order: tuple[int, ...], shape: torch.Size) -> Tensor:
    return x.permute(order).expand(shape)


def keep_operand(region: Keeper, x: Tensor) -> Saved:
    """Save an operand in memory order: views (a transposed key, a projection's heads, an expansion) are packed once."""
    if (x.is_leaf and x.requires_grad) or region.is_weight(x):
        return region.keep_activation(x)
    if x.is_contiguous():
        return region.keep(x)
    strides = x.stride()
    apart = [i for i, size in enumerate(x.shape) if size > 1 and strides[i]]
    order = list(range(x.dim()))
    for i, source in zip(apart, sorted(apart, key=lambda i: -strides[i]), strict=True):
        order[i] = source
    base = x
    for i, size in enumerate(x.shape):
        if size > 1 and not strides[i]:  # expanded: one of its equal slices, with the stride of a dimension of size 1
            base = base.select(i, 0).unsqueeze(i)
    if base is x and order == list(range(x.dim())):
        return region.keep(x)
    tensors, decoder = region.keep(base.permute(order))
    inverse = tuple(order.index(i) for i in range(x.dim()))
    return tensors, Mapped(decoder, BoundCall(_view, (Tensor, inverse, x.shape)))


def without_autocast_cache(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call torch inside a Function; other ops must not get autocast's weight copies, which have no graph here."""
    if not (is_any_autocast_enabled() and torch.is_autocast_cache_enabled()):
        return call(*args, **kwargs)
    torch.set_autocast_cache_enabled(False)
    try:
        return call(*args, **kwargs)
    finally:
        torch.set_autocast_cache_enabled(True)
