"""Ops that reduce rows and elements into others: indices are saved, and for extremes which were chosen.

With an index i_e for each element e of the source x, the result y and its gradient g:

    scatter_reduce, index_reduce
        sum, mean                     dL/dx_e = g[i_e] / N[i_e],  N the number of elements that meet there, 1 for a sum
        amax, amin                    dL/dx_e = g[i_e] [x_e = y[i_e]] / M[i_e],  M the number of those that are equal

Elements are only compared, yet torch saves source, target and result. Masks of one bit per element hold the same
information; the gradient is torch's to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brevact.autograd.keeper import Keeper
from brevact.autograd.ops.base import Saving, is_inplace, load, requires_grad, save
from brevact.autograd.ops.op import EXACT, Op, Stored
from brevact.autograd.saved import Saved
from brevact.autograd.store import keep_mask, keep_places


class _Places(NamedTuple):
    """Destinations of elements along a dimension: one index per element, or per row."""

    dim: int
    is_by_row: bool
    inplace: bool

    def take(self, x: Tensor, index: Tensor) -> Tensor:
        return x.index_select(self.dim, index) if self.is_by_row else x.gather(self.dim, index)

    def add(self, x: Tensor, index: Tensor, source: Tensor) -> Tensor:
        """Return ``x`` with the source's elements added."""
        return (x.index_add if self.is_by_row else x.scatter_add)(self.dim, index, source)

    def clear(self, x: Tensor, index: Tensor) -> Tensor:
        """Return ``x`` with 0 at the index."""
        return (x.index_fill if self.is_by_row else x.scatter)(self.dim, index, 0)


class _Reduction(Saving):
    """``scatter_reduce`` or ``index_reduce``."""

    @staticmethod
    def forward(
        ctx: Any,
        region: Keeper,
        call: Callable[..., Tensor],
        places: _Places,
        reduce: str,
        include_self: bool,
        input: Tensor,
        index: Tensor,
        source: Tensor,
    ) -> Tensor:
        is_extreme = reduce in _EXTREMES
        before = input.clone() if places.inplace and is_extreme else input
        out = call(input, index, source)
        masks: tuple[Saved, ...] = ()
        if is_extreme:
            masks = keep_mask(before == out), keep_mask(source == places.take(out, index))
        if places.inplace:
            ctx.mark_dirty(input)
        save(ctx, *masks, keep_places(index, region.settings, input.shape))
        ctx.places, ctx.reduce, ctx.include_self, ctx.shape = places, reduce, include_self, source.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *masks, kept = load(ctx)
        index, places, grad_input, of_source = kept.decode(), ctx.places, grad, None
        if masks:
            of_input, of_source = (mask.decode().to(grad.dtype) for mask in masks)
            grad = grad / places.add(of_input, index, of_source)
            grad_input = of_input * grad
        elif ctx.reduce == "mean":
            counts = torch.ones_like(grad) if ctx.include_self else torch.zeros_like(grad)
            counts = places.add(counts, index, grad.new_ones(()).expand(ctx.shape))
            grad = grad_input = grad / counts.masked_fill_(counts == 0, 1)
        grad_source = places.take(grad, index)
        if of_source is not None:
            grad_source = of_source * grad_source
        if not ctx.include_self:
            grad_input = places.clear(grad_input, index)
        return None, None, None, None, None, grad_input, None, grad_source


_EXTREMES = frozenset(("amax", "amin"))


def _can_store(region: Keeper, input: Any, dim: Any, index: Any, source: Any) -> bool:
    """Return whether torch would save large elements: plain tensors of one dtype, beside an index."""
    if not (region.is_activation(input) and region.is_activation(source) and isinstance(index, Tensor)):
        return False
    if not isinstance(dim, int) or not requires_grad(input, source) or input.dtype != source.dtype:
        return False
    largest = max(input.numel(), source.numel())
    same = input.dim() == source.dim() > 0 and -input.dim() <= dim < input.dim()
    return same and source.numel() > 0 and largest >= region.settings.min_numel and input.device == source.device


def _reducing(is_by_row: bool) -> Callable:
    """Make the handler of ``index_reduce`` or ``scatter_reduce``."""

    def handle(
        region: Keeper,
        func: Callable,
        input: Any,
        dim: Any,
        index: Any,
        src: Any = None,
        reduce: Any = None,
        *,
        include_self: Any = True,
        **kwargs: Any,
    ) -> Any:
        if is_by_row and src is None:
            src = kwargs.pop("source", None)
        if kwargs or reduce not in ("sum", "mean", *_EXTREMES) or not _can_store(region, input, dim, index, src):
            return NotImplemented  # products are singular
        if index.dim() != 1 if is_by_row else index.shape != src.shape:
            return NotImplemented
        places = _Places(dim, is_by_row, is_inplace(func, (), {}))

        def call(x: Tensor, i: Tensor, s: Tensor) -> Tensor:
            return func(x, dim, i, s, reduce, include_self=include_self)

        return region.apply(_Reduction, call, places, reduce, bool(include_self), input, index, src)

    return handle


_STORED = Stored(
    "`scatter_reduce`, `index_reduce` (sum, mean, amax, amin)",
    "the indices; of extremes, masks of 1 bit an element",
    EXACT,
)
OPS = tuple(
    Op((getattr(torch, name), getattr(Tensor, name), getattr(Tensor, name + "_")), handler, _STORED)
    for name, handler in (
        ("scatter_reduce", _reducing(False)),
        ("index_reduce", _reducing(True)),
    )
)
