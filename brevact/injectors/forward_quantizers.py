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
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from brevitas.config import JIT_ENABLED
from torch import Tensor, nn

import brevact.private_names.of_brevitas as bv
from brevact.autograd.ops.fake_quantization import Rectifier, Signs, fake_quantize, quantize_signs
from brevact.autograd.ops.forward_statistics import absolute_percentile, magnitude_of_all
from brevact.autograd.running import before_first_region, packing_region
from brevact.injectors.known_quantizers import (
    CLAMPS,
    STATISTICS_OF_WEIGHTS,
    Tree,
    delays,
    float_quant,
    integers_of,
    is_own,
    known_quantizer,
    statistics_of_weight,
    takes_statistics,
)


class _Rectified(threading.local):
    """The ReLU of a fused activation, while its quantizer runs: output, without a graph, and input.

    If the output ``waits``, only the quantization itself reads its elements, and it is an alias of the input.
    """

    output: Tensor | None = None
    input: Tensor | None = None
    waits: bool = False


rectified = _Rectified()


def statistics(stock: Callable, stats: bv._Stats, input: Tensor) -> Any:
    """Statistics for a scale: a weight's are recomputed, a percentile is one element of an activation."""
    region = packing_region()
    if region is None or type(input) not in (Tensor, nn.Parameter):
        return NotImplemented
    impl, y, x = stats.stats_impl, rectified.output, rectified.input
    if x is not None and y is not None and input.untyped_storage()._cdata == y.untyped_storage()._cdata:
        found = absolute_percentile(region, x.view(input.shape), impl.q, None, impl.keepdim, values=input)
        return found.view(stats.stats_output_shape)
    if not input.requires_grad:
        if type(impl) is not bv.AbsPercentile or impl.stats_reduce_dim is not None or not input.numel():
            return NotImplemented
        return magnitude_of_all(input, impl.q).view(stats.stats_output_shape)
    if type(impl) not in STATISTICS_OF_WEIGHTS or input.numel() < region.settings.min_numel:
        return NotImplemented
    if region.is_weight(input):
        found = statistics_of_weight(region, impl, input)
    elif type(impl) is bv.AbsPercentile:
        found = absolute_percentile(region, input, impl.q, impl.stats_reduce_dim, impl.keepdim)
    else:
        return NotImplemented
    return found.view(stats.stats_output_shape)


def fused_activation(stock: Callable, fused: bv.FusedActivationQuantProxy, x: Tensor) -> Any:
    """A ReLU and the quantizer behind it, with one mask for both: the gradient goes to the ReLU's input."""
    region = packing_region() if type(x) is Tensor else None
    if region is None:
        return NotImplemented
    known = known_quantizer(fused)
    if known is not None and not takes_statistics(known.scaling) and is_own(known.zero_point):
        found = known.quantize(region, x, reads_elements=False)
        if found is not NotImplemented:
            return found
    relu = fused.activation_impl
    if type(relu) is not nn.ReLU or relu.inplace:
        return NotImplemented
    if not x.requires_grad or not _reads_elements_alone(fused.tensor_quant, x):
        return NotImplemented
    if not Tree.of(fused).is_untouched():  # foreign hooks see a tensor between the ReLU's input and the output
        return NotImplemented
    around = rectified.output, rectified.input, rectified.waits
    waits = not takes_statistics(fused.tensor_quant.scaling_impl)
    if waits:
        y = x.detach()
    else:
        with torch.no_grad():
            y = relu(x)
    rectified.output, rectified.input, rectified.waits = y, x, waits
    try:
        return fused.tensor_quant(y)
    finally:
        rectified.output, rectified.input, rectified.waits = around


def rescaling_quantizer(stock: Callable, quant: bv.RescalingIntQuant, x: Tensor) -> Any:
    """A stand-alone integer quantizer, of a weight or of an activation with a constant, learned or collected scale."""
    if type(quant) is not bv.RescalingIntQuant or type(x) not in (Tensor, nn.Parameter):
        return NotImplemented
    region = packing_region()
    known = None if region is None else known_quantizer(quant)
    if known is None or x is rectified.output:
        return NotImplemented
    return known.quantize(region, x, reads_elements=True)


def _reads_elements_alone(quant: Any, x: Tensor) -> bool:
    """Whether a quantizer's scale has no gradient for the elements, or one for a single element."""
    if type(quant) is not bv.RescalingIntQuant or type(quant.int_quant) is not bv.IntQuant or quant.observer_only:
        return False
    if type(quant.zero_point_impl) is not bv.ZeroZeroPoint or type(quant.int_quant.input_view_impl) is not bv.Identity:
        return False
    if type(quant.int_quant.tensor_clamp_impl) is not bv.TensorClamp:  # without a mask of its own: nothing is saved
        return False
    scaling = quant.scaling_impl
    if type(scaling) is not bv.ParameterFromRuntimeStatsScaling:
        return type(scaling) in (bv.ConstScaling, bv.ParameterScaling)
    if not takes_statistics(scaling):
        return True
    impl = scaling.stats.stats_impl
    return (
        type(impl) is bv.AbsPercentile
        and impl.stats_reduce_dim is None
        and type(scaling.stats_input_view_shape_impl) is bv.OverTensorView
        and x.is_contiguous()
    )


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
