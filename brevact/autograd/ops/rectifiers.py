"""Rectifiers that need more than one mask and one number: PReLU, randomized ReLU, the absolute value.

PReLU, with the mask m = (x > 0): dL/dx = g where m, else w g, exact; dL/dw = -sum(g r^) with r = max(-x, 0) saved
packed if the weight trains, unbiased since it is linear in r. Randomized ReLU in training saves its slopes packed:
unbiased, too; on a channels_last CPU tensor torch saves them in another order than it used them, and its gradient is
wrong there. The absolute value saves the sign in two bits: exact; for complex numbers their directions, packed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.derived import derive, function_of
from brevact.autograd.keeper import Keeper
from brevact.autograd.ops import piecewise_linear
from brevact.autograd.ops.base import Saving, is_complex, is_inplace, load, save
from brevact.autograd.ops.convolution import to_autocast
from brevact.autograd.ops.op import EXACT, MASKS, UNBIASED, Op, Stored, everywhere
from brevact.autograd.store import keep_mask, reported
from brevact.autograd.strides import lay_out
from brevact.private_names.of_torch import has_kernel_for_key
from brevact.quantizers import is_traced

aten = torch.ops.aten


def _along_channels(weight: Tensor, x: Tensor) -> Tensor:
    sizes = [-1 if dim == min(1, x.dim() - 1) else 1 for dim in range(x.dim())]
    return weight.view(sizes if weight.numel() > 1 else [1] * x.dim())


def _below(x: Tensor, mask: Tensor) -> Tensor:
    return (-x).masked_fill_(mask, 0.0)


def _leaky(x: Tensor, mask: Tensor, slope: Tensor) -> Tensor:
    return torch.where(mask, x, slope * x)


def _signed(x: Tensor, above: Tensor, below: Tensor) -> Tensor:
    return x * (above.to(x.dtype) - below.to(x.dtype))


class _PReLU(Saving):
    @staticmethod
    def forward(ctx: Any, region: Keeper, func: Callable, input: Tensor, weight: Tensor) -> Tensor:
        x, w, device = input, weight, input.device.type
        if torch.amp.is_autocast_available(device) and has_kernel_for_key("aten::prelu", f"Autocast{device.upper()}"):
            x, w = to_autocast(input, weight)
        needs_input, needs_weight = ctx.needs_input_grad[2:]
        mask, source, out = keep_mask(x > 0), region.find_known(input), func(x, w)
        below = None
        if needs_weight:
            derived = None if source is None else function_of(_below, (source, mask), x)
            below = region.keep((-x).relu_(), share=False) if derived is None else reported(derived)
        if source is not None:
            derive(region, out, _leaky, ((input, source), (input, mask), (_along_channels(w, x), None)))
        save(ctx, mask if needs_input else None, below, exact=(weight,))
        ctx.dtype, ctx.stride = x.dtype, x.stride()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mask, below, weight = load(ctx)
        w = _along_channels(weight.to(ctx.dtype), grad)
        grad_input = grad_weight = None
        if mask is not None:
            scaled = torch.where(mask.decode(), grad, w * grad)
            grad_input = lay_out(scaled, grad, ctx.stride, saved_first=True)
        if below is not None:
            terms = lay_out(below.multiply(grad).neg_(), grad, ctx.stride, saved_first=True)
            grad_weight = terms.sum_to_size(w.shape).view(weight.shape).to(weight.dtype)
        return None, None, grad_input, grad_weight


def _prelu(region: Keeper, func: Callable, input: Tensor, weight: Tensor) -> Any:
    if not region.packs_layer(input, weight):
        return NotImplemented
    if weight.requires_grad and region.settings.is_exact:
        return NotImplemented  # torch saves the input alone: a mask would come on top
    if weight.numel() > 1 and (input.dim() < 2 or input.shape[1] != weight.numel()):
        return NotImplemented  # torch raises the error
    return region.apply(_PReLU, func, input, weight) if weight.dim() < 2 else NotImplemented


class _RReLU(Saving):
    @staticmethod
    def forward(ctx: Any, region: Keeper, input: Tensor, lower: float, upper: float, inplace: bool) -> Tensor:
        slopes = torch.empty_like(input, memory_format=torch.contiguous_format)  # torch writes them in this order
        run = aten.rrelu_with_noise_ if inplace else aten.rrelu_with_noise
        out = run(input, slopes, lower, upper, True)
        if inplace:
            ctx.mark_dirty(input)
        save(ctx, region.keep(slopes, share=False))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = load(ctx)
        return None, kept.multiply(grad), None, None, None


def _rrelu(
    region: Keeper,
    func: Callable,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Any:
    inplace = inplace or func is torch.rrelu_
    if not training:
        return piecewise_linear.frozen_rrelu(region, torch.rrelu_ if inplace else torch.rrelu, input, lower, upper)
    if not (region.packs_input(input) and input.requires_grad and 0 <= lower <= upper):
        return NotImplemented
    return region.apply(_RReLU, input, lower, upper, inplace)


class _Absolute(Saving):
    @staticmethod
    def forward(ctx: Any, region: Keeper, func: Callable, inplace: bool, input: Tensor) -> Tensor:
        above, below = keep_mask(input > 0), keep_mask(input < 0)
        save(ctx, above, below)
        source, out = region.find_known(input), func(input)
        if source is not None:
            derive(region, out, _signed, ((input, source), (input, above), (input, below)), is_dirty=inplace)
        if inplace:
            ctx.mark_dirty(input)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        above, below = load(ctx)
        sign = above.decode().to(grad.dtype).sub_(below.decode().to(grad.dtype))
        return None, None, None, lay_out(sign.mul_(grad), grad, sign.stride())


class _Magnitude(Saving):
    """Absolute value of complex numbers: dL/dx = g x / |x|, and 0 where x is 0; linear in the saved x / |x|."""

    @staticmethod
    def forward(ctx: Any, region: Keeper, func: Callable, input: Tensor) -> Tensor:
        save(ctx, region.keep(torch.sgn(input), share=False))
        return func(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (direction,) = load(ctx)
        return None, None, grad * direction.decode()


def _absolute(region: Keeper, func: Callable, input: Tensor) -> Any:
    if is_complex(input) and input.requires_grad and not is_inplace(func, (input,), {}) and not is_traced(input):
        small = input.numel() < region.settings.min_numel
        return NotImplemented if small or region.is_weight(input) else region.apply(_Magnitude, func, input)
    if not region.packs_input(input) or not input.requires_grad:
        return NotImplemented
    return region.apply(_Absolute, func, is_inplace(func, (input,), {}), input)


OPS = (
    Op(
        (torch.prelu, Tensor.prelu),
        _prelu,
        Stored("PReLU", "a mask; the negative elements, packed, where the weight trains", UNBIASED),
    ),
    Op((F.rrelu, torch.rrelu, torch.rrelu_), _rrelu, Stored("randomized ReLU", "the slopes, packed", UNBIASED)),
    Op(everywhere("abs", "absolute"), _absolute, Stored("abs", MASKS, EXACT)),
    Op(everywhere("abs", "absolute"), stored=Stored("abs of complex numbers", "their directions, packed", UNBIASED)),
)
