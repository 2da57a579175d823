"""Softmax, log-softmax and log-sum-exp: probabilities are saved packed.

Log-softmax: dL/dx = g - p sum(g), with p = exp(out) saved; linear in p, hence unbiased. Packing the output itself
would be biased: the gradient is exponential in it. So is that of log-sum-exp, p g, in its input; p = exp(x - out) is
saved. A probability above 1/2, one per row, is saved by what is left to 1, with its class: an error of a number near 1
is large beside the gradient of a network that is sure.

A product of log-probabilities with t, also of rows in other places or plus constants, saves t = r + p s for s = sum(t):
r packed, s, one number per row, and log-softmax's own copy of p. Near a teacher t, where errors of t and p were 20
times t - p, r is small; and the gradient of p s is 0 if p sums to 1: it is divided by its sum. If the product's own
gradient is even along a row, that of the input is unbiased, otherwise quadratic in p. Where r is no less than half of
t, s is 0, so that errors of p do not count. The same holds for x - log-sum-exp(x). A factor of any other logarithm,
whose errors its argument would divide, stays unpacked.

Softmax: dL/dx = p * (g - sum(g p)), quadratic in the output p. One packed copy p^ of it
leaves a bias, with independent errors e = p^ - p of mean 0:

    E[p^_i (g_i - sum(g p^))] - dL/dx_i = -E[e_i^2] g_i.

The bias has one sign at all voxels of a segmentation, and the gradient of the last layer's bias adds it up. So softmax
over classes saves unbiased codes, for itself alone, since g may depend on the codes that the reader of p decodes: p^,
rounded stochastically, so that errors are independent, e^2 at 1 bit per element, whose product with g is added, and the
most probable class k, without its probability: g - g_k takes the place of g, since dL/dx is the same for both, and
dL/dx_k is minus the sum of the others.

Attention (the last of three or more dimensions, more than 32 keys) shares one packed copy of p with the product that
reads p next, of ``derive_min_bits`` or more. Its gradient is of p^ / sum(p^), and of the order of Var(p^) is its bias.

Without the shift or the division, an error e of a probability near 1 is one of e g in gradients that are near 0: of a
router or an attention at a low temperature, errors were as large as the gradient (0.9 to 1.1; 0.15 to 0.3 with them).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.deriving.derived import function_of
from brevact.autograd.ops.base import Formula, can_pack, run_inside, save, with_bits, with_settings
from brevact.autograd.ops.op import UNBIASED, Op, Saves, Stored, everywhere
from brevact.autograd.region.settings import BackwardSettings
from brevact.autograd.saving.saved import Region, Saved
from brevact.autograd.saving.stand_ins import Logs, find_logs, like_of, note_logs, source_of
from brevact.autograd.saving.storages import record_of
from brevact.autograd.saving.store import keep_exact, keep_places
from brevact.private_names.of_torch import softmax_backward
from brevact.quantizers import Rounding, UniformQuantizer
from brevact.quantizers.traits import traits_of


class _Rule(NamedTuple):
    """An op's saved values, from region, output and dimension; its gradient, from the output's, dimension and them."""

    saves: Callable[[Region, Tensor, int], tuple[Saved, ...]]
    gradient: Callable[..., Tensor]


def _of_whole(grad: Tensor, dim: int, kept: Any) -> Tensor:
    p = kept.decode()
    if not kept.decoder.quality.is_exact:
        total = p.sum(dim, keepdim=True, dtype=torch.promote_types(p.dtype, torch.float32))
        is_one = (total - 1).abs() <= 64 * torch.finfo(p.dtype).eps  # but for the rounding of sums
        p = p / total.clamp(0.5, 2.0).masked_fill_(is_one, 1.0).to(p.dtype)
    return softmax_backward(grad, p, dim, grad.dtype)


def _saves_whole(region: Region, out: Tensor, dim: int) -> tuple[Saved, ...]:
    settings = region.settings
    kept = with_bits(region, settings.derive_min_bits).keep(out)
    if settings.derives and not settings.derives_curved:  # the product that reads it next has fewer bits
        region.register(out, kept)
    return (kept,)


_WHOLE = _Rule(_saves_whole, _of_whole)

#: Most distributions of a mixture, whose probabilities are small differences near a target.
_MOST_MIXED = 3
#: Attention, along the last of three or more dimensions, has more keys than this.
_MOST_CLASSES_OF_SCORES = 32


def _saves_errors(region: Region, out: Tensor, dim: int) -> tuple[Saved, ...]:
    """Save the most probable classes, the others' probabilities and squares of their errors, for this op alone."""
    places = out.detach().max(dim, keepdim=True).indices
    p = out.detach().scatter(dim, places, 0)
    of_p, of_squares = _settings_of(region.settings)
    kept = with_settings(region, of_p).keep(p, share=False)
    errors = kept[1].decode(kept[0]).float() - p
    most_probable = keep_places(places, region.settings, (p.shape[dim],), 0)
    return kept, with_settings(region, of_squares).keep(errors.square(), share=False), most_probable


def _of_classes(grad: Tensor, dim: int, kept: Any, squares: Any, most_probable: Any) -> Tensor:
    places = most_probable.decode()
    grad = grad - grad.gather(dim, places)
    found = softmax_backward(grad, kept.decode(), dim, grad.dtype)
    found.addcmul_(squares.decode().to(grad.dtype), grad)
    return found.scatter_(dim, places, -found.sum(dim, keepdim=True))


_OF_CLASSES = _Rule(_saves_errors, _of_classes)


def _keep_probabilities(region: Region, p: Tensor, dim: int) -> tuple[Saved, Saved]:
    """Save probabilities, which are overwritten: one above 1/2 by what is left to 1; and its class, or their number."""
    places = _sure_classes(p, dim)
    _turn_sure(p, dim, places)
    places_kept = keep_places(places, region.settings, (p.shape[dim] + 1,), 0)
    return region.keep(p, share=False), places_kept


def _sure_classes(p: Tensor, dim: int) -> Tensor:
    """Return the class of each row's probability above 1/2, or the number of classes."""
    classes = p.shape[dim]
    if dim in (-1, p.dim() - 1) or classes > 255:
        of_most, most_probable = p.max(dim, keepdim=True)
        return most_probable.masked_fill_(~(of_most > 0.5), classes)
    sizes = [1] * p.dim()
    sizes[dim] = classes
    before_last = torch.arange(classes, 0, -1, dtype=torch.uint8, device=p.device).view(sizes)
    found = (p > 0.5).view(torch.uint8).mul_(before_last)  # torch's max across rows takes eight times as long on a CPU
    return classes - found.amax(dim, keepdim=True).long()


def _turn_sure(p: Tensor, dim: int, places: Tensor) -> Tensor:
    """Subtract from 1 the probabilities in these places, in place."""
    sure = places < p.shape[dim]
    places = places.where(sure, 0)
    of_sure = p.gather(dim, places)
    return p.scatter_(dim, places, torch.where(sure, 1 - of_sure, of_sure))


def _probabilities(dim: int, kept: Any, places: Any = None) -> Tensor:
    p = kept.decode()
    if places is None:
        return p
    return _turn_sure(p.clone(), dim, places.decode())  # in the strides of p


def _of_logarithms(grad: Tensor, dim: int, kept: Any, places: Any, *readers: bool) -> Tensor:
    grad, p = grad.contiguous(), _probabilities(dim, kept, places)  # as torch's own gradient is
    p = _summing_to_1(p, dim) if readers else p
    return torch.addcmul(grad, p, grad.sum(dim, keepdim=True), value=-1).contiguous()


def _summing_to_1(p: Tensor, dim: int) -> Tensor:
    return p.div_(p.sum(dim, keepdim=True).clamp_(0.5, 2.0))


class _Whole(NamedTuple):
    dim: int

    def __call__(self, p: Tensor, places: Tensor) -> Tensor:
        return _summing_to_1(_turn_sure(p.clone(), self.dim, places), self.dim)


def _with_multiple(rest: Tensor, total: Tensor, p: Tensor) -> Tensor:
    return (p.to(torch.promote_types(p.dtype, total.dtype)) * total).add_(rest).to(rest.dtype)


def keep_factor_of_logs(region: Region, t: Tensor, x: Tensor, *, is_even: bool = False) -> Saved | None:
    """Save a factor t of log-probabilities by these, of another logarithm exactly; None if ``x`` is no sum of one.

    ``is_even``: the product's gradient is the same for all elements, so that it is unbiased at any number of bits.
    """
    found, settings = find_logs(x), region.settings
    if found is None or region.is_weight(t) or (t.is_leaf and t.requires_grad):
        return None
    if found.kept is None:
        return keep_exact(t)  # its errors would be divided by the logarithm's argument
    if t.shape != x.shape or not (settings.derives_curved or (is_even and settings.derives)):
        return None
    t, p = t.detach(), (x if found.logs is None else found.logs).detach().exp()  # float16 may not hold p s
    total, p = t.sum(found.dim, keepdim=True).nan_to_num(0, 0, 0), p.to(torch.promote_types(p.dtype, t.dtype))
    rest = t - p * total
    if not is_even:
        of_rest, of_t = (torch.linalg.vector_norm(each, 2, found.dim, keepdim=True) for each in (rest, t))
        is_near = 2 * of_rest < of_t
        total, rest = total.where(is_near, 0), rest.where(is_near, t)
    finer = with_bits(region, 5) if settings.derives_curved else region  # where t is 1 at one place: 0.19, not 0.3
    kept = finer.keep(rest.to(t.dtype), share=False), keep_exact(total), found.kept
    found.readers.append(True)
    return function_of(_with_multiple, kept, t, is_pointwise=False)


_LOGARITHMS = _Rule(lambda region, out, dim: _keep_probabilities(region, out.exp(), dim), _of_logarithms)


@functools.lru_cache(maxsize=64)
def _settings_of(settings: BackwardSettings) -> tuple[BackwardSettings, BackwardSettings]:
    quantizer = settings.quantizer
    if traits_of(quantizer).rounding is Rounding.DITHERED:  # it rounds a bucket's elements by one shift
        quantizer = replace(quantizer, rounding=Rounding.STOCHASTIC)
    of_squares = UniformQuantizer(bit_width=1, rounding=Rounding.STOCHASTIC)
    return replace(settings, quantizer=quantizer), replace(settings, quantizer=of_squares)


def _softmax_for(settings: BackwardSettings, shape: torch.Size, dim: int) -> _Rule:
    if not -len(shape) <= dim < len(shape):
        return _WHOLE
    classes, is_last = shape[dim], dim in (-1, len(shape) - 1)
    attends = is_last and len(shape) > 2 and classes > _MOST_CLASSES_OF_SCORES
    packs_at_random = settings.quantizer.is_stochastic and not settings.is_lossless
    return _WHOLE if classes < 2 or attends or not packs_at_random else _OF_CLASSES


def _handler(given: _Rule | None = None) -> Callable:
    def handle(region: Region, func: Callable, input: Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not (can_pack(region, input) and input.dim() and type(dim) is int):
            return NotImplemented  # torch chooses the dimension, or raises the error
        rule, dtype = given or _softmax_for(region.settings, input.shape, dim), input.dtype
        readers: list[bool] = []

        def run(ctx: Any, x: Tensor) -> Tensor:
            out: Tensor = func(x, dim, *args, **kwargs)
            kept = rule.saves(region, out, dim)
            save(ctx, *kept)
            if rule is _LOGARITHMS:
                whole = function_of(_Whole(dim), kept, out, is_pointwise=False)
                note_logs(out, Logs(like_of(out), dim % out.dim(), whole, readers))
            return out

        def gradients(needs: tuple[bool, ...], grad: Tensor, *kept: Any) -> tuple[Any, ...]:
            return (rule.gradient(grad, dim, *kept, *readers).to(dtype),)

        return region.apply(Formula, run, gradients, input)

    return handle


def _logsumexp(region: Region, func: Callable, input: Tensor, dim: Any, keepdim: Any = False) -> Any:
    """Save the probabilities p = exp(x - out) for this op alone: the gradient is p g."""
    if not (can_pack(region, input) and input.dim()):
        return NotImplemented
    dims, dtype = dim if isinstance(dim, Sequence) else (dim,), input.dtype
    places, readers = sorted(place % input.dim() for place in dims), list[bool]()
    is_of_few = math.prod(input.shape[place] for place in places) <= _MOST_MIXED
    finer = with_bits(region, 8) if is_of_few else region

    def run(ctx: Any, x: Tensor) -> Tensor:
        out: Tensor = func(x, dim, keepdim)
        of_rows = out if keepdim else functools.reduce(Tensor.unsqueeze, places, out)
        p = (x - of_rows).exp_()
        kept = _keep_probabilities(finer, p, *places) if len(places) == 1 else (finer.keep(p, share=False),)
        save(ctx, *kept)
        is_of_classes = keepdim and len(places) == 1
        source, record = source_of(x), record_of(x)
        if is_of_classes and record is not None:
            record.of_sum = {source: function_of(_Whole(places[0]), kept, x, is_pointwise=False)}
        note_logs(out, Logs(like_of(out), places[0], readers=readers, source=source))
        return out

    def gradients(needs: tuple[bool, ...], grad: Tensor, *kept: Any) -> tuple[Any, ...]:
        grad = grad if keepdim else functools.reduce(Tensor.unsqueeze, places, grad)
        p = _probabilities(places[0], *kept)
        return ((_summing_to_1(p, *places) if readers else p).mul_(grad).to(dtype),)

    return region.apply(Formula, run, gradients, input)


_STORED = Stored(
    "softmax",
    "the most probable class and the others' probabilities, packed, and squares of their errors at 1 bit; in attention "
    "over more than 32 keys the output, packed at 4 bits or more, shared with its readers",
    "of classes unbiased; of attention bias of the order of Var of one packed copy",
)
_OF_LOGARITHMS = Stored(
    "log-softmax, log-sum-exp",
    "the probabilities, packed, one above 1/2 by what is left to 1, and its class; of a sum of up to 3 at 8 bits",
    UNBIASED,
)
OPS = (
    Op((torch.softmax, F.softmax, torch.special.softmax, Tensor.softmax), _handler(), _STORED, is_bit_exact=False),
    Op(
        (torch.log_softmax, F.log_softmax, torch.special.log_softmax, Tensor.log_softmax),
        _handler(_LOGARITHMS),
        _OF_LOGARITHMS,
        is_bit_exact=False,
    ),
    Op((torch.logsumexp, torch.special.logsumexp, Tensor.logsumexp), _logsumexp, _OF_LOGARITHMS, is_bit_exact=False),
    *(Op((func,), run_inside(func), _STORED, twice=True) for func in (F.softmin, F.gumbel_softmax)),
    Op(everywhere("softmax", "softmin"), saves=Saves.BOUNDED),
)
