"""Softmax and log-softmax: probabilities are stored packed.

Log-softmax: dL/dx = g - p sum(g), with p = exp(out) stored; linear in p, hence unbiased. Packing the output itself
would not be: the gradient is exponential in it.

Softmax, and softmin with its sign: dL/dx = p * (g - sum(g p)), with the output p stored, one packed copy for this op
and for those that read the output next (the product of an attention, say). The gradient is quadratic in p, so that the
one copy leaves a bias: with independent errors E[p^ * (g - sum(g p^))] - dL/dx = -Var(p^_i) g_i.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.keeper import Keeper
from brevact.autograd.ops.base import Saving, load, save
from brevact.autograd.ops.op import UNBIASED, Op, Saves, Stored, everywhere
from brevact.private_names.of_torch import softmax_backward


class _Softmax(Saving):
    @staticmethod
    def forward(
        ctx: Any, region: Keeper, call: Callable[[Tensor], Tensor], dim: int, negates: bool, input: Tensor
    ) -> Tensor:
        out = call(input)
        save(ctx, region.keep(out.detach()))
        ctx.dim, ctx.negates, ctx.dtype = dim, negates, input.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = load(ctx)
        grad_input = softmax_backward(grad, kept.decode(), ctx.dim, grad.dtype).to(ctx.dtype)
        return None, None, None, None, -grad_input if ctx.negates else grad_input


class _LogSoftmax(Saving):
    @staticmethod
    def forward(ctx: Any, region: Keeper, call: Callable[[Tensor], Tensor], dim: int, input: Tensor) -> Tensor:
        out = call(input)
        save(ctx, region.keep(out.exp(), share=False))
        ctx.dim, ctx.dtype = dim, input.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = load(ctx)
        grad = grad.contiguous()  # as torch's own gradient is
        total = grad.sum(ctx.dim, keepdim=True)
        return None, None, None, torch.addcmul(grad, kept.decode(), total, value=-1).contiguous().to(ctx.dtype)


def _handler(function: type[Saving], *options: Any) -> Callable:
    """Make the handler of a function with the parameters of ``torch.softmax``."""

    def handle(region: Keeper, func: Callable, input: Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not (region.packs_input(input) and input.requires_grad and type(dim) is int):
            return NotImplemented  # torch chooses the dimension, or explains what is wrong
        if input.numel() < max(1, region.settings.min_numel):
            return NotImplemented  # there is nothing to pack
        return region.apply(function, lambda x: func(x, dim, *args, **kwargs), dim, *options, input)

    return handle


_STORED = Stored("softmax", "the output, packed, shared with what reads it", "bias Var of one packed copy")
_OF_LOGARITHMS = Stored("log-softmax", "the probabilities, packed", UNBIASED)
OPS = (
    Op(
        (torch.softmax, F.softmax, torch.special.softmax, Tensor.softmax),
        _handler(_Softmax, False),
        _STORED,
        is_bit_exact=False,
    ),
    Op(
        (torch.log_softmax, F.log_softmax, torch.special.log_softmax, Tensor.log_softmax),
        _handler(_LogSoftmax),
        _OF_LOGARITHMS,
        is_bit_exact=False,
    ),
    Op((F.softmin,), _handler(_Softmax, True), _STORED, is_bit_exact=False),
    Op(everywhere("softmax", "softmin", "gumbel_softmax"), saves=Saves.BOUNDED),
)
