"""Brevitas' minifloat quantizers inside a region: their input is saved, and all of their steps are recomputed.

Their steps divide by powers of two that depend on the element. A rounding error of a fraction of the range in one of
them would be a multiple of the gradient, so no quantizer packs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from brevact.autograd import storage_report
from brevact.autograd.ops.base import compute_from_quotient, compute_from_weight
from brevact.autograd.ops.fake_quantization import fake_quantize, is_quantizable
from brevact.autograd.running import packing_region
from brevact.private_names.of_brevitas import (
    CeilSte,
    DPURoundSte,
    FloatClamp,
    FloatQuant,
    FloorSte,
    RoundSte,
    RoundToZeroSte,
    TensorClamp,
    TensorClampSte,
    float_internal_scale,
    min_internal_scale,
)

_ROUNDINGS = (RoundSte, DPURoundSte, FloorSte, CeilSte, RoundToZeroSte)
_CLAMPS = (TensorClamp, TensorClampSte)


def float_quant(stock: Callable, quant: FloatQuant, x: Tensor) -> Any:
    """Run a minifloat quantizer as Brevitas' forward does; ``NotImplemented`` where its own ops must run."""
    region = packing_region()
    if region is None or not _is_fixed(quant) or type(x) not in (Tensor, nn.Parameter):
        return NotImplemented
    viewed = quant.input_view_impl(x)
    if not is_quantizable(region, viewed, ()):
        return NotImplemented
    exponent, mantissa, bias = (
        impl() for impl in (quant.exponent_bit_width_impl, quant.mantissa_bit_width_impl, quant.exponent_bias_impl)
    )
    largest = quant.compute_max_mantissa(mantissa)
    if any(constant.requires_grad for constant in (exponent, mantissa, bias, largest)):
        return NotImplemented
    above = None if quant.float_scaling_impl is None else quant.float_scaling_impl(exponent, largest, bias)
    scale = quant.scaling_impl(x, above)

    def of_quotient(quotient: Tensor, scale: Tensor) -> Tensor:
        step = float_internal_scale(quotient, mantissa, min_internal_scale(bias, mantissa), quant.eps)
        rounded = step * quant.float_to_int_impl(quotient / step)
        return quant.dequantize(quant.float_clamp_impl(rounded, exponent, largest, bias)[0], scale)

    storage_report.report_op(fake_quantize)
    if not is_quantizable(region, viewed, (scale,)):
        out = of_quotient(viewed / scale, scale)
    elif region.is_weight(viewed):
        out = compute_from_weight(region, lambda x, scale: of_quotient(x / scale, scale), viewed, scale)
    else:
        out = compute_from_quotient(region, of_quotient, viewed, scale)
    clamp = quant.float_clamp_impl
    special = clamp.saturating, clamp.inf_values, clamp.nan_values
    return out, scale, quant.zero_point_impl(), exponent, mantissa, bias, *special


def _is_fixed(quant: FloatQuant) -> bool:
    return (
        type(quant) is FloatQuant
        and not quant.observer_only
        and type(quant.float_to_int_impl) in _ROUNDINGS
        and type(quant.float_clamp_impl) is FloatClamp
        and type(quant.float_clamp_impl.tensor_clamp_impl) in _CLAMPS
    )
