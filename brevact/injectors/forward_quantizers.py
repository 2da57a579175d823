"""Brevitas' forward quantizers inside a region, whose tensors for backward are exact and small.

The first packing region patches the ``brevitas.core`` classes that quantize or take statistics to look for a region;
until then Brevitas is unchanged. Inside a packing region, integer quantizers compute by
``brevact.qat.fake_quantization`` the results that their own ops compute everywhere else; binary, ternary and
minifloat quantizers, learned bit widths, and integers that no kernel computes run their own ops, whose tensors stay
unpacked. Instances do not change, so copies, pickles, loaded state dicts, rebuilt quantizers and shared proxies keep
working. Unchanged are: scripted quantizers (``BREVITAS_JIT=1``) and those in traced graphs; those with learned rounding
or a delay; and those that somebody changed (a subclass with integers of its own) or watches by hooks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from brevitas.config import JIT_ENABLED
from torch import Tensor, nn

import brevact.private_names.of_brevitas as bv
from brevact.autograd.region.running import before_first_region, packing_region
from brevact.injectors.known_quantizers import WEIGHT_STATISTICS, integers_of, is_own, known_quantizer, takes_statistics
from brevact.qat.fake_quantization import fake_quantize
from brevact.qat.forward_statistics import absolute_percentile, magnitude_of_all, weight_statistics


def statistics(stock: Callable, stats: bv._Stats, input: Tensor) -> Any:
    """Statistics for a scale: a weight's are recomputed, a percentile is one element of an activation."""
    region = packing_region()
    if region is None or type(input) not in (Tensor, nn.Parameter):
        return NotImplemented
    impl = stats.stats_impl
    if not input.requires_grad:
        if type(impl) is not bv.AbsPercentile or impl.stats_reduce_dim is not None or not input.numel():
            return NotImplemented
        return magnitude_of_all(input, impl.q).view(stats.stats_output_shape)
    if type(impl) not in WEIGHT_STATISTICS or input.numel() < region.settings.min_numel:
        return NotImplemented
    if region.is_weight(input):
        found = weight_statistics(region, impl, input)
    elif type(impl) is bv.AbsPercentile:
        found = absolute_percentile(region, input, impl.q, impl.stats_reduce_dim, impl.keepdim)
    else:
        return NotImplemented
    return found.view(stats.stats_output_shape)


def fused_activation(stock: Callable, fused: bv.FusedActivationQuantProxy, x: Tensor) -> Any:
    """A ReLU and the quantizer behind it, with one mask for both: the gradient goes to the ReLU's input."""
    region = packing_region() if type(x) is Tensor else None
    known = None if region is None else known_quantizer(fused)
    if known is None or takes_statistics(known.scaling) or not is_own(known.zero_point):
        return NotImplemented
    return known.quantize(region, x, reads_elements=False)


def rescaling_quantizer(stock: Callable, quant: bv.RescalingIntQuant, x: Tensor) -> Any:
    """A stand-alone integer quantizer, of a weight or of an activation with a constant, learned or collected scale."""
    if type(quant) is not bv.RescalingIntQuant or type(x) not in (Tensor, nn.Parameter):
        return NotImplemented
    region = packing_region()
    known = None if region is None else known_quantizer(quant)
    if known is None:
        return NotImplemented
    return known.quantize(region, x, reads_elements=True)


def _exactly(stock: Callable, quant: nn.Module, x: Tensor, *before: Tensor) -> Any:
    """Run stock ops, whose tensors stay unpacked: a rounding error of x / s, or of a term of the gradient of a bit
    width, a difference of large sums, would be no noise.
    """
    region = packing_region()
    if region is None or type(x) not in (Tensor, nn.Parameter):
        return NotImplemented
    with region.hooks.suspended:
        found = stock(quant, *before, x)
    region.mark(found if isinstance(found, Tensor) else found[0], is_weight=region.is_weight(x))
    return found


def _int_quant(stock: Callable, quant: Any, *args: Tensor) -> Any:
    """Integers by one scale and zero point, or by two: those that round, and those behind them."""
    *given, bit_width, x = args
    region = packing_region()
    if region is None or type(x) not in (Tensor, nn.Parameter):
        return NotImplemented
    integers, out = integers_of(quant, bit_width), NotImplemented
    if integers is not None:
        out = fake_quantize(region, integers, quant.input_view_impl(x), *given[-2:], *given[:2])
    elif not bit_width.requires_grad and type(quant.float_to_int_impl) is not bv.StochasticRoundSte:
        return NotImplemented  # stock ops run as any others
    return _exactly(stock, quant, x, *given, bit_width) if out is NotImplemented else out


def _let_ask_for_region(kind: type[nn.Module], counterpart: Callable) -> None:
    stock = kind.forward

    @functools.wraps(stock)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            args = inspect.signature(stock).bind(self, *args, **kwargs).args[1:] if kwargs else args
            result = counterpart(stock, self, *args)
            if result is not NotImplemented:
                return result
            kwargs = {}
        return stock(self, *args, **kwargs)

    kind.forward = forward


#: Classes of Brevitas, and their forward inside a region.
COUNTERPARTS: dict[type[nn.Module], Callable] = {
    **dict.fromkeys((bv.IntQuant, bv.DecoupledIntQuant), _int_quant),
    **dict.fromkeys((bv.BinaryQuant, bv.ClampedBinaryQuant, bv.TernaryQuant, bv.FloatQuant), _exactly),
    bv._Stats: statistics,
    bv.FusedActivationQuantProxy: fused_activation,
    bv.RescalingIntQuant: rescaling_quantizer,
}


def _let_all_ask() -> None:
    for kind, counterpart in COUNTERPARTS.items():
        _let_ask_for_region(kind, counterpart)


if not JIT_ENABLED:
    before_first_region(_let_all_ask)
