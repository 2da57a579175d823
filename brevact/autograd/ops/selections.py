"""Maxima, minima and sums that skip NaN: exact masks record which elements were chosen.

Torch saves the elements themselves and compares them again in backward, where packed elements would differ from those
chosen. amax, amin and max() share the gradient evenly among equal elements; maximum and minimum give each of two equal
elements a half. The maximum along one dimension saves indices, as torch does. nansum and nanmean save which elements
are numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from brevact.autograd.ops.base import Formula, fmax_shares_ties, requires_grad, save
from brevact.autograd.ops.op import EXACT, MASKS, Op, Saves, Stored, everywhere, places_in_first
from brevact.autograd.saved import Keeper
from brevact.autograd.store import keep_mask


class _Kind(enum.Enum):
    EXTREME = "the extremes along some dimensions"
    WHOLE = "the extremes of all elements, or NaN"
    SUM = "the sum of numbers"
    MEAN = "the mean of numbers"


def _apply_chosen(
    region: Keeper, call: Callable[[Tensor], Tensor], kind: _Kind, dims: list[int], input: Tensor
) -> Tensor:
    """Run a reduction of some elements, which a mask chooses: an extreme, or the sum or mean of the numbers."""
    sizes, dtype = [1 if dim in dims else size for dim, size in enumerate(input.shape)], input.dtype
    fills = kind is _Kind.WHOLE and not input.is_cuda

    def run(ctx: Any, x: Tensor) -> Tensor:
        out = call(x)
        value = out.view(sizes) if kind in (_Kind.EXTREME, _Kind.WHOLE) else out
        if kind is _Kind.EXTREME:
            mask = value == x  # in torch's order, which decides the strides
        elif kind is _Kind.WHOLE:
            mask = torch.where(value.isnan(), x.isnan(), x == value)
        else:
            mask = x.isnan().logical_not_()
        save(ctx, keep_mask(mask))
        return out

    def gradients(needs: tuple[bool, ...], grad: Tensor, kept: Any) -> tuple[Any, ...]:
        mask, grad = kept.decode(), grad.reshape(sizes)
        count = 1 if kind is _Kind.SUM else mask.sum(dims, keepdim=True) if dims else mask
        if fills:  # as torch does it: the result is contiguous
            return (grad.new_zeros(mask.shape).masked_fill_(mask, (grad / count).view(())),)
        if kind in (_Kind.EXTREME, _Kind.WHOLE):
            return (grad * mask / count,)
        return ((grad if kind is _Kind.SUM else grad / count).to(dtype) * mask,)

    return region.apply(Formula, run, gradients, input)


def _without(grad: Tensor, lost: Tensor, ties: Tensor | None) -> Tensor:
    """Gradient of one of two elements, 0 where it was lost, by torch's own calls, which determine the strides."""
    if ties is None:
        return grad.masked_fill(lost, 0)
    return torch.where(ties, grad / 2, grad).masked_fill_(lost, 0)


def _of_dims(kind: _Kind) -> Callable:
    def handle(
        region: Keeper, func: Callable, input: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any
    ) -> Any:
        if kwargs.get("out") is not None or (kwargs and kind is _Kind.EXTREME):
            return NotImplemented
        if not (region.packs_input(input) and input.requires_grad and input.dim() and input.numel()):
            return NotImplemented
        chosen = (dim,) if isinstance(dim, int) else tuple(dim or ())
        dims = [d % input.dim() for d in chosen] or list(range(input.dim()))
        given = () if dim is None and kind is _Kind.EXTREME else dim
        return _apply_chosen(region, lambda x: func(x, given, keepdim, **kwargs), kind, dims, input)

    return handle


def _either(is_first: Callable[..., Tensor], *, ignores_nan: bool = False) -> Callable:
    """Save whether the first and the second of two elements were chosen: both if equal, none if one is NaN.

    ``is_first``: whether the first of two elements, which may be NaN, is chosen; ``ignores_nan``: NaN never is.
    """

    def handle(region: Keeper, func: Callable, input: Tensor, other: Tensor, **kwargs: Any) -> Any:
        if kwargs or not (region.is_activation(input) and region.is_activation(other)):
            return NotImplemented
        if not requires_grad(input, other) or input.device != other.device or region.are_weights(input, other):
            return NotImplemented
        likes = (input.shape, input.dtype), (other.shape, other.dtype)

        def run(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            x, y = a.detach(), b.detach()
            first = is_first(x, y)
            if not ignores_nan:
                save(ctx, keep_mask(first), keep_mask(is_first(y, x)))
            elif fmax_shares_ties():
                save(ctx, keep_mask(first | y.isnan()), keep_mask(is_first(y, x) | (x.isnan() & ~y.isnan())))
            else:
                save(ctx, keep_mask(first | y.isnan()))
            return func(a, b)

        def gradients(needs: tuple[bool, ...], grad: Tensor, *kept: Any) -> tuple[Any, ...]:
            first, *second = (mask.decode() for mask in kept)
            ties = first & second[0] if second else None
            lost = (second[0] & ~first, first & ~second[0]) if second else (~first, first)
            return tuple(
                _without(grad, mask, ties).sum_to_size(shape).to(dtype) if needed else None
                for mask, (shape, dtype), needed in zip(lost, likes, needs, strict=True)
            )

        return region.apply(Formula, run, gradients, input, other)

    return handle


def _whole_or_either(is_first: Callable[..., Tensor]) -> Callable:
    of_two = _either(is_first)

    def handle(region: Keeper, func: Callable, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not kwargs and len(args) == 1 and isinstance(args[0], Tensor):
            return of_two(region, func, input, args[0])
        if list(kwargs) == ["other"] and not args:
            return of_two(region, func, input, kwargs["other"])
        if args or kwargs or not (region.packs_input(input) and input.requires_grad and input.numel() > 0):
            return NotImplemented  # along a dimension: indices are saved
        return _apply_chosen(region, func, _Kind.WHOLE, list(range(input.dim())), input)

    return handle


def _is_whole(region: Keeper, args: tuple) -> bool:
    """Return whether a maximum is not along a dimension, which would save only places."""
    return not any(type(arg) is int for arg in args[1:])


_STORED = Stored("max, min, nansum, nanmean", MASKS, EXACT)
OPS = (
    Op((torch.amax, torch.amin, Tensor.amax, Tensor.amin), _of_dims(_Kind.EXTREME), _STORED),
    Op((torch.nansum, Tensor.nansum), _of_dims(_Kind.SUM), _STORED),
    Op((torch.nanmean, Tensor.nanmean), _of_dims(_Kind.MEAN), _STORED),
    Op((torch.max, Tensor.max), _whole_or_either(torch.ge), _STORED),
    Op((torch.min, Tensor.min), _whole_or_either(torch.le), _STORED),
    Op((torch.maximum, Tensor.maximum), _either(torch.ge), _STORED),
    Op((torch.minimum, Tensor.minimum), _either(torch.le), _STORED),
    Op((torch.fmax, Tensor.fmax), _either(torch.ge, ignores_nan=True), _STORED),
    Op((torch.fmin, Tensor.fmin), _either(torch.le, ignores_nan=True), _STORED),
    Op(everywhere("where"), stored=Stored("where", MASKS, EXACT), saves=Saves.PLACES),
    Op(
        everywhere("sort", "msort", "topk", "kthvalue", "mode", "cummax", "cummin"),
        saves=Saves.PLACES,
        places=places_in_first,
    ),
    Op(
        tuple(getattr(home, name) for home in (torch, Tensor) for name in ("max", "min", "median", "nanmedian")),
        must_not_round=_is_whole,
        places=places_in_first,
    ),
)
