"""Ops whose gradient reads a stored mask, of one bit per element: piecewise linear functions and dropout, all exact.

Piecewise linear functions: the gradient is g where the mask is set and slope * g elsewhere. NaN inputs pass the
gradient on, as in PyTorch's own backward kernels. Source: DIVISION, arXiv:2208.04187, section 3.4; ActNN,
arXiv:2104.14129, section 4.

Rectifiers that need more than one mask and one number: PReLU, the absolute value.

PReLU, with the mask m = (x > 0): dL/dx = g where m, else w g, exact; dL/dw = -sum(g r^) with r = max(-x, 0) saved
packed if the weight trains, unbiased since it is linear in r. The absolute value saves the sign in two bits: exact;
for complex numbers their directions, packed.

Dropout of elements and of channels, a bit per random number: the gradient is g times the factor of kept elements, and
0 elsewhere. Random numbers are those that torch draws. Alpha dropout is torch's own, which saves its noise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.call_arguments import is_complex
from brevact.autograd.deriving.derived import derive, function_of
from brevact.autograd.deriving.expressions import ByMask, TensorFunction
from brevact.autograd.ops.base import (
    Formula,
    Needs,
    as_number,
    clamp_passes_bounds,
    expanded_one,
    is_inplace,
    save,
    times_mask,
)
from brevact.autograd.ops.convolution import to_autocast
from brevact.autograd.ops.op import EXACT, MASKS, UNBIASED, Op, Saves, Stored, everywhere
from brevact.autograd.saving.saved import Region, Saved, lay_out
from brevact.autograd.saving.stand_ins import stand_in
from brevact.autograd.saving.store import keep_mask, reported
from brevact.private_names.of_torch import has_kernel_for_key, no_dispatch_modes

aten = torch.ops.aten
_SIXTH = float(torch.tensor(1 / 6))  #: of float32, which torch's kernels have for float64, too


class _Pieces(NamedTuple):
    """Where the gradient passes, and its factors inside and outside the mask."""

    mask: Callable[[Tensor], Tensor]
    inplace: bool = False
    inside: float = 1.0
    outside: float = 0.0
    #: Recomputes the function from its input, which if derived may be beyond a corner, and the mask; None: of no use.
    value: TensorFunction | ByMask | None = ByMask()
    #: Whether torch's own backward reads only where the tensor that it saves is positive.
    reads_signs: bool = False
    #: The operand of torch's backward kernel besides the gradient, and whether it is the first one.
    reads: Literal["input", "output", "mask"] = "input"
    saved_first: bool = True


def _apply(region: Region, call: Callable[[Tensor], Tensor], pieces: _Pieces, input: Tensor) -> Tensor:
    def run(ctx: Any, x: Tensor) -> Tensor:
        mask = pieces.mask(x)
        kept = keep_mask(mask, pieces.outside / pieces.inside)
        save(ctx, kept)
        source = region.find_known(x)
        operands = [(x, source), (x, kept)]
        bounds = pieces.value
        if source is not None and isinstance(bounds, _Bounded) and None not in bounds[:2]:
            at_middle = ((bounds.low + bounds.high) / 2 - bounds.shift) / bounds.slope  # type: ignore[operator]
            operands.append((x, keep_mask(x > (at_middle if bounds.low <= bounds.high else -torch.inf))))  # type: ignore[operator]
        out = call(x)
        if source is not None and pieces.value is not None:
            derive(region, out, pieces.value, operands, is_dirty=pieces.inplace)
        read = {"input": x, "output": out, "mask": mask}[pieces.reads]
        ctx.gradients = times_mask(pieces.inside, read.stride(), saved_first=pieces.saved_first)
        if pieces.inplace:
            ctx.mark_dirty(x)
        return out

    return region.apply(Formula, run, None, input)


def _by_torch(region: Region, call: Callable[[Tensor], Tensor], pieces: _Pieces, input: Tensor) -> Any:
    """Run torch's own function; a mask replaces the tensor that it saves.

    In place, torch saves the overwritten tensor, or the output, except for functions that read the output.
    """
    runner = region.torch_runner(input) if pieces.reads_signs else None
    if runner is None or input.numel() < region.settings.min_numel or (pieces.inplace and pieces.reads != "output"):
        return NotImplemented
    mask, source = keep_mask(pieces.mask(input.detach()), pieces.outside / pieces.inside), region.find_known(input)
    out = runner.run_torch_function(call, input, kept=stand_in(mask, input.dtype))
    if source is not None and pieces.value is not None:
        derive(region, out, pieces.value, ((input, source), (input, mask)))
    return out


class _Bounded(NamedTuple):
    """A linear function where the mask is set, else a bound: the upper one if a second mask is set. NaN stays NaN."""

    low: float | None
    high: float | None
    slope: float = 1.0
    shift: float = 0.0

    def __call__(self, x: Tensor, mask: Tensor, is_high: Tensor | None = None) -> Tensor:
        x = x if self.slope == 1.0 and self.shift == 0.0 else x * self.slope + self.shift
        bound = x.new_tensor(self.high if self.low is None else self.low)
        if is_high is not None:
            bound = _where(is_high, x.new_tensor(self.high), bound)
        return _where(mask | x.isnan(), x, bound)


#: Integers of as many bits.
_INTEGERS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def _where(mask: Tensor, x: Tensor, other: Tensor) -> Tensor:
    """`torch.where`; on a CPU by bits, since it takes 3 ns per element for an irregular mask, and this 0.8."""
    is_differentiated = torch.is_grad_enabled() and (x.requires_grad or other.requires_grad)
    integers = _INTEGERS.get(x.dtype) if x.is_cpu and not is_differentiated else None
    if integers is None or x.dtype is not other.dtype:
        return torch.where(mask, x, other)
    low = other.view(integers)
    return (x.view(integers) ^ low).bitwise_and(mask.to(integers).neg_()).bitwise_xor_(low).view(x.dtype)


def _hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> _Pieces:
    bounds = as_number(min_val), as_number(max_val)

    def mask(x: Tensor) -> Tensor:
        return aten.hardtanh_backward(expanded_one(x), x, *bounds).bool()

    return _Pieces(mask, inplace, value=_Bounded(*bounds), saved_first=False)


def _hardsigmoid(input: Tensor, inplace: bool = False) -> _Pieces:
    value = _Bounded(0.0, 1.0, slope=_SIXTH, shift=0.5)
    return _Pieces(lambda x: (x > -3) & (x < 3), inplace, inside=_SIXTH, value=value, saved_first=False)


def _leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> _Pieces:
    return _Pieces(lambda x: x > 0, inplace, outside=float(negative_slope), reads_signs=True)


def _clamp(input: Tensor, min: Any = None, max: Any = None) -> _Pieces:
    if any(isinstance(bound, Tensor) for bound in (min, max)) or (min is None and max is None):
        raise TypeError("bounds that are tensors have gradients of their own")

    def mask(x: Tensor) -> Tensor:
        above, below = (torch.ge, torch.le) if clamp_passes_bounds() else (torch.gt, torch.lt)
        if min is None or max is None:
            return below(x, max) if min is None else above(x, min)
        return above(x, min) & below(x, max)

    return _Pieces(mask, value=_Bounded(min, max), reads="mask")


def _handler(rule: Callable[..., _Pieces]) -> Callable:
    def handle(region: Region, func: Callable, *args: Any, **kwargs: Any) -> Any:
        try:
            pieces = rule(*args, **kwargs)
        except TypeError:
            return NotImplemented  # torch raises the error
        input, rest = (args[0], args[1:]) if args else (kwargs.pop("input"), ())
        if not region.can_pack_input(input) or not input.requires_grad:
            return NotImplemented
        if func.__name__.endswith("_"):
            pieces = pieces._replace(inplace=True)
        call: Callable[[Tensor], Tensor] = lambda x: func(x, *rest, **kwargs)  # noqa: E731
        if region.settings.double_backward:
            return _by_torch(region, call, pieces, input)
        if region.settings.is_exact and (pieces.reads == "output" or (pieces.inplace and pieces.outside)):
            runner = region.torch_runner(input)
            if runner is not None and runner.may_give_up_masks() and region.find_known(input) is None:
                return runner.run_torch_function(call, input, mask_of=pieces.mask)
        return _apply(region, call, pieces, input)

    return handle


#: Pieces of functions, from their parameters.
_RULES: dict[Callable[..., _Pieces], tuple[Callable[..., Any], ...]] = {
    # pack_mask reads a floating-point tensor as ~(x <= 0)
    lambda input, inplace=False: _Pieces(lambda x: x, inplace, reads="output", reads_signs=True): everywhere("relu"),
    _hardtanh: (F.hardtanh, F.hardtanh_),
    lambda input, inplace=False: _hardtanh(input, 0.0, 6.0, inplace): (F.relu6,),
    _hardsigmoid: (F.hardsigmoid,),
    _leaky_relu: (F.leaky_relu, F.leaky_relu_),
    _clamp: everywhere("clamp", "clip"),
    lambda input, nan=0.0, posinf=None, neginf=None: _Pieces(
        torch.isfinite, value=None, reads="mask", saved_first=False
    ): everywhere("nan_to_num"),
    lambda input, min: _clamp(input, min=min): everywhere("clamp_min"),
    lambda input, max: _clamp(input, max=max): everywhere("clamp_max"),
}
_STORED = Stored("ReLU, ReLU6, LeakyReLU, Hardtanh, clamp", MASKS, EXACT)


def _along_channels(weight: Tensor, x: Tensor) -> Tensor:
    sizes = [-1 if dim == min(1, x.dim() - 1) else 1 for dim in range(x.dim())]
    return weight.view(sizes if weight.numel() > 1 else [1] * x.dim())


def _below(x: Tensor, mask: Tensor) -> Tensor:
    return (-x).masked_fill_(mask, 0.0)


def _leaky(x: Tensor, mask: Tensor, slope: Tensor) -> Tensor:
    return _where(mask, x, slope * x)


def _signed(x: Tensor, above: Tensor, below: Tensor) -> Tensor:
    return x * (above.to(x.dtype) - below.to(x.dtype))


def _prelu(region: Region, func: Callable, input: Tensor, weight: Tensor) -> Any:
    if not region.can_pack_layer(input, weight):
        return NotImplemented
    if weight.requires_grad and region.settings.is_exact:
        return NotImplemented  # torch saves the input alone: a mask would come on top
    if weight.numel() > 1 and (input.dim() < 2 or input.shape[1] != weight.numel()):
        return NotImplemented  # torch raises the error
    if weight.dim() > 1:
        return NotImplemented
    x, w, device = input, weight, input.device.type
    if torch.amp.is_autocast_available(device) and has_kernel_for_key("aten::prelu", f"Autocast{device.upper()}"):
        x, w = to_autocast(input.detach(), weight.detach())
    dtype, stride = x.dtype, x.stride()

    def run(ctx: Any, input: Tensor, weight: Tensor) -> Tensor:
        needs_input, needs_weight = ctx.needs_input_grad[3:]
        mask, source, out = keep_mask(x > 0), region.find_known(input), func(x, w)
        below = None
        if needs_weight:
            derived = None if source is None else function_of(_below, (source, mask), x)
            below = region.keep((-x).relu_(), share=False) if derived is None else reported(derived)
        if source is not None:
            derive(region, out, _leaky, ((input, source), (input, mask), (_along_channels(w, x), None)))
        save(ctx, mask if needs_input else None, below, exact=(weight,))
        return out

    def gradients(needs: Needs, grad: Tensor, mask: Any, below: Any, weight: Tensor) -> tuple[Any, ...]:
        w = _along_channels(weight.to(dtype), grad)
        grad_input = grad_weight = None
        if mask is not None:
            scaled = torch.where(mask.decode(), grad, w * grad)
            grad_input = lay_out(scaled, grad, stride, saved_first=True)
        if below is not None:
            terms = lay_out(below.multiply(grad).neg_(), grad, stride, saved_first=True)
            grad_weight = terms.sum_to_size(w.shape).view(weight.shape).to(weight.dtype)
        return grad_input, grad_weight

    return region.apply(Formula, run, gradients, input, weight)


def _times(needs: Needs, grad: Tensor, kept: Any) -> tuple[Any, ...]:
    return (kept.multiply(grad),)


def _times_sign(needs: Needs, grad: Tensor, above: Any, below: Any) -> tuple[Any, ...]:
    sign = above.decode().to(grad.dtype).sub_(below.decode().to(grad.dtype))
    return (lay_out(sign.mul_(grad), grad, sign.stride()),)


def _absolute(region: Region, func: Callable, input: Tensor) -> Any:
    """For complex numbers dL/dx = g x / |x|, and 0 where x is 0; linear in the saved x / |x|."""
    inplace = is_inplace(func, (input,), {})

    def magnitude(ctx: Any, x: Tensor) -> Tensor:
        save(ctx, region.keep(torch.sgn(x), share=False))
        return func(x)

    def run(ctx: Any, x: Tensor) -> Tensor:
        above, below = keep_mask(x > 0), keep_mask(x < 0)
        save(ctx, above, below)
        source, out = region.find_known(x), func(x)
        if source is not None:
            derive(region, out, _signed, ((x, source), (x, above), (x, below)), is_dirty=inplace)
        if inplace:
            ctx.mark_dirty(x)
        return out

    if is_complex(input) and input.requires_grad and not inplace:
        small = input.numel() < region.settings.min_numel
        return NotImplemented if small or region.is_weight(input) else region.apply(Formula, magnitude, _times, input)
    if not region.can_pack_input(input) or not input.requires_grad:
        return NotImplemented
    return region.apply(Formula, run, _times_sign, input)


OPS = (
    *(Op(funcs, _handler(rule), _STORED, twice=True) for rule, funcs in _RULES.items()),
    Op(
        (torch.prelu, Tensor.prelu),
        _prelu,
        Stored("PReLU", "a mask; the negative elements, packed, where the weight trains", UNBIASED),
    ),
    Op(everywhere("abs", "absolute"), _absolute, Stored("abs", MASKS, EXACT)),
    Op(everywhere("abs", "absolute"), stored=Stored("abs of complex numbers", "their directions, packed", UNBIASED)),
)


@functools.lru_cache(maxsize=256)
def _noise_of_kept(p: float, dtype: torch.dtype) -> float:
    with no_dispatch_modes():  # a selective checkpoint counts ops
        return float(torch.ones((), dtype=dtype).div_(1 - p))


def _drop(region: Region, input: Tensor, p: float, inplace: bool, of_channels: bool = False) -> Tensor:
    def run(ctx: Any, input: Tensor) -> Tensor:
        source = region.find_kept(input)
        if input.device.type != "cpu" and not of_channels:
            out, mask = torch.native_dropout(input, p, True)
            out, factor = input.copy_(out) if inplace else out, 1.0 / (1.0 - p)
        else:
            sizes = (*input.shape[:2], *(1 for _ in input.shape[2:]))
            noise = input.new_empty(sizes) if of_channels else torch.empty_like(input)
            factor = _noise_of_kept(p, input.dtype)
            mask = noise.bernoulli_(1 - p).bool()  # a comparison takes nine times as long
            noise.div_(1 - p)
            out = input.mul_(noise) if inplace else input * noise
        kept = keep_mask(mask)
        save(ctx, kept)
        stride = None if of_channels else mask.stride()
        ctx.gradients = times_mask(factor, stride, is_exact=region.settings.is_exact)
        derive(region, out, ByMask(factor), ((input, source), (mask, kept)), is_dirty=inplace)
        if inplace:
            ctx.mark_dirty(input)
        return out

    return region.apply(Formula, run, None, input)


def _drop_by_torch(region: Region, func: Callable, input: Tensor, p: float, inplace: bool) -> Any:
    """Run torch's own dropout; a mask replaces the noise that it saves."""
    runner = region.torch_runner(input)
    if runner is None or input.numel() < region.settings.min_numel:
        return NotImplemented
    source, masks = region.find_kept(input), []

    def keep(noise: Tensor) -> Saved:
        masks.append(keep_mask(noise.bool()))
        factor = 1.0 if noise.dtype is torch.bool else _noise_of_kept(p, noise.dtype)
        return stand_in(masks[0], noise.dtype, factor)

    out = runner.run_torch_function(lambda x: func(x, p, True, inplace), input, keep=keep)
    if len(masks) == 1:
        factor = _noise_of_kept(p, input.dtype) if input.device.type == "cpu" else 1.0 / (1.0 - p)
        derive(region, out, ByMask(factor), ((input, source), (input, masks[0])))
    return out


def _drops(region: Region, input: Tensor, p: float, training: Any) -> bool:
    """Whether some elements are dropped and others kept, of an input whose gradient is needed."""
    return bool(region.can_pack_input(input) and input.requires_grad and training and 0.0 < p < 1.0 and input.numel())


def _dropout(
    region: Region,
    func: Callable,
    input: Tensor,
    p: float = 0.5,
    training: Any = True,
    inplace: bool = False,
    *,
    train: Any = ...,
) -> Any:
    training = training if train is ... else train
    inplace = inplace or func.__name__.endswith("_")
    if not _drops(region, input, p, training):
        return NotImplemented
    if region.settings.double_backward:
        return _drop_by_torch(region, func, input, p, inplace)
    return _drop(region, input, p, inplace)


def _channel_dropout(
    region: Region, func: Callable, input: Tensor, p: float = 0.5, training: Any = True, inplace: bool = False
) -> Any:
    if not _drops(region, input, p, training) or region.settings.double_backward:
        return NotImplemented
    name = func.__name__
    if input.dim() < 2 or name.rstrip("_") not in ("feature_dropout", f"dropout{input.dim() - 2}d"):
        return NotImplemented  # of one sample, or torch warns
    return _drop(region, input, p, inplace or name.endswith("_"), of_channels=True)


_DROPPED = Stored("dropout of elements and of channels", MASKS, EXACT)
DROPOUTS = (
    Op((F.dropout,), _dropout, _DROPPED, twice=True),
    Op((F.dropout1d, F.dropout2d, F.dropout3d), _channel_dropout, _DROPPED),
    Op((torch.feature_dropout, torch.feature_dropout_), _channel_dropout, _DROPPED),
    Op((torch.dropout, torch.dropout_), _dropout, _DROPPED),
    Op(everywhere("dropout", "native_dropout"), saves=Saves.FACTORS),
)
