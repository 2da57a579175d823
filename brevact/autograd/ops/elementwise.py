"""Elementwise products (squeeze-and-excitation, gates, affine scales): each factor is saved packed if it is needed.

d(ab)/da = g b^ and d(ab)/db = g a^, summed over broadcast dimensions; a factor is saved only if the other one needs a
gradient, and weights and small factors are saved unpacked. Unbiased, since each gradient is linear in the saved factor.

A division by one number per row, a written-out norm or deviation, saves its numerator packed by rows, and the numbers
in full precision: d(a/b)/db = -g a^ / b^2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from brevact.autograd.call_arguments import is_activation, is_complex
from brevact.autograd.derived import ELEMENTS_OF_SMALL, derive
from brevact.autograd.ops.base import Formula, is_inplace, save
from brevact.autograd.ops.norm_formulas import dims_of_inverses, dims_of_rows, is_deviation, keep_by_rows
from brevact.autograd.ops.op import EXACT, UNBIASED, Op, Saves, Stored, everywhere
from brevact.autograd.ops.smooth import WRITTEN_OUT, keep_square
from brevact.autograd.saved import Keeper, Saved, Strides, lay_out
from brevact.autograd.storages import storage_address
from brevact.autograd.store import compact, keep_as_it_is


def _apply(region: Keeper, multiply: Callable, a: Tensor, b: Tensor, inplace: bool) -> Tensor:
    is_same, likes = a.shape == b.shape, [(x.shape, x.stride(), x.dtype) for x in (a, b)]

    def run(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        needs_a, needs_b = ctx.needs_input_grad[3:]
        scales_b, scales_a = ((), ()) if is_same else (dims_of_inverses(b, a), dims_of_inverses(a, b))
        kept_b = _keep(region, b, a, scales_b, is_scale=bool(scales_a)) if needs_a else None
        kept_a = _keep(region, a, b, scales_a, is_scale=bool(scales_b)) if needs_b else None
        if inplace:
            kept_b, kept_a = _unaliased(kept_b, a), _unaliased(kept_a, a)
        save(ctx, kept_b, kept_a)
        operands = [(a, kept_a), (b, kept_b)]
        if inplace:  # once they are overwritten, no saved form of them is found
            operands = [(x, kept or region.find_kept(x)) for x, kept in operands]
        out = multiply(a, b)
        derive(region, out, torch.mul, operands, is_pointwise=is_same, is_dirty=inplace, is_new=not inplace)
        if inplace:
            ctx.mark_dirty(a)
        return out

    def gradients(needs: tuple[bool, ...], grad: Tensor, *kept: Any) -> tuple[Tensor | None, ...]:
        return tuple(
            None if each is None else _product(each, other, stride, grad, shape).to(dtype)
            for each, (shape, _, dtype), (other, stride, _) in zip(kept, likes, likes[::-1], strict=True)
        )

    return region.apply(Formula, run, gradients, a, b)


def _keep(region: Keeper, x: Tensor, other: Tensor, dims: tuple[int, ...], *, is_scale: bool) -> Saved:
    """Save a factor by the rows along ``dims`` that the other one scales, or unpacked if it scales the other's rows."""
    if is_scale:
        return keep_as_it_is(x)
    if x.numel() * ELEMENTS_OF_SMALL <= other.numel() and region.find_known(other) is not None:
        return _keep_small_factor(region, x)
    has_rows = dims and not region.is_weight(x) and not (x.is_leaf and x.requires_grad)
    return keep_by_rows(region, x, dims) if has_rows else region.keep_activation(x)


def _keep_small_factor(region: Keeper, x: Tensor) -> Saved:
    """Save a factor unpacked, without the rest of a larger storage; a weight stays in memory anyway."""
    part = compact(x)
    return keep_as_it_is(x if part is not x and region.is_weight(x) else part)


def _unaliased(kept: Saved | None, overwritten: Tensor) -> Saved | None:
    if kept is None:
        return None
    tensors, decoder = kept
    address = storage_address(overwritten)
    return tuple(x.clone() if storage_address(x) == address else x for x in tensors), decoder


def _product(kept: Any, shape: torch.Size, stride: Strides, grad: Tensor, of_other: torch.Size) -> Tensor:
    product = lay_out(kept.multiply(grad), grad, stride) if shape == grad.shape else grad * kept.decode()
    return product if product.shape == of_other else product.sum_to_size(of_other)


def _multiply(region: Keeper, func: Callable, input: Tensor, other: Any, **kwargs: Any) -> Any:
    inplace = is_inplace(func, (), {})
    if kwargs or not (
        region.is_activation(input) and region.is_activation(other) and (input.requires_grad or other.requires_grad)
    ):
        return NotImplemented  # a number has no gradient and nothing is stored
    if max(input.numel(), other.numel()) < region.settings.min_numel:
        return NotImplemented  # there is nothing to pack
    if input.device != other.device:
        return NotImplemented
    if region.are_weights(input, other):
        return NotImplemented
    if input is other and not inplace:
        square = keep_square(region, lambda x: func(x, x), input)
        if square is not NotImplemented:
            return square
    return _apply(region, func, input, other, inplace)


def _divide(region: Keeper, func: Callable, input: Any, other: Any, **kwargs: Any) -> Any:
    """Handle division by one number per row, a deviation or one of few; torch, too, saves the numerator for it."""
    if kwargs or not (isinstance(other, Tensor) and other.requires_grad and region.packs_input(input)):
        return NotImplemented
    if not (region.is_activation(other) and input.dtype == other.dtype and input.device == other.device):
        return NotImplemented
    if input.numel() < region.settings.min_numel or (input.is_leaf and input.requires_grad):
        return NotImplemented
    dims = dims_of_rows(input.shape, other.shape)
    if not dims or region.settings.is_exact or (other.numel() >= region.settings.min_numel and not is_deviation(other)):
        return NotImplemented

    def run(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        save(ctx, keep_by_rows(region, a, dims), exact=(b,))
        return func(a, b)

    def gradients(needs: tuple[bool, ...], grad: Tensor, kept: Any, b: Tensor) -> tuple[Any, ...]:
        return grad / b if needs[0] else None, (-grad * ((kept.decode() / b) / b)).sum_to_size(b.shape)

    return region.apply(Formula, run, gradients, input, other)


def _divides_by_activation(place: int, region: Keeper, args: tuple) -> bool:
    """Return whether the denominator, the argument at ``place``, is an activation: an error of 1/b^2 is not noise."""
    x: Any = args[place] if place < len(args) else None
    return (is_activation(x) or is_complex(x)) and x.numel() >= region.settings.min_numel and not region.is_weight(x)


_STORED = Stored("products of activations", "each factor once, packed; a weight unpacked", UNBIASED)
_DIVISION = Stored("division by an activation", "as in PyTorch", EXACT)
_INVERSIONS = (Tensor.__rtruediv__, Tensor.__rdiv__)  # one function
_DIVISIONS = (*everywhere("div", "divide", "true_divide"), Tensor.__truediv__, Tensor.__itruediv__)
OPS = (
    Op(
        (
            *(torch.div, torch.divide, torch.true_divide),
            *(Tensor.div, Tensor.divide, Tensor.true_divide, Tensor.__truediv__),
        ),
        _divide,
        WRITTEN_OUT,
    ),
    Op(everywhere("mul", "multiply"), _multiply, _STORED),
    Op(everywhere("mul", "multiply", "addcmul", "lerp", "ldexp"), saves=Saves.FACTORS),
    Op(
        tuple(func for func in _DIVISIONS if func not in _INVERSIONS),
        stored=_DIVISION,
        must_not_round=functools.partial(_divides_by_activation, 1),
    ),
    Op(_INVERSIONS, stored=_DIVISION, must_not_round=functools.partial(_divides_by_activation, 0)),
)
