"""Ops that move elements: indices, masks and sampling points are saved exactly, elements only where they matter.

Gradients by the elements do not depend on them: torch saves a gather's or a reflected or replicated border's input for
its sizes alone. A sampling grid is saved exactly: packed points would lie between other elements. dL/dgrid is linear in
the packed input: unbiased.

Ops that reduce rows and elements into others: indices are saved, and for extremes which were chosen.

With an index i_e for each element e of the source x, the result y and its gradient g:

    scatter_reduce, index_reduce
        sum, mean                     dL/dx_e = g[i_e] / N[i_e],  N the number of elements that meet there, 1 for a sum
        amax, amin                    dL/dx_e = g[i_e] [x_e = y[i_e]] / M[i_e],  M the number of those that are equal

Elements are only compared, yet torch saves source, target and result. Masks of one bit per element hold the same
information; the gradient is torch's to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.derived import Kind
from brevact.autograd.keeper import Keeper
from brevact.autograd.ops.base import Saving, blank, is_inplace, load, requires_grad, run_inside, save
from brevact.autograd.ops.op import (
    EXACT,
    MASKS,
    NOTHING,
    UNBIASED,
    Op,
    Saves,
    Stored,
    everywhere,
    places_in_first,
)
from brevact.autograd.saved import Saved
from brevact.autograd.store import keep_mask, keep_places
from brevact.private_names.of_torch import nn_pad

aten = torch.ops.aten


class _GridSample(Saving):
    @staticmethod
    def forward(
        ctx: Any,
        region: Keeper,
        call: Callable[[Tensor, Tensor], Tensor],
        options: tuple[int, int, bool],
        input: Tensor,
        grid: Tensor,
    ) -> Tensor:
        save(ctx, region.keep_activation(input) if ctx.needs_input_grad[4] else None, exact=(grid,))
        ctx.options, ctx.input_like = options, (input.shape, input.stride(), input.dtype)
        return call(input, grid)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, grid = load(ctx)
        x = blank(ctx.input_like, grad) if kept is None else kept.decode()
        run = aten.grid_sampler_2d_backward if x.dim() == 4 else aten.grid_sampler_3d_backward
        wanted = list(ctx.needs_input_grad[3:])
        grads = run(grad, x.to(grad.dtype), grid.to(grad.dtype), *ctx.options, wanted)
        like = zip(grads, (ctx.input_like[2], grid.dtype), wanted, strict=True)
        return None, None, None, *(g.to(dtype) if needed else None for g, dtype, needed in like)


def _grid_sampler(
    region: Keeper,
    func: Callable,
    input: Tensor,
    grid: Tensor,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> Any:
    if not (region.is_activation(input) and region.is_activation(grid) and requires_grad(input, grid)):
        return NotImplemented
    if input.dim() not in (4, 5) or input.numel() == 0:
        return NotImplemented
    options = (interpolation_mode, padding_mode, align_corners)
    return region.apply(_GridSample, lambda x, g: func(x, g, *options), options, input, grid)


_STORED = Stored("embedding, gather and other lookups", "the indices, in the smallest integers that hold them", EXACT)
_GRID = Stored("sampling on a grid", "the grid; the input, packed, where the grid trains", UNBIASED)
_GRID_SAMPLERS = (torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d)
_INDEXED = ("index_select", "gather", "take", "take_along_dim", "index_put", "index_add", "scatter")


def _places_in_bags(tensors: Sequence[Tensor]) -> int:
    """Return the number of the table's rows, or of saved indices and offsets if that is larger."""
    return max(places_in_first(tensors), *(x.numel() + 1 for x in tensors if not x.is_floating_point()))


_LOOKUPS = ("gather", "take_along_dim", "index_add", "index_copy")
_STORED_MASK = Stored("masked_select", MASKS, EXACT)


class _Places(NamedTuple):
    """Destinations of elements along a dimension: one index per element, or per row."""

    dim: int
    is_by_row: bool
    inplace: bool

    def take(self, x: Tensor, index: Tensor) -> Tensor:
        return x.index_select(self.dim, index) if self.is_by_row else x.gather(self.dim, index)

    def add(self, x: Tensor, index: Tensor, source: Tensor) -> Tensor:
        return (x.index_add if self.is_by_row else x.scatter_add)(self.dim, index, source)

    def clear(self, x: Tensor, index: Tensor) -> Tensor:
        return (x.index_fill if self.is_by_row else x.scatter)(self.dim, index, 0)


class _Reduction(Saving):
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


_REDUCED = Stored(
    "`scatter_reduce`, `index_reduce` (sum, mean, amax, amin)",
    "the indices; of extremes, masks of 1 bit an element",
    EXACT,
)


OPS = (
    Op(everywhere(*_LOOKUPS), stored=_STORED, saves=Saves.SIZES, places=places_in_first),
    Op(everywhere("take"), stored=_STORED, saves=Saves.SIZES, places=lambda tensors: tensors[0].numel()),
    Op(everywhere("masked_select"), stored=_STORED_MASK, saves=Saves.SIZES),
    Op((F.grid_sample,), run_inside(F.grid_sample), _GRID),
    Op(_GRID_SAMPLERS, _grid_sampler, _GRID),
    Op((Tensor.__getitem__, *(getattr(home, name) for name in _INDEXED for home in (torch, Tensor))), looks_up=True),
    Op(everywhere("embedding"), stored=_STORED, saves=Saves.PLACES, is_layer=True, places=places_in_first),
    Op(everywhere("embedding_bag"), saves=Saves.FACTORS, is_layer=True, places=_places_in_bags),
    Op(
        (F.pad, nn_pad),  # Dynamo sees the former as the latter
        stored=Stored("padding", NOTHING, EXACT),
        saves=Saves.SIZES,
        kind=Kind.MOVE,
    ),
    Op(
        everywhere(
            *("index_select", "index_fill", "index_put", "scatter", "scatter_add", "getitem", "setitem"),
        ),
        saves=Saves.PLACES,
        places=places_in_first,
    ),
    Op(everywhere("constant_pad_nd", "put", "masked_fill", "masked_scatter"), saves=Saves.PLACES),
    *(
        Op((getattr(torch, name), getattr(Tensor, name), getattr(Tensor, name + "_")), handler, _REDUCED)
        for name, handler in (
            ("scatter_reduce", _reducing(False)),
            ("index_reduce", _reducing(True)),
        )
    ),
)
