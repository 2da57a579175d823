"""Brevitas' forward quantizers inside a region, whose tensors for backward are exact and small.

The first packing region patches the ``brevitas.core`` classes that quantize or take statistics to look for a region;
until then Brevitas is unchanged. Inside a packing region, they compute by ``brevact.autograd.ops.fake_quantization``
the results that their own ops compute everywhere else. Instances do not change, so copies, pickles, loaded state dicts,
rebuilt quantizers and shared proxies keep working. Unchanged are: scripted quantizers (``BREVITAS_JIT=1``) and those in
traced graphs; those without fixed integers (learned rounding, a delay, learned bit widths), whose ops save their
tensors in full precision; and those that somebody changed (a subclass with integers of its own) or watches by hooks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from brevitas.config import JIT_ENABLED
from torch import Tensor, nn

import brevact.private_names.of_brevitas as bv
from brevact.autograd.ops.fake_quantization import Rectifier, Signs, fake_quantize, quantize_signs
from brevact.autograd.running import before_first_region, packing_region
from brevact.injectors.fused_activations import fused_activation, rectified, rescaling_quantizer, statistics
from brevact.injectors.integer_kinds import CLAMPS, delays, float_quant, integers_of


def _int_quant(
    stock: Callable, quant: bv.IntQuant, scale: Tensor, zero_point: Tensor, bit_width: Tensor, x: Tensor
) -> Any:
    out = _quantize(quant, scale, zero_point, scale, zero_point, bit_width, x)
    if out is NotImplemented and (x is rectified.output or bit_width.requires_grad):
        with _learning(bit_width):
            x = torch.relu(rectified.input) if x is rectified.output else x
            out = stock(quant, scale, zero_point, bit_width, x)
    return out


def _decoupled_int_quant(
    stock: Callable,
    quant: bv.DecoupledIntQuant,
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
    """Save the stock ops' tensors for the gradient of a bit width in full precision.

    It is a difference of large sums, the scale's share and the bounds' share: noise in their terms would hide it.
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
    if region is None or type(x) not in (Tensor, nn.Parameter):
        return NotImplemented
    integers = integers_of(quant, bit_width)
    if integers is None:
        return NotImplemented
    viewed = quant.input_view_impl(x)
    given = scale, zero_point, pre_scale, pre_zero_point
    if viewed is not rectified.output:
        return fake_quantize(region, integers, viewed, *given)
    rectifier = Rectifier(None if rectified.waits else viewed)
    return fake_quantize(region, integers, rectified.input, *given, rectifier)


def _binary(x: Tensor, scale: Tensor) -> Tensor:
    return bv.binary_sign_ste(x)


def _clamped_binary(clamp: nn.Module, x: Tensor, scale: Tensor) -> Tensor:
    return _binary(clamp(x, -scale, scale), scale)


def _ternary(threshold: float, x: Tensor, scale: Tensor) -> Tensor:
    return x.abs().gt(threshold * scale).float() * bv.ternary_sign_ste(x)


def _sign_quant(stock: Callable, quant: Any, x: Tensor) -> Any:
    """``BinaryQuant``, ``ClampedBinaryQuant`` and ``TernaryQuant``, which compute their scales themselves."""
    region = packing_region()
    if region is None or delays(quant) or type(x) not in (Tensor, nn.Parameter):
        return NotImplemented
    inplace = False
    if type(quant) is bv.TernaryQuant:
        signs = Signs(functools.partial(_ternary, quant.threshold), bit_width=2, step=1, has_zero=True)
    elif type(quant) is bv.BinaryQuant:
        signs = Signs(_binary, bit_width=1, step=2)
    elif type(quant) is bv.ClampedBinaryQuant and type(quant.tensor_clamp_impl) in CLAMPS:
        inplace = type(quant.tensor_clamp_impl) is bv.InplaceTensorClampSte
        of = _binary if inplace else functools.partial(_clamped_binary, quant.tensor_clamp_impl)
        signs = Signs(of, bit_width=1, step=2, clips=type(quant.tensor_clamp_impl) is bv.TensorClamp)
    else:
        return NotImplemented
    scale = quant.scaling_impl(x)
    if inplace:
        x = quant.tensor_clamp_impl(x, -scale, scale)
    out = quantize_signs(region, signs, x, scale)
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


#: Classes of Brevitas, and their forward inside a region.
COUNTERPARTS: dict[type[nn.Module], Callable] = {
    bv.IntQuant: _int_quant,
    bv.DecoupledIntQuant: _decoupled_int_quant,
    bv.BinaryQuant: _sign_quant,
    bv.ClampedBinaryQuant: _sign_quant,
    bv.TernaryQuant: _sign_quant,
    bv.FloatQuant: float_quant,
    bv._Stats: statistics,
    bv.FusedActivationQuantProxy: fused_activation,
    bv.RescalingIntQuant: rescaling_quantizer,
}


def _let_all_ask() -> None:
    for kind, counterpart in COUNTERPARTS.items():
        _let_ask_for_region(kind, counterpart)


if not JIT_ENABLED:
    before_first_region(_let_all_ask)
