"""Losses of pairs of elements: the derivative is saved packed, or its sign.

With d = x - t for an input x and a target t, and the gradient g of the loss, over the number of elements for a mean:

    mse_loss             dL/dx = 2 g d
    smooth_l1_loss       dL/dx = g clamp(d / beta, -1, 1)
    huber_loss           dL/dx = g clamp(d, -delta, delta)
    l1_loss              dL/dx = g sign(d),  two exact bits
    soft_margin_loss     dL/dx = -g t sigmoid(-t x)
    kl_div               dL/dx = -g t,  or -g exp(t)
    binary_cross_entropy_with_logits
                         dL/dx = g w (sigmoid(x) - t);  with weights p of positives
                         dL/dx = g w ((1 + (p - 1) t) sigmoid(x) - p t)

The derivative replaces input and target, which torch saves in full precision; linear in it, hence unbiased.
With weights of positives, which may differ a hundredfold, sigmoid(x) and t are saved apart. ``binary_cross_entropy`` of
probabilities stays exact: its derivative, (x - t) / (x (1 - x)), is unbounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.call_arguments import arguments_of
from brevact.autograd.ops.base import Formula, requires_grad, save
from brevact.autograd.ops.op import EXACT, UNBIASED, Op, Stored
from brevact.autograd.saved import Keeper
from brevact.autograd.storages import is_tracked
from brevact.autograd.store import keep_mask

_Call = Callable[..., Tensor]


class _Loss(NamedTuple):
    """A loss's derivative (``slope``, by input, target, options), up to a factor; the target's may be its negative."""

    slope: _Call
    factor: float = 1.0
    is_of_difference: bool = True
    is_sign: bool = False


def _times(kept: Any, grad: Tensor, factor: float) -> Tensor:
    if grad.dim():
        product: Tensor = kept.multiply(grad)
        return product if factor == 1 else product * factor
    decoded: Tensor = kept.decode()
    return (decoded if factor == 1 else decoded * factor) * grad


def _packs(region: Keeper, input: Any, target: Any, *constants: Any) -> bool:
    if not (region.is_activation(input) and region.is_activation(target) and input.device == target.device):
        return False
    if not requires_grad(input, target) or requires_grad(*constants) or region.are_weights(input, target):
        return False
    return max(input.numel(), target.numel()) >= max(1, region.settings.min_numel)


def _divisor(func: Callable, reduction: Any, x: Tensor) -> int | None:
    divisors = {"none": 1, "sum": 1, "mean": x.numel()}
    if func is F.kl_div:
        divisors["batchmean"] = x.shape[0] if x.dim() else 1
    return divisors.get(reduction) if isinstance(reduction, str) else None


def _handler(loss: _Loss) -> Callable:
    def handle(region: Keeper, func: Callable, *args: Any, **kwargs: Any) -> Any:
        options = arguments_of(func, args, kwargs)
        if options is None or any(options.pop(name, None) is not None for name in ("size_average", "reduce", "weight")):
            return NotImplemented
        input, target, reduction = options.pop("input"), options.pop("target"), options.pop("reduction")
        if not _packs(region, input, target, *(() if loss.is_of_difference else (target,))):
            return NotImplemented
        if not all(isinstance(x, int | float) and (x is False or 0 < x < math.inf) for x in options.values()):
            return NotImplemented
        try:
            shape = torch.broadcast_shapes(input.shape, target.shape)
        except RuntimeError:
            return NotImplemented  # torch raises the error
        divisor = _divisor(func, reduction, input.new_empty(()).expand(shape))
        if not divisor or (input.shape != target.shape and not loss.is_of_difference):
            return NotImplemented

        input_shape, input_dtype, target_shape, target_dtype = input.shape, input.dtype, target.shape, target.dtype

        def run(ctx: Any, x: Tensor, t: Tensor) -> Tensor:
            out: Tensor = func(x, t, reduction=reduction, **options)
            slope = loss.slope(x.to(out.dtype), t.to(out.dtype), **options)
            if loss.is_sign:
                save(ctx, keep_mask(slope > 0), keep_mask(slope < 0))
            else:
                save(ctx, region.keep(slope, share=False))
            return out

        def gradients(needs: tuple[bool, ...], grad: Tensor, kept: Any, *below: Any) -> tuple[Any, ...]:
            if below:
                sign = kept.decode().to(grad.dtype).sub_(below[0].decode().to(grad.dtype))
                along = grad.expand(sign.shape)
                along = along / divisor * sign if divisor > 1 else along * sign
            else:
                along = _times(kept, grad, loss.factor / divisor)
                along = along.contiguous() if loss.is_of_difference else along  # as torch's own gradient is
            of_input = along.sum_to_size(input_shape).to(input_dtype) if needs[0] else None
            return of_input, (-along).sum_to_size(target_shape).to(target_dtype) if needs[1] else None

        return region.apply(Formula, run, gradients, input, target)

    return handle


def _binary_cross_entropy_with_logits(region: Keeper, func: Callable, *args: Any, **kwargs: Any) -> Any:
    options = arguments_of(func, args, kwargs)
    if options is None or options.pop("size_average") is not None or options.pop("reduce") is not None:
        return NotImplemented
    input, target, weight, reduction, positive = options.values()
    divisor = _divisor(func, reduction, input) if _packs(region, input, target, target, weight, positive) else None
    if not divisor or input.shape != target.shape:
        return NotImplemented

    dtype = input.dtype

    def run(ctx: Any, x: Tensor, t: Tensor, w: Tensor | None, p: Tensor | None) -> Tensor:
        out: Tensor = func(x, t, weight=w, reduction=reduction, pos_weight=p)
        slope = torch.sigmoid(x.to(out.dtype))
        if p is None:
            slope -= t
        more = () if p is None else (t, p)
        kept = region.keep(slope, share=False)
        save(ctx, kept, None if w is None else region.keep_activation(w), *map(region.keep_activation, more))
        return out

    def gradients(needs: tuple[bool, ...], grad: Tensor, kept: Any, w: Any, *more: Any) -> tuple[Any, ...]:
        if more:
            t, p = (each.decode().to(grad.dtype) for each in more)
            along = (1 + (p - 1) * t) * kept.decode() - p * t
            along = along * (1 / divisor) * grad
        else:
            along = _times(kept, grad, 1 / divisor)
        along = along if w is None else along * w.decode().to(grad.dtype)
        return along.to(dtype), None, None, None

    return region.apply(Formula, run, gradients, input, target, weight, positive)


def _gaussian_nll(input: Tensor, target: Tensor, var: Tensor, full: bool, reduction: str) -> Tensor:
    """The ops of ``F.gaussian_nll_loss`` without its copy of the variances, which are already bounded."""
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss += 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _gaussian_nll_loss(region: Any, func: Callable, *args: Any, **kwargs: Any) -> Any:
    """Save the variances exactly, also for the op that computed them: torch saves a copy of its own."""
    options = arguments_of(func, args, kwargs)
    if options is None or region.settings.leaves_ops_to_torch:
        return NotImplemented
    input, target, var, full, eps, reduction = options.values()
    if not (isinstance(var, Tensor) and is_tracked(var) and var.shape == input.shape):
        return NotImplemented
    is_cast = any(x.dtype is not torch.float32 for x in (input, target, var))  # by autocast
    if (is_cast and region.torch_runner(input, target, var) is None) or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    if not (var.detach() >= eps).all():
        return NotImplemented  # torch raises an error, or bounds them
    return region.hooks.run_exactly(_gaussian_nll, (input, target, var, full, reduction), {})


_STORED = Stored(
    "`mse_loss`, `smooth_l1_loss`, `huber_loss`, `soft_margin_loss`, `kl_div`, `binary_cross_entropy_with_logits`",
    "the derivative, packed; with weights of positives the probability and the target, packed",
    UNBIASED,
)
_LOSSES: dict[Callable, _Loss] = {
    F.mse_loss: _Loss(torch.sub, factor=2.0),
    F.smooth_l1_loss: _Loss(lambda x, t, beta: ((x - t) / beta).clamp_(-1, 1)),
    F.huber_loss: _Loss(lambda x, t, delta: (x - t).clamp_(-delta, delta)),
    F.soft_margin_loss: _Loss(lambda x, t: torch.sigmoid(-t * x).mul_(-t), is_of_difference=False),
    F.kl_div: _Loss(lambda x, t, log_target: -t.exp() if log_target else -t, is_of_difference=False),
}
OPS = (
    *(Op((func,), _handler(loss), _STORED, is_bit_exact=False) for func, loss in _LOSSES.items()),
    Op(
        (F.binary_cross_entropy_with_logits,),
        _binary_cross_entropy_with_logits,
        _STORED,
        is_bit_exact=False,
    ),
    Op(
        (F.gaussian_nll_loss,),
        _gaussian_nll_loss,
        Stored("`gaussian_nll_loss`", "as in PyTorch", EXACT),
        is_bit_exact=False,
    ),
    Op((F.l1_loss,), _handler(_Loss(torch.sub, is_sign=True)), Stored("`l1_loss`", "the sign, in two bits", EXACT)),
)
