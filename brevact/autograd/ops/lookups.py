"""Ops that move elements: indices, masks and sampling points are saved exactly, elements only where they matter.

Gradients by the elements do not depend on them: torch saves a gather's or a reflected or replicated border's input for
its sizes alone. A sampling grid is saved exactly: packed points would lie between other elements. dL/dgrid is linear in
the packed input: unbiased.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.keeper import Keeper
from brevact.autograd.ops.base import InputLike, OfSizes, Saving, blank, load, requires_grad, save
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
from brevact.autograd.store import keep_mask, keep_places
from brevact.autograd.strides import Strides, strides_of_result
from brevact.private_names.of_torch import nn_pad
from brevact.quantizers import is_traced

aten = torch.ops.aten
#: (zeros of the input's sizes, index, output gradient) -> input gradient.
Scatter = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Lookup(Saving):
    """An op that reads elements at an index or under a mask; its gradient has the input's strides, or none."""

    @staticmethod
    def forward(
        ctx: Any,
        region: Keeper,
        call: Callable[[Tensor, Tensor], Tensor],
        scatter: Scatter,
        stride: Strides | None,
        input: Tensor,
        at: Tensor,
    ) -> Tensor:
        sizes = input.shape if stride is None else (input.numel(),)  # `take` counts through all dimensions
        save(ctx, keep_mask(at) if at.dtype is torch.bool else keep_places(at, region.settings, sizes))
        ctx.scatter, ctx.sizes, ctx.stride = scatter, input.shape, stride
        return call(input, at)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        at = load(ctx)[0].decode()
        zeros = grad.new_zeros(ctx.sizes)
        if ctx.stride is not None and ctx.stride != zeros.stride() and not is_traced(grad):
            zeros = zeros.new_empty_strided(ctx.sizes, strides_of_result(ctx.sizes, ctx.stride)).zero_()
        return None, None, None, None, ctx.scatter(zeros, at, grad), None


def _looks_up(region: Keeper, input: Any, at: Any) -> bool:
    return region.packs_input(input) and input.requires_grad and isinstance(at, Tensor) and input.numel() > 0


def _gather(region: Keeper, func: Callable, input: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Any:
    if kwargs.pop("sparse_grad", False) or kwargs or not _looks_up(region, input, index) or not isinstance(dim, int):
        return NotImplemented
    return region.apply(
        _Lookup, lambda x, i: func(x, dim, i), lambda zeros, i, g: zeros.scatter_add_(dim, i, g), None, input, index
    )


def _take_along_dim(region: Keeper, func: Callable, input: Tensor, indices: Tensor, dim: int | None = None) -> Any:
    if dim is None or not _looks_up(region, input, indices) or input.dim() != indices.dim():
        return NotImplemented
    if not -input.dim() <= dim < input.dim():
        return NotImplemented  # torch raises the error
    others = [d for d in range(input.dim()) if d != dim % input.dim()]
    if any(input.shape[d] != indices.shape[d] for d in others):
        return NotImplemented  # they broadcast
    length = input.shape[dim]

    def scatter(zeros: Tensor, i: Tensor, grad: Tensor) -> Tensor:
        return zeros.scatter_add_(dim, torch.where(i < 0, i + length, i), grad)  # negative ones count from the end

    return region.apply(_Lookup, lambda x, i: func(x, i, dim), scatter, None, input, indices)


def _take(region: Keeper, func: Callable, input: Tensor, index: Tensor) -> Any:
    if not _looks_up(region, input, index):
        return NotImplemented
    return region.apply(
        _Lookup, func, lambda zeros, i, g: zeros.put_(i, g, accumulate=True), input.stride(), input, index
    )


def _masked_select(region: Keeper, func: Callable, input: Tensor, mask: Tensor) -> Any:
    if not _looks_up(region, input, mask) or mask.shape != input.shape or mask.dtype is not torch.bool:
        return NotImplemented
    return region.apply(_Lookup, func, lambda zeros, m, g: zeros.masked_scatter_(m, g), input.stride(), input, mask)


_PAD_BACKWARD = {
    "reflect": (aten.reflection_pad1d_backward, aten.reflection_pad2d_backward, aten.reflection_pad3d_backward),
    "replicate": (aten.replication_pad1d_backward, aten.replication_pad2d_backward, aten.replication_pad3d_backward),
}


def _pad(
    region: Keeper, func: Callable, input: Tensor, pad: Sequence[int], mode: str = "constant", value: Any = None
) -> Any:
    if mode not in _PAD_BACKWARD or not region.packs_input(input) or not input.requires_grad or input.numel() == 0:
        return NotImplemented  # the others store nothing
    dims = len(pad) // 2
    if dims not in (1, 2, 3):
        return NotImplemented
    pad_backward = _PAD_BACKWARD[mode][dims - 1]

    def backward(grad: Tensor, input_like: InputLike) -> Tensor:
        return pad_backward(grad, blank(input_like, grad), list(pad))

    return region.apply(OfSizes, lambda x: func(x, pad, mode, value), backward, input)


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


_INTERPOLATIONS = {"bilinear": 0, "nearest": 1, "bicubic": 2}
_BORDERS = {"zeros": 0, "border": 1, "reflection": 2}


def _grid_sample(
    region: Keeper,
    func: Callable,
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Any:
    if mode not in _INTERPOLATIONS or padding_mode not in _BORDERS:
        return NotImplemented  # torch raises the error

    def call(x: Tensor, g: Tensor, *_: Any) -> Tensor:
        return func(x, g, mode, padding_mode, align_corners)

    options = (_INTERPOLATIONS[mode], _BORDERS[padding_mode], bool(align_corners))
    return _grid_sampler(region, call, input, grid, *options)


_STORED = Stored("embedding, gather and other lookups", "the indices, in the smallest integers that hold them", EXACT)
_GRID = Stored("sampling on a grid", "the grid; the input, packed, where the grid trains", UNBIASED)
_GRID_SAMPLERS = (torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d)
_INDEXED = ("index_select", "gather", "take", "take_along_dim", "index_put", "index_add", "scatter")


def _places_in_bags(tensors: Sequence[Tensor]) -> int:
    """Return the number of the table's rows, or of saved indices and offsets if that is larger."""
    return max(places_in_first(tensors), *(x.numel() + 1 for x in tensors if not x.is_floating_point()))


OPS = (
    Op((torch.gather, Tensor.gather), _gather, _STORED),
    Op((torch.take_along_dim, Tensor.take_along_dim), _take_along_dim, _STORED),
    Op((torch.take, Tensor.take), _take, _STORED),
    Op((torch.masked_select, Tensor.masked_select), _masked_select, Stored("masked_select", MASKS, EXACT)),
    Op((F.pad, nn_pad), _pad, Stored("padding", NOTHING, EXACT)),  # Dynamo sees the former as the latter
    Op((F.grid_sample,), _grid_sample, _GRID),
    Op(_GRID_SAMPLERS, _grid_sampler, _GRID),
    Op((Tensor.__getitem__, *(getattr(home, name) for name in _INDEXED for home in (torch, Tensor))), looks_up=True),
    Op(everywhere("embedding"), stored=_STORED, saves=Saves.PLACES, is_layer=True, places=places_in_first),
    Op(everywhere("embedding_bag"), saves=Saves.FACTORS, is_layer=True, places=_places_in_bags),
    Op((F.pad, nn_pad), moves=True),
    Op(
        everywhere(
            *("gather", "take_along_dim", "index_select", "index_add", "index_copy", "index_fill", "index_put"),
            *("scatter", "scatter_add", "getitem", "setitem"),
        ),
        saves=Saves.PLACES,
        places=places_in_first,
    ),
    Op(
        everywhere("pad", "constant_pad_nd", "take", "put", "masked_fill", "masked_scatter", "masked_select"),
        saves=Saves.PLACES,
    ),
)
