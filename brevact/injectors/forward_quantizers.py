"""Brevitas' forward quantizers inside a region: what their fake quantization stores for backward is exact and small.

The first region that packs makes the classes of ``brevitas.core`` that quantize, and those that take statistics, ask
for a region; until then Brevitas is as it was. Inside a region that packs, they compute by
``brevact.autograd.ops.fake_quantization`` what they compute everywhere else by their own ops. No instance changes, so
that copies, pickles, loaded state dicts, rebuilt quantizers and those of shared proxies are all the same. Scripted ones
(``BREVITAS_JIT=1``) and those in traced graphs stay as they are, as does what has no fixed integers: learned rounding,
quantizers with a delay, learned bit widths, whose ops store what they need at full precision; and what somebody changed
(a subclass with integers of its own) or watches by hooks.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from brevitas.config import JIT_ENABLED
from torch import Tensor, UntypedStorage, nn

from brevact.autograd.first_region import before_first_region
from brevact.autograd.mode import packing_region
from brevact.autograd.ops.fake_quantization import Integers, Rectifier, fake_quantize
from brevact.autograd.ops.sign_quantization import Signs, quantize_signs
from brevact.injectors.fused_activations import fused_activation, rectified, statistics
from brevact.injectors.minifloats import float_quant
from brevact.integers import IntegerRounding
from brevact.private_names.lookup import is_whole
from brevact.private_names.of_brevitas import (
    FORWARD,
    BinaryQuant,
    CeilSte,
    ClampedBinaryQuant,
    DecoupledIntQuant,
    DPURoundSte,
    FloatQuant,
    FloorSte,
    FusedActivationQuantProxy,
    InplaceTensorClampSte,
    IntQuant,
    RoundSte,
    RoundToZeroSte,
    StochasticRoundSte,
    TensorClamp,
    TensorClampSte,
    TernaryQuant,
    _NoDelay,
    _Stats,
    binary_sign_ste,
    ternary_sign_ste,
)

#: Deterministic roundings that kernels know.
_ROUNDINGS = {
    RoundSte: IntegerRounding.NEAREST,
    FloorSte: IntegerRounding.FLOOR,
    CeilSte: IntegerRounding.CEIL,
    RoundToZeroSte: IntegerRounding.TO_ZERO,
    DPURoundSte: IntegerRounding.DPU,
}
#: What rounding takes away, x - round(x), by the kind of rounding.
_RESIDUALS = {
    RoundSte: (-0.5, 0.5),
    DPURoundSte: (-0.5, 0.5),
    FloorSte: (0.0, 1.0),
    CeilSte: (-1.0, 0.0),
    RoundToZeroSte: (-1.0, 1.0),
    StochasticRoundSte: (-1.0, 1.0),
}
_CLAMPS = (TensorClamp, TensorClampSte, InplaceTensorClampSte)
_widths: weakref.WeakKeyDictionary[UntypedStorage, tuple[tuple[int, int, torch.dtype], float]]
_widths = weakref.WeakKeyDictionary()


def _int_quant(
    stock: Callable, quant: IntQuant, scale: Tensor, zero_point: Tensor, bit_width: Tensor, x: Tensor
) -> Any:
    out = _quantize(quant, scale, zero_point, scale, zero_point, bit_width, x)
    if out is NotImplemented and (x is rectified.output or bit_width.requires_grad):
        with _learning(bit_width):
            x = torch.relu(rectified.input) if x is rectified.output else x
            out = stock(quant, scale, zero_point, bit_width, x)
    return out


def _decoupled_int_quant(
    stock: Callable,
    quant: DecoupledIntQuant,
    pre_scale: Tensor,
    pre_zero_point: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    bit_width: Tensor,
    x: Tensor,
) -> Any:
    out = _quantize(quant, scale, zero_point, pre_scale, pre_zero_point, bit_width, x)
    if out is NotImplemented and bit_width.requires_grad:
        with _learning(bit_width):
            out = stock(quant, pre_scale, pre_zero_point, scale, zero_point, bit_width, x)
    return out


def _learning(bit_width: Tensor) -> AbstractContextManager[Any]:
    """Store as it is what stock ops need for the gradient of a bit width.

    It is a difference of large sums, of the scale's share and that of the bounds: noise in their terms would hide it.
    """
    region = packing_region()
    return nullcontext() if region is None or not bit_width.requires_grad else region.hooks.suspended


def _quantize(
    quant: Any,
    scale: Tensor,
    zero_point: Tensor,
    pre_scale: Tensor,
    pre_zero_point: Tensor,
    bit_width: Tensor,
    x: Tensor,
) -> Any:
    region = packing_region()
    residual = _RESIDUALS.get(type(quant.float_to_int_impl))
    clamp = type(quant.tensor_clamp_impl)
    if region is None or residual is None or clamp not in _CLAMPS or _delays(quant):
        return NotImplemented
    if type(quant).to_int not in (IntQuant.to_int, DecoupledIntQuant.to_int):  # somebody's own way to the integers
        return NotImplemented
    if bit_width.requires_grad or bit_width.numel() != 1 or type(x) not in (Tensor, nn.Parameter):
        return NotImplemented
    width = _number(bit_width)
    if not 1 <= width <= 32 or width != int(width):
        return NotImplemented
    minimum, maximum = quant.min_int(bit_width), quant.max_int(bit_width)
    lowest = (-(2 ** (int(width) - 1)) + bool(quant.narrow_range)) if quant.signed else 0
    integers = Integers(
        round=quant.float_to_int_impl,
        clamp=functools.partial(quant.tensor_clamp_impl, min_val=minimum, max_val=maximum),
        minimum=minimum,
        maximum=maximum,
        lowest=lowest,
        highest=lowest + 2 ** int(width) - 1 - bool(quant.narrow_range),
        bit_width=int(width),
        residual=residual,
        rounding=_ROUNDINGS.get(type(quant.float_to_int_impl)),
        is_narrow=bool(quant.narrow_range),
        repeats=type(quant.float_to_int_impl) is not StochasticRoundSte,
        clips_gradients=clamp is TensorClamp,
    )
    viewed = quant.input_view_impl(x)
    given = scale, zero_point, pre_scale, pre_zero_point
    if viewed is not rectified.output:
        return fake_quantize(region, integers, viewed, *given)
    rectifier = Rectifier(None if rectified.waits else viewed)
    return fake_quantize(region, integers, rectified.input, *given, rectifier)


def _delays(quant: nn.Module) -> bool:
    return type(quant.delay_wrapper.delay_impl) is not _NoDelay


def _number(x: Tensor) -> float:
    """The value of a constant, read once: reading waits for a GPU."""
    storage, place = x.untyped_storage(), (x._version, x.storage_offset(), x.dtype)
    known = _widths.get(storage)
    if known is None or known[0] != place:
        known = _widths[storage] = place, float(x.item())
    return known[1]


def _binary(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
    return binary_sign_ste(x), None


def _clamped_binary(clamp: nn.Module, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
    q = binary_sign_ste(clamp(x, -scale, scale))
    if type(clamp) is not TensorClamp:
        return q, None
    return q, (x > scale).logical_or_(x < -scale).logical_not_()


def _ternary(threshold: float, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor | None]:
    return x.abs().gt(threshold * scale).float() * ternary_sign_ste(x), None


def _sign_quant(stock: Callable, quant: Any, x: Tensor) -> Any:
    """``BinaryQuant``, ``ClampedBinaryQuant`` and ``TernaryQuant``, which ask for their scales themselves."""
    region = packing_region()
    if region is None or _delays(quant) or type(x) not in (Tensor, nn.Parameter):
        return NotImplemented
    clips = inplace = False
    if type(quant) is TernaryQuant:
        signs = Signs(functools.partial(_ternary, quant.threshold), bit_width=2, step=1, has_zero=True)
    elif type(quant) is BinaryQuant:
        signs = Signs(_binary, bit_width=1, step=2, has_zero=False)
    elif type(quant) is ClampedBinaryQuant and type(quant.tensor_clamp_impl) in _CLAMPS:
        inplace = type(quant.tensor_clamp_impl) is InplaceTensorClampSte
        clips = type(quant.tensor_clamp_impl) is TensorClamp
        of = _binary if inplace else functools.partial(_clamped_binary, quant.tensor_clamp_impl)
        signs = Signs(of, bit_width=1, step=2, has_zero=False)
    else:
        return NotImplemented
    scale = quant.scaling_impl(x)
    if inplace:
        x = quant.tensor_clamp_impl(x, -scale, scale)
    out = quantize_signs(region, signs, x, scale, clipped=clips)
    if out is NotImplemented:
        out = signs.quantized(x, scale)
    return out, scale, quant.zero_point(), quant.bit_width()


def _let_ask_for_region(kind: type[nn.Module], counterpart: Callable) -> None:
    stock = kind.forward

    @functools.wraps(stock)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            result = counterpart(stock, self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return stock(self, *args, **kwargs)

    kind.forward = forward


#: Classes of Brevitas, and what their forward is inside a region.
COUNTERPARTS: dict[type[nn.Module], Callable] = {
    IntQuant: _int_quant,
    DecoupledIntQuant: _decoupled_int_quant,
    BinaryQuant: _sign_quant,
    ClampedBinaryQuant: _sign_quant,
    TernaryQuant: _sign_quant,
    FloatQuant: float_quant,
    _Stats: statistics,
    FusedActivationQuantProxy: fused_activation,
}


def _let_all_ask() -> None:
    for kind, counterpart in COUNTERPARTS.items():
        _let_ask_for_region(kind, counterpart)


if not JIT_ENABLED and is_whole(FORWARD):
    before_first_region(_let_all_ask)
