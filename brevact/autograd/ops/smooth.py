"""Smooth activation functions: the quantized derivative is stored, so that the gradient stays unbiased.

dL/dx = g * f'(x): with E[q] = f'(x) for the stored q, E[g q] is the exact gradient. Storing a quantized x and applying
f' to it would not be unbiased, since f' is not linear. Functions whose derivative is linear in what torch saves anyway
(exp, square) need no counterpart. Source: fewbit, arXiv:2202.00441 (which fits the levels).

Where the input is packed in enough bits, its own derivative and the output derive from it (``derived``): that bias,
f''' Var / 2, is small then, and one tensor is stored in place of two or three.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.decoded_last import MOST_HELD
from brevact.autograd.derivations import function_of
from brevact.autograd.derived import derive, keep_smooth, keep_source
from brevact.autograd.keeper import Keeper
from brevact.autograd.ops.base import Saving, Value, as_number, expanded_one, load, save
from brevact.autograd.ops.op import Op, Saves, Stored, everywhere
from brevact.autograd.store import keep_small, reported

#: (ones, x) -> f'(x): ATen's fused backward kernel applied to a gradient of ones.
Derivative = Callable[[Tensor, Tensor], Tensor]

aten = torch.ops.aten
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946


class Slope(NamedTuple):
    """The derivative of a smooth function, as a function of one number."""

    derivative: Derivative

    def __call__(self, x: Tensor) -> Tensor:
        return self.derivative(expanded_one(x), x)


class _Smooth(Saving):
    @staticmethod
    def forward(
        ctx: Any,
        region: Keeper,
        call: Callable[[Tensor], Tensor],
        derivative: Derivative,
        value: Value | None,
        input: Tensor,
        inplace: bool,
    ) -> Tensor:
        source = None if value is None else keep_source(region, input, is_overwritten=inplace)
        kept = None if source is None else keep_smooth(Slope(derivative), source, input)
        if kept is None:
            kept = region.keep(Slope(derivative)(input), share=False)
        save(ctx, kept)
        out = call(input)
        if source is not None and value is not None:
            derive(region, out, value, ((input, source),), is_curved=True, is_dirty=inplace)
        if inplace:
            ctx.mark_dirty(input)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = load(ctx)
        return None, None, None, None, kept.multiply(grad), None


def _silu(input: Tensor, inplace: bool = False) -> tuple[Derivative, bool]:
    return aten.silu_backward.default, inplace


def _hardswish(input: Tensor, inplace: bool = False) -> tuple[Derivative, bool]:
    return aten.hardswish_backward.default, inplace


def _mish(input: Tensor, inplace: bool = False) -> tuple[Derivative, bool]:
    return aten.mish_backward.default, inplace


def _gelu(input: Tensor, *, approximate: str = "none") -> tuple[Derivative, bool]:
    return _gelu_slope(approximate), False


@functools.lru_cache  # one object for each setting, by which derivations are found again
def _gelu_slope(approximate: str) -> Derivative:
    return lambda one, x: aten.gelu_backward(one, x, approximate=approximate)


def _softplus(input: Tensor, beta: float = 1, threshold: float = 20) -> tuple[Derivative, bool]:
    return _softplus_slope(as_number(beta), as_number(threshold)), False


@functools.lru_cache
def _softplus_slope(beta: float, threshold: float) -> Derivative:
    return lambda one, x: aten.softplus_backward(one, x, beta, threshold)


def _log_sigmoid(input: Tensor) -> tuple[Derivative, bool]:
    return lambda one, x: torch.sigmoid(-x), False


def _sigmoid(input: Tensor, inplace: bool = False) -> tuple[Derivative, bool]:
    return lambda one, x: aten.sigmoid_backward(one, torch.sigmoid(x)), inplace


def _tanh(input: Tensor, inplace: bool = False) -> tuple[Derivative, bool]:
    return lambda one, x: aten.tanh_backward(one, torch.tanh(x)), inplace


def _elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> tuple[Derivative, bool]:
    return _elu_slope(as_number(alpha), 1.0, 1.0), inplace


@functools.lru_cache
def _elu_slope(alpha: float, scale: float, input_scale: float) -> Derivative:
    return lambda one, x: aten.elu_backward(one, alpha, scale, input_scale, False, x)


def _celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> tuple[Derivative, bool]:
    return _elu_slope(as_number(alpha), 1.0, 1.0 / as_number(alpha)), inplace


def _selu(input: Tensor, inplace: bool = False) -> tuple[Derivative, bool]:
    return _elu_slope(_SELU_ALPHA, _SELU_SCALE, 1.0), inplace


def _softsign(input: Tensor) -> tuple[Derivative, bool]:
    return lambda one, x: (x.abs() + 1).square().reciprocal(), False


def _tanhshrink(input: Tensor) -> tuple[Derivative, bool]:
    return lambda one, x: x.tanh().square(), False


def _sin(input: Tensor) -> tuple[Derivative, bool]:
    return lambda one, x: x.cos(), False


def _cos(input: Tensor) -> tuple[Derivative, bool]:
    return lambda one, x: -x.sin(), False


def _atan(input: Tensor) -> tuple[Derivative, bool]:
    return lambda one, x: (x.square() + 1).reciprocal(), False


def _erf(input: Tensor) -> tuple[Derivative, bool]:
    return lambda one, x: x.square().neg().exp() * (2 / math.sqrt(math.pi)), False


def _erfc(input: Tensor) -> tuple[Derivative, bool]:
    return lambda one, x: x.square().neg().exp() * (-2 / math.sqrt(math.pi)), False


def _ndtr(input: Tensor) -> tuple[Derivative, bool]:
    return lambda one, x: x.square().div(-2).exp() / math.sqrt(2 * math.pi), False


def _asinh(input: Tensor) -> tuple[Derivative, bool]:
    return lambda one, x: (x.square() + 1).rsqrt(), False


def _sinh(input: Tensor) -> tuple[Derivative, bool]:
    return lambda one, x: x.cosh(), False


def _cosh(input: Tensor) -> tuple[Derivative, bool]:
    return lambda one, x: x.sinh(), False


class _GLUSlope(NamedTuple):
    """Derivative of a sigmoid(b) by one of the halves (a, b): sigmoid(b), and a sigmoid'(b)."""

    dim: int
    half: int

    def __call__(self, x: Tensor) -> Tensor:
        one = expanded_one(x.narrow(self.dim, 0, x.shape[self.dim] // 2))
        return aten.glu_backward(one, x, self.dim).chunk(2, self.dim)[self.half].contiguous()


class _GLU(Saving):
    """a sigmoid(b) of the halves (a, b): the derivatives are stored."""

    @staticmethod
    def forward(ctx: Any, region: Keeper, call: Callable[[Tensor], Tensor], dim: int, input: Tensor) -> Tensor:
        out, source = call(input), keep_source(region, input)
        kept = []
        for slope in (_GLUSlope(dim, half) for half in range(2)):
            derived = None if source is None else keep_smooth(slope, source, out, is_pointwise=False)
            kept.append(region.keep(slope(input), share=False) if derived is None else derived)
        save(ctx, *kept)
        if source is not None:
            derive(region, out, call, ((input, source),), is_curved=True, is_pointwise=False)
        ctx.dim = dim
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, torch.cat([kept.multiply(grad) for kept in load(ctx)], ctx.dim)


def _glu(region: Keeper, func: Callable, input: Tensor, dim: int = -1) -> Any:
    if not region.packs_input(input) or not input.requires_grad:
        return NotImplemented
    return region.apply(_GLU, Value.of(func, (dim,), {}), dim, input)


#: Derivatives without settings, by which derivations are found again.
_slopes: dict[CodeType, Derivative] = {}
#: Functions without a bounded slope, or of many turns: a rounding error of their input is no small one of theirs.
_STEEP = frozenset((_sin, _cos, _sinh, _cosh))


def _handler(rule: Callable[..., tuple[Derivative, bool]], always_inplace: bool = False) -> Callable:
    """Make the handler of a function whose parameters ``rule`` has, too."""
    is_gentle = rule not in _STEEP

    def handle(region: Keeper, func: Callable, *args: Any, **kwargs: Any) -> Any:
        try:
            derivative, inplace = rule(*args, **kwargs)
        except TypeError:
            return NotImplemented  # torch explains what is wrong
        if isinstance(derivative, FunctionType) and derivative.__closure__ is None:  # of a line that ran before
            derivative = _slopes.setdefault(derivative.__code__, derivative)
        input, rest, kwargs = (args[0], args[1:], kwargs) if args else (kwargs.pop("input"), (), kwargs)
        if not region.packs_input(input) or not input.requires_grad:
            return NotImplemented
        value = Value.of(func, rest, kwargs) if is_gentle else None
        inplace = bool(inplace) or always_inplace
        if value is not None and not inplace and input.numel() <= MOST_HELD:
            run = _RUNNERS.get(func)
            out = None if run is None else run(region, value, input)
            if out is not None:
                return out
        return region.apply(_Smooth, lambda x: func(x, *rest, **kwargs), derivative, value, input, inplace)

    return handle


def _run_torch(region: Keeper, function: Value, input: Tensor) -> Tensor | None:
    """Run torch's own function, which reads its decoded input: of few elements, that takes less time than calls.

    None where a Function must run.
    """
    runner = region.torch_runner(input)
    if runner is None:
        return None
    if input.numel() < region.settings.min_numel:
        return runner.run_torch_function(function, input, keep_small(input))
    source = keep_source(region, input)
    if source is None:
        return None
    out = runner.run_torch_function(function, input, reported(source))
    derive(region, out, function, ((input, source),), is_curved=True)
    return out


def _run_torch_by_output(region: Keeper, function: Value, input: Tensor) -> Tensor | None:
    """Run torch's own function, whose gradient reads its output: a function of the packed input, which serves readers.

    None where a Function must run.
    """
    runner = region.torch_runner(input)
    source = None if runner is None or input.numel() < region.settings.min_numel else keep_source(region, input)
    kept = None if source is None else function_of(function, (source,), input, is_curved=True)
    if runner is None or kept is None:
        return None
    out = runner.run_torch_function(function, input, reported(kept))
    region.register(out, kept)
    return out


#: Functions of which torch saves the input, or the output, and nothing else.
_RUNNERS = {
    **dict.fromkeys((F.silu, F.hardswish, F.mish, F.gelu), _run_torch),
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid, torch.tanh, Tensor.tanh), _run_torch_by_output),
}
_RULES = {
    _silu: (F.silu,),
    _hardswish: (F.hardswish,),
    _mish: (F.mish,),
    _gelu: (F.gelu,),
    _softplus: (F.softplus,),
    _log_sigmoid: (F.logsigmoid,),
    _sigmoid: (F.sigmoid, torch.sigmoid, torch.special.expit, Tensor.sigmoid),
    _tanh: (F.tanh, torch.tanh, Tensor.tanh),
    _elu: (F.elu,),
    _celu: (F.celu, torch.celu),
    _selu: (F.selu, torch.selu),
    _softsign: (F.softsign,),
    _tanhshrink: (F.tanhshrink,),
    _sin: (torch.sin, Tensor.sin),
    _cos: (torch.cos, Tensor.cos),
    _atan: (torch.atan, torch.arctan, Tensor.atan, Tensor.arctan),
    _erf: (torch.erf, torch.special.erf, Tensor.erf),
    _erfc: (torch.erfc, torch.special.erfc, Tensor.erfc),
    _ndtr: (torch.special.ndtr,),
    _asinh: (torch.asinh, torch.arcsinh, Tensor.asinh, Tensor.arcsinh),
    _sinh: (torch.sinh, Tensor.sinh),
    _cosh: (torch.cosh, Tensor.cosh),
}
_INPLACE_RULES = {
    _sigmoid: (torch.sigmoid_, Tensor.sigmoid_),
    _tanh: (torch.tanh_, Tensor.tanh_),
    _elu: (F.elu_,),
    _celu: (F.celu_,),
    _selu: (F.selu_,),
}
STORED = Stored(
    "SiLU, GELU, Hardswish, Sigmoid, Tanh, Mish, ELU, GLU, Softplus, sin, sinh, erf and the like",
    "the derivative, packed; from 4 bits on, the input in its place, from which derivative and output derive",
    "unbiased; derived ones have the bias Var f'' / 2 of one packed copy",
)
OPS = (
    *(Op(funcs, _handler(rule), STORED, is_bit_exact=False) for rule, funcs in _RULES.items()),
    *(
        Op(funcs, _handler(rule, always_inplace=True), STORED, is_bit_exact=False)
        for rule, funcs in _INPLACE_RULES.items()
    ),
    Op((F.glu,), _glu, STORED, is_bit_exact=False),
    Op(everywhere("sigmoid", "expit", "tanh"), saves=Saves.BOUNDED),
)
