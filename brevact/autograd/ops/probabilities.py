"""Softmax and log-softmax: probabilities are stored packed.

Log-softmax: dL/dx = g - p sum(g), with p = exp(out) stored; linear in p, hence unbiased. Packing the output itself
would not be: the gradient is exponential in it.

Softmax, and softmin with its sign: dL/dx = p * (g - sum(g p)), with the output p stored, one packed copy for this op
and for those that read the output next (the product of an attention, say). The gradient is quadratic in p, so that the
one copy leaves a bias: with independent errors E[p^ * (g - sum(g p^))] - dL/dx = -Var(p^_i) g_i.

Of two or three classes, as in segmentation, the products of two probabilities are stored in place of the output, in no
more memory: dL/dx_i = sum_j p_i p_j (g_i - g_j), linear in what is stored, hence unbiased. The bias of probabilities
has one sign at all voxels, and the gradient of the last layer's bias adds it up.
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


#: Classes of which there are no more products of two than probabilities.
_FEW = (2, 3)


class _SoftmaxOfFew(Saving):
    """Softmax over two or three classes: the products p_0 p_1, and of three p_1 p_2 and p_2 p_0, along the same dim."""

    @staticmethod
    def forward(
        ctx: Any, region: Keeper, call: Callable[[Tensor], Tensor], dim: int, negates: bool, input: Tensor
    ) -> Tensor:
        out = call(input)
        p = out.detach().unbind(dim)
        products = [p[0] * p[1]] if len(p) == 2 else [a * b for a, b in zip(p, (*p[1:], p[0]), strict=True)]
        save(ctx, region.keep(torch.stack(products, dim), share=False))
        ctx.dim, ctx.negates, ctx.dtype = dim, negates, input.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = load(ctx)
        products, g = kept.decode().unbind(ctx.dim), grad.unbind(ctx.dim)
        flows = [p * (a - b) for p, a, b in zip(products, g, (*g[1:], g[0]), strict=False)]
        of_inputs = (flows[0], -flows[0]) if len(g) == 2 else [flows[i] - flows[i - 1] for i in range(len(g))]
        grad_input = torch.stack(tuple(of_inputs), ctx.dim).contiguous().to(ctx.dtype)
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
        is_of_few = function is _Softmax and -input.dim() <= dim < input.dim() and input.shape[dim] in _FEW
        of_size = _SoftmaxOfFew if is_of_few else function
        return region.apply(of_size, lambda x: func(x, dim, *args, **kwargs), dim, *options, input)

    return handle


_STORED = Stored(
    "softmax",
    "the output, packed, shared with what reads it; of two or three classes products of two probabilities, packed",
    "bias Var of one packed copy; of two or three classes unbiased",
)
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
