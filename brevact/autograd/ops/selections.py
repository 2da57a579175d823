"""Maxima and minima: exact masks record which elements were chosen.

Torch saves the elements themselves and compares them again in backward, where packed elements would differ from those
chosen. amax, amin and max() share the gradient evenly among equal elements; maximum and minimum give each of two equal
elements a half. The maximum along one dimension saves indices, as torch does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from brevact.autograd.ops.base import Formula, requires_grad, save
from brevact.autograd.ops.op import EXACT, MASKS, Op, Saves, Stored, everywhere, places_in_first
from brevact.autograd.saved import Keeper
from brevact.autograd.store import keep_mask


def _apply_chosen(
    region: Keeper, call: Callable[[Tensor], Tensor], is_whole: bool, dims: list[int], input: Tensor
) -> Tensor:
    """Run a maximum or minimum along some dimensions, or of all elements (``is_whole``), which may be NaN."""
    sizes = [1 if dim in dims else size for dim, size in enumerate(input.shape)]
    fills = is_whole and not input.is_cuda

    def run(ctx: Any, x: Tensor) -> Tensor:
        out = call(x)
        value = out.view(sizes)
        mask = value == x  # in torch's order, which decides the strides
        if is_whole:
            mask = torch.where(value.isnan(), x.isnan(), x == value)
        save(ctx, keep_mask(mask))
        return out

    def gradients(needs: tuple[bool, ...], grad: Tensor, kept: Any) -> tuple[Any, ...]:
        mask, grad = kept.decode(), grad.reshape(sizes)
        count = mask.sum(dims, keepdim=True)
        if fills:  # as torch does it: the result is contiguous
            return (grad.new_zeros(mask.shape).masked_fill_(mask, (grad / count).view(())),)
        return (grad * mask / count,)

    return region.apply(Formula, run, gradients, input)


def _of_dims(region: Keeper, func: Callable, input: Tensor, dim: Any = (), keepdim: bool = False) -> Any:
    if not (region.packs_input(input) and input.requires_grad and input.dim() and input.numel()):
        return NotImplemented
    chosen = (dim,) if isinstance(dim, int) else tuple(dim or ())
    dims = [d % input.dim() for d in chosen] or list(range(input.dim()))
    return _apply_chosen(region, lambda x: func(x, () if dim is None else dim, keepdim), False, dims, input)


def _either(is_first: Callable[..., Tensor]) -> Callable:
    """Save whether the first and the second of two elements were chosen: both if equal, none if one is NaN."""

    def handle(region: Keeper, func: Callable, input: Tensor, other: Tensor) -> Any:
        if not (region.is_activation(input) and region.is_activation(other)):
            return NotImplemented
        if not requires_grad(input, other) or input.device != other.device or region.are_weights(input, other):
            return NotImplemented
        likes = (input.shape, input.dtype), (other.shape, other.dtype)

        def run(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            x, y = a.detach(), b.detach()
            save(ctx, keep_mask(is_first(x, y)), keep_mask(is_first(y, x)))
            return func(a, b)

        def gradients(needs: tuple[bool, ...], grad: Tensor, *kept: Any) -> tuple[Any, ...]:
            first, second = (mask.decode() for mask in kept)
            ties = first & second
            return tuple(  # by torch's own calls, which determine the strides
                torch.where(ties, grad / 2, grad).masked_fill_(lost, 0).sum_to_size(shape).to(dtype) if needed else None
                for lost, (shape, dtype), needed in zip((second & ~first, first & ~second), likes, needs, strict=True)
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
        return _apply_chosen(region, func, True, list(range(input.dim())), input)

    return handle


def _is_whole(region: Keeper, args: tuple) -> bool:
    """Return whether a maximum is not along a dimension, which would save only places."""
    return not any(type(arg) is int for arg in args[1:])


_STORED = Stored("max, min", MASKS, EXACT)
OPS = (
    Op((torch.amax, torch.amin, Tensor.amax, Tensor.amin), _of_dims, _STORED),
    Op((torch.max, Tensor.max), _whole_or_either(torch.ge), _STORED),
    Op((torch.min, Tensor.min), _whole_or_either(torch.le), _STORED),
    Op((torch.maximum, Tensor.maximum), _either(torch.ge), _STORED),
    Op((torch.minimum, Tensor.minimum), _either(torch.le), _STORED),
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
