"""A ReLU fused with Brevitas' quantizer behind it, inside a region, and the statistics that scales come from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import brevact.private_names.of_brevitas as bv
from brevact.autograd.ops.forward_statistics import absolute_percentile, magnitude_of_all
from brevact.autograd.running import packing_region
from brevact.injectors.known_quantizers import (
    STATISTICS_OF_WEIGHTS,
    Tree,
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
