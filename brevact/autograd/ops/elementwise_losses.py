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

from brevact.autograd.keeper import Keeper
from brevact.autograd.ops.base import Saving, load, requires_grad, save
from brevact.autograd.ops.op import EXACT, UNBIASED, Op, Stored
from brevact.autograd.storages import is_tracked
from brevact.autograd.store import keep_mask

_Call = Callable[[Tensor, Tensor], Tensor]


class _Loss(NamedTuple):
    """A loss's derivative by its input, up to a factor, and whether the target's derivative is its negative."""

    slope: Callable[[Tensor, Tensor], Tensor]
    factor: float = 1.0
    is_of_difference: bool = True
    is_sign: bool = False


_SQUARE, _SIGN = _Loss(torch.sub, factor=2.0), _Loss(torch.sub, is_sign=True)


class _ElementwiseLoss(Saving):
    @staticmethod
    def forward(
        ctx: Any, region: Keeper, call: _Call, loss: _Loss, divisor: int, input: Tensor, target: Tensor
    ) -> Tensor:
        out = call(input, target)
        slope = loss.slope(input.to(out.dtype), target.to(out.dtype))
        if loss.is_sign:
            save(ctx, keep_mask(slope > 0), keep_mask(slope < 0))
        else:
            save(ctx, region.keep(slope, share=False))
        ctx.factor, ctx.divisor, ctx.is_of_difference = loss.factor, divisor, loss.is_of_difference
        ctx.shapes, ctx.dtypes = (input.shape, target.shape), (input.dtype, target.dtype)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, *below = load(ctx)
        if below:
            sign = kept.decode().to(grad.dtype).sub_(below[0].decode().to(grad.dtype))
            along = grad.expand(sign.shape) / ctx.divisor * sign if ctx.divisor > 1 else grad.expand(sign.shape) * sign
        else:
            along = _times(kept, grad, ctx.factor / ctx.divisor)
            along = along.contiguous() if ctx.is_of_difference else along  # as torch's own gradient is
        (input_shape, target_shape), (input_dtype, target_dtype) = ctx.shapes, ctx.dtypes
        grad_input = along.sum_to_size(input_shape).to(input_dtype) if ctx.needs_input_grad[4] else None
        grad_target = (-along).sum_to_size(target_shape).to(target_dtype) if ctx.needs_input_grad[5] else None
        return None, None, None, None, grad_input, grad_target


def _times(kept: Any, grad: Tensor, factor: float) -> Tensor:
    """Return derivative * factor * gradient, for a gradient per loss or of a reduced loss."""
    if grad.dim():
        product: Tensor = kept.multiply(grad)
        return product if factor == 1 else product * factor
    decoded: Tensor = kept.decode()
    return (decoded if factor == 1 else decoded * factor) * grad


class _BinaryCrossEntropy(Saving):
    @staticmethod
    def forward(
        ctx: Any,
        region: Keeper,
        call: Callable[..., Tensor],
        divisor: int,
        input: Tensor,
        target: Tensor,
        weight: Tensor | None,
        positive: Tensor | None,
    ) -> Tensor:
        out = call(input, target, weight, positive)
        slope = torch.sigmoid(input.to(out.dtype))
        if positive is None:
            slope -= target
        kept = region.keep(slope, share=False)
        more = (target, positive) if positive is not None else ()
        save(ctx, kept, None if weight is None else region.keep_activation(weight), *map(region.keep_activation, more))
        ctx.divisor, ctx.dtype = divisor, input.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight, *more = load(ctx)
        if more:
            target, positive = (each.decode().to(grad.dtype) for each in more)
            along = (1 + (positive - 1) * target) * kept.decode() - positive * target
            along = along * (1 / ctx.divisor) * grad
        else:
            along = _times(kept, grad, 1 / ctx.divisor)
        along = along if weight is None else along * weight.decode().to(grad.dtype)
        return None, None, None, along.to(ctx.dtype), None, None, None


def _packs(region: Keeper, input: Any, target: Any, *constants: Any) -> bool:
    """Return whether a loss's derivative is packed: a large enough activation needs a gradient."""
    if not (region.is_activation(input) and region.is_activation(target) and input.device == target.device):
        return False
    if not requires_grad(input, target) or requires_grad(*constants) or region.are_weights(input, target):
        return False
    return max(input.numel(), target.numel()) >= max(1, region.settings.min_numel)


def _divisor(reduction: Any, x: Tensor) -> int | None:
    """Return a reduction's divisor; None if torch refuses the reduction."""
    divisors = {"none": 1, "sum": 1, "mean": x.numel(), "batchmean": x.shape[0] if x.dim() else 1}
    return divisors.get(reduction) if isinstance(reduction, str) else None


def _apply(region: Keeper, call: _Call, loss: _Loss, reduction: Any, input: Tensor, target: Tensor) -> Any:
    """Run a loss and save its derivative; NotImplemented if torch refuses the arguments or nothing is packed."""
    constants = () if loss.is_of_difference else (target,)
    if not _packs(region, input, target, *constants):
        return NotImplemented
    try:
        shape = torch.broadcast_shapes(input.shape, target.shape)
    except RuntimeError:
        return NotImplemented  # torch raises the error
    divisor = _divisor(reduction, input.new_empty(()).expand(shape))
    if not divisor:
        return NotImplemented
    return region.apply(_ElementwiseLoss, call, loss, divisor, input, target)


def _of_difference(loss: _Loss) -> Callable:
    def handle(
        region: Keeper,
        func: Callable,
        input: Tensor,
        target: Tensor,
        size_average: None = None,
        reduce: None = None,
        reduction: str = "mean",
        weight: None = None,
    ) -> Any:
        if size_average is not None or reduce is not None or weight is not None or reduction == "batchmean":
            return NotImplemented
        return _apply(region, lambda x, t: func(x, t, reduction=reduction), loss, reduction, input, target)

    return handle


def _smooth_l1_loss(
    region: Keeper,
    func: Callable,
    input: Tensor,
    target: Tensor,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Any:
    if size_average is not None or reduce is not None or reduction == "batchmean":
        return NotImplemented
    if not _is_positive(beta) and beta != 0:
        return NotImplemented
    loss = _Loss(lambda x, t: ((x - t) / beta).clamp_(-1, 1)) if beta else _SIGN
    return _apply(region, lambda x, t: func(x, t, reduction=reduction, beta=beta), loss, reduction, input, target)


def _huber_loss(
    region: Keeper,
    func: Callable,
    input: Tensor,
    target: Tensor,
    reduction: str = "mean",
    delta: float = 1.0,
    weight: None = None,
) -> Any:
    if weight is not None or reduction == "batchmean" or not _is_positive(delta):
        return NotImplemented
    loss = _Loss(lambda x, t: (x - t).clamp_(-delta, delta))
    return _apply(region, lambda x, t: func(x, t, reduction=reduction, delta=delta), loss, reduction, input, target)


def _is_positive(x: Any) -> bool:
    return isinstance(x, int | float) and 0 < x < math.inf


def _soft_margin_loss(
    region: Keeper,
    func: Callable,
    input: Tensor,
    target: Tensor,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
) -> Any:
    if size_average is not None or reduce is not None or reduction == "batchmean":
        return NotImplemented
    loss = _Loss(lambda x, t: torch.sigmoid(-t * x).mul_(-t), is_of_difference=False)
    return _apply(region, lambda x, t: func(x, t, reduction=reduction), loss, reduction, input, target)


def _kl_div(
    region: Keeper,
    func: Callable,
    input: Tensor,
    target: Tensor,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    if size_average is not None or reduce is not None or input.shape != target.shape:
        return NotImplemented
    loss = _Loss(lambda x, t: -t.exp() if log_target else -t, is_of_difference=False)

    def call(x: Tensor, t: Tensor) -> Tensor:
        return func(x, t, reduction=reduction, log_target=log_target)

    return _apply(region, call, loss, reduction, input, target)


def _binary_cross_entropy_with_logits(
    region: Keeper,
    func: Callable,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    pos_weight: Tensor | None = None,
) -> Any:
    if size_average is not None or reduce is not None or reduction == "batchmean":
        return NotImplemented
    if not _packs(region, input, target, target, weight, pos_weight) or input.shape != target.shape:
        return NotImplemented
    divisor = _divisor(reduction, input)
    if not divisor:
        return NotImplemented

    def call(x: Tensor, t: Tensor, w: Tensor | None, p: Tensor | None) -> Tensor:
        return func(x, t, weight=w, reduction=reduction, pos_weight=p)

    return region.apply(_BinaryCrossEntropy, call, divisor, input, target, weight, pos_weight)


def _gaussian_nll(input: Tensor, target: Tensor, var: Tensor, full: bool, reduction: str) -> Tensor:
    """The ops of ``F.gaussian_nll_loss`` without its copy of the variances, which are already bounded."""
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss += 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _gaussian_nll_loss(
    region: Any,
    func: Callable,
    input: Tensor,
    target: Tensor,
    var: Any,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:
    """Save the variances exactly, also for the op that computed them: torch saves a copy of its own."""
    if (
        not (isinstance(var, Tensor) and is_tracked(var) and var.shape == input.shape)
        or region.settings.leaves_ops_to_torch
    ):
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
OPS = (
    *(
        Op((func,), handler, _STORED, is_bit_exact=False)
        for func, handler in (
            (F.mse_loss, _of_difference(_SQUARE)),
            (F.smooth_l1_loss, _smooth_l1_loss),
            (F.huber_loss, _huber_loss),
            (F.soft_margin_loss, _soft_margin_loss),
            (F.kl_div, _kl_div),
            (F.binary_cross_entropy_with_logits, _binary_cross_entropy_with_logits),
        )
    ),
    Op(
        (F.gaussian_nll_loss,),
        _gaussian_nll_loss,
        Stored("`gaussian_nll_loss`", "as in PyTorch", EXACT),
        is_bit_exact=False,
    ),
    Op((F.l1_loss,), _of_difference(_SIGN), Stored("`l1_loss`", "the sign, in two bits", EXACT)),
)
