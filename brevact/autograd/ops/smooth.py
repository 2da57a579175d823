"""Smooth activation functions: the quantized derivative is saved, so that the gradient stays unbiased.

dL/dx = g * f'(x): with E[q] = f'(x) for the saved q, E[g q] is the exact gradient. Applying f' to a quantized x would
be biased, since f' is not linear. Functions whose derivative is linear in the tensor that torch saves anyway (exp,
square) need no counterpart. Source: fewbit, arXiv:2202.00441 (which fits the levels).

If the input is packed in enough bits, derivative and output derive from it (``derived``): the bias, f''' Var / 2, is
then small, and one tensor is saved in place of two or three. If no saved form of the input is known, tanh packs the
output: in saturation a step of the input may be wider than the slope. Its derivative, 1 - y^2, has a bias of the
variance of one copy. Sigmoid packs its derivative, but for gates of maps, and GLU its value and its gate.
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

from brevact.autograd.deriving.cache import MOST_HELD
from brevact.autograd.deriving.derived import derive, function_of, keep_smooth, keep_source
from brevact.autograd.deriving.expressions import Derived
from brevact.autograd.ops.base import (
    Formula,
    Needs,
    as_number,
    can_pack,
    expanded_one,
    is_inplace,
    save,
    value_of,
    with_bits,
)
from brevact.autograd.ops.norm_formulas import are_rows, keep_by_rows
from brevact.autograd.ops.op import UNBIASED, Op, Saves, Stored, everywhere
from brevact.autograd.ops.vector_norms import EMBEDDING_BITS
from brevact.autograd.saving.saved import Region, Saved
from brevact.autograd.saving.stand_ins import saturates
from brevact.autograd.saving.storages import find_record, is_offered, record_of
from brevact.autograd.saving.store import keep_mask, keep_small, reported
from brevact.quantizers import PointFunction

#: (ones, x) -> f'(x): ATen's fused backward kernel applied to a gradient of ones.
Derivative = Callable[[Tensor, Tensor], Tensor]

aten = torch.ops.aten
_LEAST_IMAGE = 16
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


class Slope(NamedTuple):
    derivative: Derivative

    def __call__(self, x: Tensor) -> Tensor:
        return self.derivative(expanded_one(x), x)


def _hardswish_slope(x: Tensor, inside: Tensor) -> Tensor:
    """Derivative of Hardswish at a rounded input; ``inside``: the unrounded input was between its jumps at -3 and 3."""
    return torch.where(inside, x / 3 + 0.5, x.clamp(0, 1))


class _Curve(NamedTuple):
    """A smooth function.

    ``slopes``: derivatives by the input, or by each of its halves along ``dim`` (None: one derivative). ``value``:
    recomputes the function from its input; None: it may turn a small error into a large one.
    """

    slopes: tuple[Any, ...]
    value: PointFunction | None = None
    dim: int | None = None


def _apply(region: Region, call: Callable, curve: _Curve, input: Tensor, inplace: bool = False) -> Tensor:
    def run(ctx: Any, input: Tensor) -> Tensor:
        source = None if curve.value is None else keep_source(region, input)
        save(ctx, *(_keep_slope(region, slope, source, input, curve.dim) for slope in curve.slopes))
        out = call(input)
        if source is not None and curve.value is not None:
            operands = ((input, source),)
            is_pointwise = curve.dim is None
            derive(region, out, curve.value, operands, is_curved=True, is_pointwise=is_pointwise, is_dirty=inplace)
        if inplace:
            ctx.mark_dirty(input)
        return out

    return region.apply(Formula, run, functools.partial(_times, curve.dim), input)


def _times(dim: int | None, needs: Needs, grad: Tensor, *kept: Any) -> tuple[Tensor]:
    products = [each.multiply(grad) for each in kept]
    return (products[0] if dim is None else torch.cat(products, dim),)


def _keep_slope(region: Region, slope: Callable, source: Saved | None, input: Tensor, dim: int | None) -> Saved:
    kept = None
    if source is not None and isinstance(slope, Slope) and slope.derivative is aten.hardswish_backward.default:
        inside = keep_mask((input > -3) & (input < 3))
        kept = keep_smooth(_hardswish_slope, (source, inside), input)
    elif source is not None:
        like = input if dim is None else input.narrow(dim, 0, input.shape[dim] // 2)
        kept = keep_smooth(slope, (source,), like, is_pointwise=dim is None)
    return region.keep(slope(input), share=False) if kept is None else kept


@functools.lru_cache  # one object per setting, so that derivations are found again
def _gelu_slope(approximate: str) -> Derivative:
    return lambda one, x: aten.gelu_backward(one, x, approximate=approximate)


@dataclass(frozen=True)
class _SoftplusSlope:
    beta: float
    threshold: float

    def __call__(self, one: Tensor, x: Tensor) -> Tensor:
        return aten.softplus_backward(one, x, self.beta, self.threshold)


@functools.lru_cache
def _elu_slope(alpha: float, scale: float, input_scale: float) -> Derivative:
    return lambda one, x: aten.elu_backward(one, alpha, scale, input_scale, False, x)


class _GLUSlope(NamedTuple):
    """Derivative of a sigmoid(b) by one of the halves (a, b): sigmoid(b), and a sigmoid'(b)."""

    dim: int
    half: int

    def __call__(self, x: Tensor) -> Tensor:
        one = expanded_one(x.narrow(self.dim, 0, x.shape[self.dim] // 2))
        return aten.glu_backward(one, x, self.dim).chunk(2, self.dim)[self.half].contiguous()


def _glu(region: Region, func: Callable, input: Tensor, dim: int = -1) -> Any:
    if not region.can_pack_input(input) or not input.requires_grad or dim not in range(-input.dim(), input.dim()):
        return NotImplemented
    value = value_of(func, (dim,), {})
    if input.numel() >= 2 * region.settings.min_numel and _packs_output(region, input):
        return _gate(region, value, input, dim)
    return _apply(region, value, _Curve((_GLUSlope(dim, 0), _GLUSlope(dim, 1)), value, dim=dim), input)


def _gate(region: Region, function: PointFunction, input: Tensor, dim: int) -> Tensor:
    """Save both factors, a and sigmoid(b): in saturation a step of b may be wider than the slope."""

    def run(ctx: Any, input: Tensor) -> Tensor:
        out = function(input)
        a, b = input.chunk(2, dim)
        gate = b.sigmoid()
        factors = ((a, region.keep(a)), (gate, region.keep(gate)))
        (_, kept), (_, own) = factors
        save(ctx, kept, own, keep_smooth(Slope(aten.sigmoid_backward.default), (own,), gate) or own)
        derive(region, out, torch.mul, factors)
        return out

    def gradients(needs: Needs, grad: Tensor, kept: Any, own: Any, slope: Any) -> tuple[Tensor]:
        return (torch.cat((own.multiply(grad), slope.multiply(kept.multiply(grad))), dim),)

    return region.apply(Formula, run, gradients, input)


def smooth_handler(rule: Callable[..., Any], *, is_gentle: bool = True) -> Callable:
    """Make a function's handler from ``rule``, which takes the function's parameters and returns the derivative.

    ``is_gentle``: a rounding error of the input is a small one of the function, by a bounded slope and few turns.
    """

    def handle(region: Region, func: Callable, *args: Any, **kwargs: Any) -> Any:
        try:
            derivative = rule(*args, **kwargs)
        except TypeError:
            return NotImplemented  # torch raises the error
        inplace = is_inplace(func, args, kwargs)
        input, rest, kwargs = (args[0], args[1:], kwargs) if args else (kwargs.pop("input"), (), kwargs)
        if not region.can_pack_input(input) or not input.requires_grad:
            return NotImplemented
        if func is F.logsigmoid and input.dim() == 2:
            region = with_bits(region, EMBEDDING_BITS)
        if region.settings.double_backward:
            run = _TWICE.get(func)
            out = None
            if not inplace and run is not None and region.torch_runner(input) is not None:
                out = run(region, value_of(func, rest, kwargs), input)
            return NotImplemented if out is None else out
        jumps = isinstance(derivative, _SoftplusSlope) and derivative.threshold < 8
        value = value_of(func, rest, kwargs) if is_gentle and not jumps else None
        is_divided = derivative in _DIVIDED  # and cast by no autocast
        is_few = input.numel() <= max(MOST_HELD, region.settings.min_numel)
        if value is not None and not inplace and (is_few or is_divided):
            run = _RUNNERS.get(func)
            runs_torch = not input.is_inference() if is_divided else region.torch_runner(input) is not None
            out = run(region, value, input) if run is not None and runs_torch else None
            if out is not None:
                return out
        if inplace and is_divided and _packs_output(region, input):
            value = None  # in saturation a step of the input may be wider than the slope
        curve = _Curve((Slope(derivative),), value)
        return _apply(region, lambda x: func(x, *rest, **kwargs), curve, input, inplace)

    return handle


def _fixed(derivative: Derivative) -> Callable[..., Derivative]:
    return lambda input, inplace=False: derivative


def _packs_output(region: Region, input: Tensor) -> bool:
    """Return whether to pack the output, from which the derivative follows: no saved form of the input is known."""
    settings = region.settings
    is_large = bool(settings.derives_curved and input.numel() >= settings.min_numel)
    return is_large and region.find_kept(input) is None


def run_torch(region: Region, function: PointFunction, input: Tensor) -> Tensor | None:
    """Run torch's own function, for few elements faster than a Function, which must run if None. Autocast is off."""
    if input.numel() < region.settings.min_numel:
        return region.hooks.run_torch_function(function, input, kept=keep_small(input, region.settings))
    source = keep_source(region, input)
    if source is None:
        return None
    out = region.hooks.run_torch_function(function, input, kept=reported(source))
    derive(region, out, function, ((input, source),), is_curved=True, is_new=True)
    return out


def run_torch_by_output(region: Region, function: PointFunction, input: Tensor) -> Tensor | None:
    """Run torch's own function, which reads its output; None where a Function must run. Autocast is off."""
    if input.numel() < region.settings.min_numel and region.find_known(input) is None:
        return region.hooks.run_torch_function(function, input)  # hooks keep the small output
    if _packs_output(region, input):
        is_gate = input.dim() > 2 and input.shape[2:].numel() == 1  # of maps, whose product packs the output, too
        is_once = function in _SIGMOIDS and not (is_gate or region.settings.double_backward)
        keep = functools.partial(_keep_output_of_slope, region) if is_once else region.keep
        return region.hooks.run_torch_function(function, input, keep=keep)
    source = keep_source(region, input)
    kept = None if source is None else function_of(function, (source,), input, is_curved=True)
    if kept is None:
        return None
    out = region.hooks.run_torch_function(function, input, kept=reported(kept))
    region.register(out, kept)
    return out


def _keep_output_of_slope(region: Region, out: Tensor) -> Saved:
    """Save a sigmoid's derivative d, which torch computes from its output y: as the y to 1/2 with y (1 - y) = d.

    Near 1 the derivative of a rounded output is off by that of the scale, alike for all elements.
    """
    kept = region.keep(out * (1 - out), share=False)
    return function_of(_output_of_slope, (kept,), out, is_curved=True) or kept


_SIGMOIDS = everywhere("sigmoid", "expit")


def _is_probability(x: Tensor) -> bool:
    return x.grad_fn is not None and x.grad_fn.name() == "SigmoidBackward0"


def _output_of_slope(slope: Tensor) -> Tensor:
    return 2 * slope / (1 + (1 - 4 * slope.clamp(max=0.25)).sqrt())


def _sigmoid_slope(one: Tensor, x: Tensor) -> Tensor:
    return aten.sigmoid_backward(one, torch.sigmoid(x))


def _tanh_slope(one: Tensor, x: Tensor) -> Tensor:
    return aten.tanh_backward(one, torch.tanh(x))


#: Derivatives of functions that losses take the logarithm of.
_DIVIDED = frozenset((_sigmoid_slope, _tanh_slope))
#: Functions for which torch saves only the input or only the output.
_RUNNERS: dict[Callable[..., Any], Callable] = {
    **dict.fromkeys((F.silu, F.mish, F.gelu), run_torch),
    **dict.fromkeys(everywhere("sigmoid", "expit", "tanh"), run_torch_by_output),
}
#: The same for double backward.
_TWICE = _RUNNERS | dict.fromkeys((F.softplus, F.elu, F.celu, torch.celu, F.selu, torch.selu), run_torch)
#: Derivatives with settings, by the functions that share their parameters.
_RULES: dict[Callable[..., Derivative], tuple[Callable, ...]] = {
    lambda input, *, approximate="none": _gelu_slope(approximate): (F.gelu,),
    lambda input, beta=1, threshold=20: _SoftplusSlope(as_number(beta), as_number(threshold)): (F.softplus,),
    lambda input, alpha=1.0, inplace=False: _elu_slope(as_number(alpha), 1.0, 1.0): (F.elu, F.elu_),
    lambda input, alpha=1.0, inplace=False: _elu_slope(as_number(alpha), 1.0, 1.0 / as_number(alpha)): (
        *(F.celu, torch.celu, F.celu_),
    ),
    lambda input, inplace=False: _elu_slope(_SELU_ALPHA, _SELU_SCALE, 1.0): (F.selu, torch.selu, F.selu_),
}
#: Derivatives of functions without settings: (ones, x) -> f'(x).
DERIVATIVES: dict[Derivative, tuple[Callable, ...]] = {
    aten.silu_backward.default: (F.silu,),
    aten.hardswish_backward.default: (F.hardswish,),
    aten.mish_backward.default: (F.mish,),
    lambda one, x: (x.abs() + 1).square().reciprocal(): (F.softsign,),
    _sigmoid_slope: everywhere("sigmoid", "expit"),
    _tanh_slope: everywhere("tanh"),
    lambda one, x: torch.sigmoid(-x): (F.logsigmoid,),
    lambda one, x: x.tanh().square(): (F.tanhshrink,),
    lambda one, x: x.square().neg().exp() * (2 / math.sqrt(math.pi)): (torch.erf, torch.special.erf, Tensor.erf),
    lambda one, x: x.cos(): (torch.sin, Tensor.sin),
    lambda one, x: -x.sin(): (torch.cos, Tensor.cos),
}
#: Functions with many turns, or a derivative with a jump or a narrow peak.
_STEEP = frozenset((F.selu, torch.erf, F.softsign, F.tanhshrink, torch.sin, torch.cos))
STORED = Stored(
    "SiLU, GELU, Hardswish, Mish, ELU, Softplus, sin, erf, SELU, softsign and the like",
    "below 4 bits the derivative, packed; from 4 bits on the input, packed with levels that are dense around 0, from "
    "which derivative and output derive (Hardswish: and a mask), of logsigmoid of a matrix at 8 bits",
    "unbiased; derived ones have the bias Var f'' / 2 of one packed copy",
)
_BOUNDED = Stored(
    "Sigmoid, Tanh",
    "the derivative below 4 bits, and of Sigmoid but for (N, C, 1, 1); else the output, or what the input derives from",
    "Sigmoid's derivative unbiased; others' bias Var of one packed copy, or Var f'' / 2",
)
_GATED = Stored(
    "GLU",
    "below 4 bits both derivatives, packed; from 4 bits on both factors, packed, or what the input derives from",
    "bias Var of one packed copy, or Var f'' / 2",
)
_op = functools.partial(Op, stored=STORED, is_bit_exact=False)


@functools.lru_cache
def _power_slope(exponent: float) -> Derivative:
    return lambda one, x: torch.pow(x, exponent - 1) * exponent


def keep_square(region: Any, func: Callable, input: Any, *exponent: float) -> Any:
    """Save a square's input by rows, whose mean may be a variance. Small tensors are left to torch.

    An op that needs the square of a difference or of a part of a complex number exactly, or a sum of these, such as a
    root, saves these unpacked, too: near 0 its errors are divided by a small number. Images are saved unpacked, since
    losses subtract the square of a mean from the mean of squares.
    """
    if not can_pack(region, input) or input.grad_fn is None:
        return NotImplemented
    if is_image(input):
        return region.hooks.run_exactly(func, (input, *exponent), {})
    is_product, may_be_sure = _is_product(region, input), _is_probability(input)
    has_rows = are_rows(input.shape, (-1,))
    runner = region.hooks if input.dtype is torch.float32 else region.torch_runner(input)  # autocast copies others
    is_plain = not (may_be_sure or is_product or runner is None)
    is_difference = is_plain and _may_be_near_zero(input)
    if not (may_be_sure or is_product or is_difference or has_rows):
        return NotImplemented
    if is_difference or (is_plain and _may_be_held(region, input)):
        kept = keep_by_rows(region, input, (-1,)) if has_rows else region.keep(input)
        out = runner.run_torch_function(lambda x: func(x, *exponent), input, kept=kept, offers=True)
        if is_difference and is_offered(input) and (record := record_of(out)) is not None:
            record.carried = (input.detach(),)
        return out

    def run(ctx: Any, x: Tensor) -> Tensor:
        # Of a product, whose factors' gradients read the square's, the errors must not be those of its factors. The
        # gradient of a sure probability cancels that of linear terms, as in a Dice loss.
        own = with_bits(region, EMBEDDING_BITS) if may_be_sure else region
        save(ctx, own.keep(x, share=False) if may_be_sure or is_product else keep_by_rows(region, x, (-1,)))
        return func(x, *exponent)

    return region.apply(Formula, run, lambda needs, grad, kept: (kept.multiply(grad).mul_(2.0),), input)


def _may_be_near_zero(x: Tensor) -> bool:
    """Return whether a tensor is a scaled difference or exponential, a part of complex numbers, or a view of one."""
    whole = x._base if x._is_view() and x._base is not None else x
    node = whole.grad_fn
    while node is not None and node.name() in ("DivBackward0", "MulBackward0") and node.next_functions[1][0] is None:
        node = node.next_functions[0][0]
    return whole.is_complex() or (node is not None and node.name() in ("SubBackward0", "ExpBackward0"))


def is_image(x: Tensor) -> bool:
    """Return whether a tensor has up to three channels of maps: small beside a network's, and near a target.

    Heads of attention are views, or casts of these, and seldom square.
    """
    if x.dim() != 4 or x.shape[1] > 3 or min(x.shape[2:]) < _LEAST_IMAGE:
        return False
    is_copy = x._is_view() or (x.grad_fn is not None and x.grad_fn.name() == "ToCopyBackward0")
    return not is_copy or x.shape[2] == x.shape[3]


def _exponential(region: Region, func: Callable, input: Tensor) -> Any:
    """Pack exponentials at 8 bits, of a matrix, or of squares of differences, which take 8 bits, too.

    Contrastive losses divide by sums of them, near to which they are; Gaussians may be narrow.
    """
    if not can_pack(region, input) or region.torch_runner(input) is None:
        return NotImplemented
    record = find_record(input)
    carried = () if record is None else record.carried
    squared = [x for x in carried if not saturates(x)]
    if input.dim() != 2 and not squared:
        return NotImplemented
    keep = with_bits(region, EMBEDDING_BITS).keep
    for x in squared:
        region.hooks.refine(x, keep)
    return region.hooks.run_torch_function(func, input, keep=keep, offers=True)


def _is_product(region: Region, x: Tensor) -> bool:
    """Return whether a tensor derives from a packed factor that the gradient of another factor, or divisor, reads."""
    known = region.find_known(x)
    if known is None or not isinstance(known[1], Derived):
        return False
    node = x.grad_fn if known[1].scales else None
    return known[1].multiplies or (node is not None and sum(fn is not None for fn, _ in node.next_functions) > 1)


def _may_be_held(region: Region, x: Tensor) -> bool:
    """Return whether a tensor may later be needed exactly: an exponential or a softplus, by which programs divide."""
    known = region.find_known(x)
    return is_offered(x) or (known is not None and known[1].quality.is_curved)


def _pow(region: Region, func: Callable, input: Tensor, exponent: Any) -> Any:
    if isinstance(exponent, bool) or not isinstance(exponent, int | float):
        return NotImplemented
    if exponent == 2:
        return keep_square(region, func, input, exponent)
    return _smooth_power(region, torch.pow, input, exponent) if exponent > 2 else NotImplemented


_smooth_power = smooth_handler(lambda input, exponent: _power_slope(exponent))


def _is_steep(region: Region, args: tuple) -> bool:
    """Return whether a power is steep or singular in its saved tensor: x^2 saves a factor of its gradient, 2x."""
    return not (len(args) > 1 and isinstance(args[1], int | float) and args[1] in (0, 1, 2))


WRITTEN_OUT = Stored(
    "RMS norm written out (`x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)`, `x` over a root, a norm or a "
    "deviation)",
    "the input, packed by rows of one scale, once",
    "bias Var/N of one packed copy",
)
OPS = (
    *(_op(funcs, smooth_handler(rule, is_gentle=funcs[0] not in _STEEP)) for rule, funcs in _RULES.items()),
    *(
        _op(
            funcs,
            smooth_handler(_fixed(slope), is_gentle=funcs[0] not in _STEEP),
            stored=_BOUNDED if slope in _DIVIDED else STORED,
        )
        for slope, funcs in DERIVATIVES.items()
    ),
    _op((F.glu,), _glu, stored=_GATED),
    Op(everywhere("sigmoid", "expit", "tanh"), saves=Saves.BOUNDED),
    Op(tuple(_TWICE), twice=True),
    Op((torch.pow, Tensor.pow, Tensor.__pow__), _pow, STORED._replace(op="x^p with p > 2"), is_bit_exact=False),
    Op((torch.square, Tensor.square), keep_square, WRITTEN_OUT, is_bit_exact=False),
    Op((torch.exp, Tensor.exp), _exponential, Stored("exp of a matrix", "the result, packed at 8 bits", UNBIASED)),
    Op(everywhere("square"), saves=Saves.FACTORS),
    Op((*everywhere("pow"), Tensor.__pow__, Tensor.__ipow__, Tensor.__rpow__), must_not_round=_is_steep),
)
