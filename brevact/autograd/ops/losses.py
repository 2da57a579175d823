"""Cross-entropy and negative log-likelihood: probabilities are saved packed, class-index targets exactly.

With x_n the logits of a sample, p_n = softmax(x_n) and q_n = (1 - s) w * onehot(y_n) + s / C w (class indices) or
q_n = w * ((1 - s) t_n + s / C) (class probabilities), for the label smoothing s, C classes and their weights w:

    L_n = -sum_c q_nc log p_nc,    dL_n/dx_n = p_n sum_c q_nc - q_n

It is linear in p and in t, hence unbiased. Where the probability of class y is above 1/2, what is left to 1 is saved in
place of it, with a bit per sample: that is the size of the gradient, and p - 1 would have the error of a number near 1.
With class probabilities or smoothing the derivative itself is saved, which is small beside p and q where they are near
each other.
The mean is over the weights of the targets (class indices) or over the samples (class probabilities). The negative
log-likelihood reads log-probabilities; its gradient, -q_n, reads none.

A language model's logits are the largest tensor of its step. Large (N, C) logits with class indices are computed in
chunks of rows, forward and backward: log-probabilities, probabilities and products with them never exist as a whole,
and the gradient is written in the logits' dtype. Torch's own op computes the losses of a chunk's samples, and its own
reduction joins them, so that the loss is the same to the last bit.

Losses of pairs of elements: the derivative is saved packed, or its sign.

With d = x - t for an input x and a target t, and the gradient g of the loss, over the number of elements for a mean:

    mse_loss             dL/dx = 2 g d
    smooth_l1_loss       dL/dx = g clamp(d / beta, -1, 1)
    huber_loss           dL/dx = g clamp(d, -delta, delta)
    l1_loss              dL/dx = g sign(d),  two exact bits
    soft_margin_loss     dL/dx = -g t sigmoid(-t x)
    kl_div               dL/dx = -g t,  or -g exp(t)
    binary_cross_entropy_with_logits
                         dL/dx = g (sigmoid(x) - t)

The derivative replaces input and target, which torch saves in full precision; linear in it, hence unbiased. With
weights torch runs in full precision, as ``binary_cross_entropy`` of probabilities does: its derivative,
(x - t) / (x (1 - x)), is unbounded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.call_arguments import Parameters
from brevact.autograd.deriving.layers import rows_of
from brevact.autograd.ops.base import Formula, Needs, can_pack, requires_grad, save
from brevact.autograd.ops.op import EXACT, UNBIASED, Op, Stored
from brevact.autograd.ops.probabilities import keep_factor_of_logs
from brevact.autograd.region.settings import BackwardSettings
from brevact.autograd.saving import storage_report
from brevact.autograd.saving.saved import AS_IT_IS, Expression, Region, Saved, Weight, express
from brevact.autograd.saving.storages import is_made, is_tracked
from brevact.autograd.saving.store import keep_exact, keep_mask, keep_places, reported

_REDUCTIONS = frozenset(("none", "mean", "sum"))
_Loss = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class _Labels(NamedTuple):
    class_dim: int
    ignore_index: int
    reduction: str
    label_smoothing: float


def _cross_entropy(
    region: Region, call: _Loss, options: _Labels, input: Tensor, target: Tensor, weight: Weight
) -> Tensor:
    dim, dtype = options.class_dim, input.dtype

    def run(ctx: Any, input: Tensor, target: Tensor, weight: Weight) -> Tensor:
        out = call(input, target, weight)
        known, sure = _known_logits(region, input), None
        if known is None:
            p = torch.softmax(input, dim, dtype=out.dtype)
            sure = keep_mask(_turn_sure(p, target, options))
            kept = region.keep(p, share=False)
        else:
            kept = reported(express(_Probabilities, (known,), dim, tuple(input.shape), out.dtype))
        save(ctx, kept, _kept_index(region, input, target, options), sure, exact=(weight,))
        return out

    def gradients(needs: Needs, grad: Tensor, kept: Any, target: Any, sure: Any, weight: Any) -> tuple[Any, ...]:
        p = kept.decode()
        g, y, w_y = _of_samples(grad, p, target.decode(), _stretched(weight, p, options), options)
        hit = g * w_y
        found = p.mul_(hit) if isinstance(kept.decoder, _Probabilities) else p * hit
        _subtract_targets(found, y, None if sure is None else sure.decode(), hit)
        return found.to(dtype), None, None

    return region.apply(Formula, run, gradients, input, target, weight)


def _soft_cross_entropy(
    region: Region, call: _Loss, options: _Labels, input: Tensor, target: Tensor, weight: Weight
) -> Tensor:
    dim, dtype = options.class_dim, input.dtype

    def run(ctx: Any, input: Tensor, target: Tensor, weight: Weight) -> Tensor:
        out = call(input, target, weight)
        slope, total = _slope(torch.softmax(input, dim, dtype=out.dtype), target, weight, options)
        save(ctx, region.keep(slope, share=False), exact=(total,))
        return out

    def gradients(needs: Needs, grad: Tensor, kept: Any, total: Tensor) -> tuple[Any, ...]:
        g = grad.unsqueeze(dim) if options.reduction == "none" else grad
        g = g.to(total.dtype) / total if options.reduction == "mean" else g
        return (g.to(dtype) * kept.decode()).to(dtype), None, None

    return region.apply(Formula, run, gradients, input, target, weight)


def _cross_entropy_of_rows(
    region: Region, call: _Loss, options: _Labels, input: Tensor, target: Tensor, weight: Weight
) -> Tensor:
    shape, dtype, step = input.shape, input.dtype, _rows_of_chunk(input)

    def run(ctx: Any, input: Tensor, target: Tensor) -> Tensor:
        known = _known_logits(region, input)
        losses, kept, sure = [], [], []
        for start in range(0, len(input), step):
            x, y = input[start : start + step], target[start : start + step]
            losses.append(call(x, y, None))
            if known is None:
                p = torch.softmax(x, 1, dtype=losses[-1].dtype)
                sure.append(_turn_sure(p, y, options))
                kept.append(region.keep(p, share=False))
        loss = torch.cat(losses)
        if known is not None:
            kept.append(reported(express(_Probabilities, (known,), 1, tuple(shape), loss.dtype)))
        save(ctx, *kept, keep_mask(torch.cat(sure)) if sure else None, _kept_index(region, input, target, options))
        ctx.gradients = functools.partial(gradients, loss.dtype, known is not None)
        if options.reduction == "none":
            return loss
        is_ignored = target.long() == options.ignore_index  # bytes may not hold every index
        return F.nll_loss(-loss.unsqueeze(1), is_ignored.long(), reduction=options.reduction, ignore_index=1)

    def gradients(of_loss: torch.dtype, is_known: bool, needs: Any, grad: Tensor, *values: Any) -> tuple[Any, ...]:
        *kept, sure, kept_target = values
        target = kept_target.decode()
        g, y, w_y = _of_samples(grad, grad.new_empty((), dtype=of_loss), target, None, options)
        hit = (g * w_y).expand(len(target), 1)
        are_sure = None if sure is None else sure.decode()
        rows = rows_of(kept[0].decoder.sources[0][0], kept[0].tensors) if is_known else None
        whole = kept[0].decode() if is_known and rows is None else None
        grad_input = torch.empty(shape, dtype=dtype, device=grad.device)
        for count, start in enumerate(range(0, len(target), step)):
            of_chunk = slice(start, min(start + step, len(target)))
            out, factor = grad_input[of_chunk], hit[of_chunk]
            found = out if dtype is of_loss else torch.empty_like(out, dtype=of_loss)
            if rows is not None:
                torch.softmax(rows(of_chunk.start, of_chunk.stop), 1, dtype=of_loss, out=found)
                found.mul_(factor)
            else:
                torch.mul(kept[count].decode() if whole is None else whole[of_chunk], factor, out=found)
            _subtract_targets(found, y[of_chunk], None if are_sure is None else are_sure[of_chunk], factor)
            if found is not out:
                out.copy_(found)
        return grad_input, None

    return region.apply(Formula, run, None, input, target)


#: Minimum elements per chunk of logits, and maximum number of chunks.
_CHUNK, _MOST_CHUNKS = 1 << 22, 32
#: Rows per chunk are a multiple of this, so that rows of a copy are aligned like their originals.
_ALIGNED_ROWS = 16


def _rows_of_chunk(input: Tensor) -> int:
    chunks = min(max(1, input.numel() // _CHUNK), _MOST_CHUNKS)
    rows = -(-len(input) // chunks)
    return max(1, -(-rows // _ALIGNED_ROWS)) * _ALIGNED_ROWS


@dataclass(eq=False, slots=True)
class _Probabilities(Expression):
    """Decoder of the softmax of recomputed logits; those of a linear layer in chunks of rows."""

    dim: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    how = storage_report.RECOMPUTED

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        logits = self.sources[0][0]
        rows = rows_of(logits, tensors) if self.dim == len(self.shape) - 1 else None
        if rows is None:
            return torch.softmax(logits.decode(tensors), self.dim, dtype=self.dtype)
        found = torch.empty(self.shape, dtype=self.dtype, device=tensors[0].device)
        flat = found.view(-1, self.shape[-1])
        step = _rows_of_chunk(flat)
        for start in range(0, len(flat), step):
            out = flat[start : start + step]
            torch.softmax(rows(start, start + len(out)), 1, dtype=self.dtype, out=out)
        return found


def _kept_index(region: Region, input: Tensor, target: Tensor, options: _Labels) -> Saved:
    """Save class-index targets, or the ignored index; the batch's own stay unpacked: the caller holds them anyway."""
    if not is_made(target):
        return keep_exact(target)
    sizes, ignored = input.shape[options.class_dim : options.class_dim + 1], options.ignore_index
    return keep_places(target, region.settings, (*sizes, ignored + 1), lowest=min(0, ignored))


def _turn_sure(p: Tensor, target: Tensor, options: _Labels) -> Tensor:
    """Subtract from 1 the targets' probabilities, of p (N, C, d1, ..), above 1/2; return which, (N, 1, d1, ..)."""
    y = target.long().unsqueeze(options.class_dim) % p.shape[options.class_dim]  # any class in place of the ignored one
    of_target = p.gather(options.class_dim, y)
    sure = of_target > 0.5
    p.scatter_(options.class_dim, y, torch.where(sure, 1 - of_target, of_target))
    return sure


def _subtract_targets(grad: Tensor, y: Tensor, sure: Tensor | None, hit: Tensor) -> None:
    """Subtract ``hit`` from the targets of p times it, (N, C, d1, ..), in place."""
    dim = 1 if grad.dim() > 1 else 0
    if sure is None:
        grad.scatter_add_(dim, y, -hit)
    else:
        of_target = grad.gather(dim, y)
        grad.scatter_(dim, y, torch.where(sure, -of_target, of_target - hit))


def _known_logits(region: Region, input: Tensor) -> Saved | None:
    known = region.find_known(input) if region.settings.recompute else None
    if known is not None and known[1].depth and known[1].quality.is_enough_for(region.settings, is_nonlinear=True):
        return known
    return None


def _negative_log_likelihood(
    region: Region, call: _Loss, options: _Labels, input: Tensor, target: Tensor, weight: Weight
) -> Tensor:
    shape, dtype = input.shape, input.dtype

    def run(ctx: Any, input: Tensor, target: Tensor, weight: Weight) -> Tensor:
        save(ctx, _kept_index(region, input, target, options), exact=(weight,))
        return call(input, target, weight)

    def gradients(needs: Needs, grad: Tensor, kept: Any, weight: Weight) -> tuple[Any, ...]:
        found = torch.zeros(shape, dtype=grad.dtype, device=grad.device)
        g, y, w_y = _of_samples(grad, found, kept.decode(), _stretched(weight, found, options), options)
        return found.scatter_(options.class_dim, y, -g * w_y).to(dtype), None, None

    return region.apply(Formula, run, gradients, input, target, weight)


def _slope(p: Tensor, target: Tensor, weight: Weight, options: _Labels) -> tuple[Tensor, Tensor]:
    """p sum(q) - q, 0 for ignored samples, and the divisor of a mean."""
    dim, s = options.class_dim, options.label_smoothing
    w, exact = _stretched(weight, p, options), torch.promote_types(p.dtype, torch.float32)
    if target.is_floating_point():
        total = torch.full((), p.numel() / p.shape[dim], dtype=exact, device=p.device)
        q = target.to(p.dtype) * (1 - s) + s / p.shape[dim]
    else:
        counts, y, w_y = _of_samples(p.new_ones(()), p, target, w, options._replace(reduction="sum"))
        total = (counts * w_y).sum(dtype=exact)
        total.masked_fill_(total == 0, 1)
        q = torch.full_like(p, s / p.shape[dim]).scatter_add_(dim, y, torch.full_like(counts, 1 - s)) * counts
    q = q if w is None else q * w
    return p * q.sum(dim, keepdim=True) - q, total


def _stretched(weight: Weight, p: Tensor, options: _Labels) -> Tensor | None:
    if weight is None:
        return None
    return weight.to(p.dtype).view([-1 if dim == options.class_dim else 1 for dim in range(p.dim())])


def _of_samples(
    grad: Tensor, p: Tensor, target: Tensor, weight: Weight, options: _Labels
) -> tuple[Tensor, Tensor, Tensor]:
    """dL/dL_n, y_n and w_y (N, 1, d1, ..); dL/dL_n and y_n are 0 where the target is ignored."""
    y = target.long().unsqueeze(options.class_dim)
    counts = y != options.ignore_index
    y = y.where(counts, 0)
    w_y = p.new_ones(()) if weight is None else weight.expand_as(p).gather(options.class_dim, y)
    g = grad.unsqueeze(options.class_dim) if options.reduction == "none" else grad
    if options.reduction == "mean":  # the sum of half-precision weights may overflow
        exact = torch.promote_types(p.dtype, torch.float32)
        g = (g.to(exact) / (counts * w_y).sum(dtype=exact)).to(p.dtype)
    return torch.where(counts, g, 0), y, w_y


def _goes_by_rows(settings: BackwardSettings, input: Tensor, target: Tensor, weight: Weight, options: _Labels) -> bool:
    if input.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return False
    if weight is not None or options.label_smoothing or not input.is_contiguous():
        return False
    rows, step = len(input), _rows_of_chunk(input)
    last = (rows - 1) % step + 1
    return rows == len(target) and rows > step and last * input.shape[1] >= settings.min_numel


_parameters = functools.cache(Parameters)


def _handler(apply: Callable[..., Tensor]) -> Callable:
    def handle(region: Region, func: Callable, *args: Any, **kwargs: Any) -> Any:
        given = _parameters(func).read(args, kwargs)
        if given is None:
            return NotImplemented
        input, target, weight, size_average, ignore_index, reduce, reduction, *smoothing = given.values()
        if not (can_pack(region, input) and input.dim() and isinstance(target, Tensor)):
            return NotImplemented
        if requires_grad(target, weight) or size_average is not None or reduce is not None:
            return NotImplemented
        if reduction not in _REDUCTIONS or input.device != target.device:
            return NotImplemented  # torch raises the error
        more = {"label_smoothing": smoothing[0]} if smoothing else {}
        options = _Labels(min(1, input.dim() - 1), ignore_index, reduction, *(smoothing or (0.0,)))
        in_chunks = apply is _cross_entropy and _goes_by_rows(region.settings, input, target, weight, options)
        of_call = "none" if in_chunks else reduction

        def call(x: Tensor, y: Tensor, w: Tensor | None) -> Tensor:
            return func(x, y, weight=w, ignore_index=ignore_index, reduction=of_call, **more)

        is_soft = apply is _cross_entropy and (target.is_floating_point() or options.label_smoothing > 0)
        run = _cross_entropy_of_rows if in_chunks else _soft_cross_entropy if is_soft else apply
        return run(region, call, options, input, target, weight)

    return handle


OPS: tuple[Op, ...] = (
    Op(
        (F.cross_entropy,),
        _handler(_cross_entropy),
        Stored(
            "cross-entropy",
            "the probabilities, packed, those of targets above 1/2 by what is left to 1; index targets unpacked, those "
            "made in the step in the smallest integers; with class probabilities or smoothing the derivative, packed",
            UNBIASED,
        ),
        is_bit_exact=False,
    ),
    Op(
        (F.nll_loss,),
        _handler(_negative_log_likelihood),
        Stored(
            "negative log-likelihood", "the targets unpacked, those made in the step in the smallest integers", EXACT
        ),
        is_bit_exact=False,
    ),
)


_Call = Callable[..., Tensor]
#: Options with which torch runs in full precision.
_RARE = "size_average", "reduce", "weight", "pos_weight"


class _PairLoss(NamedTuple):
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


def _divisor(func: Callable, reduction: Any, x: Tensor) -> int | None:
    divisors = {"none": 1, "sum": 1, "mean": x.numel()}
    if func is F.kl_div:
        divisors["batchmean"] = x.shape[0] if x.dim() else 1
    return divisors.get(reduction) if isinstance(reduction, str) else None


def _pair_handler(loss: _PairLoss) -> Callable:
    def handle(region: Region, func: Callable, *args: Any, **kwargs: Any) -> Any:
        options = _parameters(func).read(args, kwargs)
        if options is None or any(options.pop(name, None) is not None for name in _RARE):
            return NotImplemented
        input, target, reduction = options.pop("input"), options.pop("target"), options.pop("reduction")
        if not (region.is_activation(input) and region.is_activation(target) and input.device == target.device):
            return NotImplemented
        of_target = target.requires_grad and not loss.is_of_difference
        if not requires_grad(input, target) or (of_target and func is not F.kl_div):
            return NotImplemented
        if max(input.numel(), target.numel()) < region.settings.min_numel or region.are_weights(input, target):
            return NotImplemented  # there is nothing to pack
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
                return out
            kept = func is F.kl_div and keep_factor_of_logs(region, slope, x, is_even=reduction != "none")
            if not of_target:
                save(ctx, kept or region.keep(slope, share=False))
                return out
            kept = (kept or keep_exact(slope)) if x.requires_grad else None
            is_log = options["log_target"]  # of a mixture, other gradients of the target cancel that of the factor
            logs = keep_factor_of_logs(region, -slope, t) if is_log and (not kept or kept[1] is not AS_IT_IS) else None
            rest = slope * (x - t - int(logs is None)) if is_log else t.log() + t / t - x
            save(ctx, kept, keep_exact(rest), logs)
            return out

        def gradients(needs: Needs, grad: Tensor, kept: Any, *below: Any) -> tuple[Any, ...]:
            if of_target:
                parts = [_times(each, grad, 1 / divisor) for each in below if each is not None]
                return _times(kept, grad, loss.factor / divisor) if needs[0] else None, sum(parts)
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


def _gaussian_nll(input: Tensor, target: Tensor, var: Tensor, full: bool, reduction: str) -> Tensor:
    """The ops of ``F.gaussian_nll_loss`` without its copy of the variances, which are already bounded."""
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    if full:
        loss += 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


def _gaussian_nll_loss(region: Any, func: Callable, *args: Any, **kwargs: Any) -> Any:
    """Save the variances exactly, also for the op that computed them: torch saves a copy of its own."""
    options = _parameters(func).read(args, kwargs)
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
    "the derivative, packed, of `kl_div` of a log-softmax less a multiple of probabilities; with weights as in PyTorch",
    UNBIASED,
)
_LOSSES: dict[Callable, _PairLoss] = {
    F.mse_loss: _PairLoss(torch.sub, factor=2.0),
    F.smooth_l1_loss: _PairLoss(lambda x, t, beta: ((x - t) / beta).clamp_(-1, 1)),
    F.huber_loss: _PairLoss(lambda x, t, delta: (x - t).clamp_(-delta, delta)),
    F.soft_margin_loss: _PairLoss(lambda x, t: torch.sigmoid(-t * x).mul_(-t), is_of_difference=False),
    F.binary_cross_entropy_with_logits: _PairLoss(lambda x, t: torch.sigmoid(x).sub_(t), is_of_difference=False),
    F.kl_div: _PairLoss(lambda x, t, log_target: -t.exp() if log_target else -t, is_of_difference=False),
}
OPS += (
    *(Op((func,), _pair_handler(loss), _STORED, is_bit_exact=False) for func, loss in _LOSSES.items()),
    Op(
        (F.gaussian_nll_loss,),
        _gaussian_nll_loss,
        Stored("`gaussian_nll_loss`", "as in PyTorch", EXACT),
        is_bit_exact=False,
    ),
    Op(
        (F.l1_loss,),
        _pair_handler(_PairLoss(torch.sub, is_sign=True)),
        Stored("`l1_loss`", "the sign, in two bits", EXACT),
    ),
)
