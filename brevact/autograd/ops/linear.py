"""Fully connected layers: the input is saved packed, the weight in full precision. Source: thesis section 4.2.2.

dL/dW = g^T x^ with the decoded input x^, dL/dx = g W (exact), dL/db = sum of g over the leading dimensions. The order
of additions and the strides are those of torch, which flattens the leading dimensions of contiguous tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from brevact.autograd.keeper import Keeper
from brevact.autograd.layer_recompute import is_large_and_recomputed, remember_output
from brevact.autograd.ops.base import Saving, load, save
from brevact.autograd.ops.convolution import STORED, to_autocast
from brevact.autograd.ops.op import Op, Saves, everywhere


class _Linear(Saving):
    @staticmethod
    def forward(
        ctx: Any, region: Keeper, linear: Callable, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        x, w, b = to_autocast(input, weight, bias)
        needs_input, needs_weight = ctx.needs_input_grad[2:4]
        kept = region.keep(input) if needs_weight else None
        save(ctx, kept, region.keep_weight(weight) if needs_input else None)
        ctx.dtype = w.dtype
        ctx.is_flattened = input.dim() <= 2 or input.is_contiguous()
        ctx.is_transposed = input.dim() == 2 and input.stride() == (1, input.shape[0])
        ctx.has_rows = weight.stride() == (weight.shape[1], 1)
        return linear(x, w, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight = load(ctx)
        grad = grad.to(ctx.dtype)
        rows = grad.reshape(-1, grad.shape[-1]) if grad.dim() != 2 else grad
        grad_input = grad_weight = grad_bias = None
        if kept is not None:  # first: the input's gradient then reuses the memory of the input
            x = kept.decode().to(ctx.dtype)
            x = x.reshape(-1, x.shape[-1])
            grad_weight = rows.t() @ x if ctx.has_rows else (x.t() @ rows).t()
            del x
        if weight is not None:
            w = weight.decode().to(ctx.dtype)
            product = (w.t() @ rows.t()).t() if ctx.is_transposed else rows @ w
            grad_input = product.view(*grad.shape[:-1], w.shape[1])
        if ctx.needs_input_grad[4]:
            grad_bias = rows.sum(0) if ctx.is_flattened else grad.sum(tuple(range(grad.dim() - 1)))
        return None, None, grad_input, grad_weight, grad_bias


def _linear(region: Keeper, func: Callable, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not region.packs_layer(input, weight, bias) or weight.dim() != 2 or input.dim() == 0:
        return NotImplemented
    runner = region.torch_runner(input) if input is not weight else None
    if region.recompute and is_large_and_recomputed(region, input):
        runner = None
    if runner is not None:
        out = runner.run_torch(func, input, weight, bias, flattens=True)
    else:
        out = region.apply(_Linear, func, input, weight, bias)
    if region.recompute:
        remember_output(region, func, input, weight, bias, out, cost=weight.shape[1])
    return out


OPS = (
    Op(everywhere("linear"), _linear, STORED._replace(op="linear"), saves=Saves.FACTORS, is_layer=True),
    Op(everywhere("bilinear"), saves=Saves.FACTORS, is_layer=True),
)
