"""The integers that Brevitas' integer quantizers round to, read from their modules.

Brevitas' minifloat quantizers inside a region: their input is saved, and all of their steps are recomputed.

Their steps divide by powers of two that depend on the element. A rounding error of a fraction of the range in one of
them would be a multiple of the gradient, so no quantizer packs them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, UntypedStorage, nn

import brevact.private_names.of_brevitas as bv
from brevact.autograd import storage_report
from brevact.autograd.ops.base import compute_from_quotient, compute_from_weight
from brevact.autograd.ops.fake_quantization import Integers, fake_quantize, is_quantizable
from brevact.autograd.running import packing_region
from brevact.geometry import IntegerRounding

#: Deterministic roundings that kernels know.
_ROUNDINGS = {
    bv.RoundSte: IntegerRounding.NEAREST,
    bv.FloorSte: IntegerRounding.FLOOR,
    bv.CeilSte: IntegerRounding.CEIL,
    bv.RoundToZeroSte: IntegerRounding.TO_ZERO,
    bv.DPURoundSte: IntegerRounding.DPU,
}
#: Range of the rounding residual, x - round(x), by the kind of rounding.
_RESIDUALS = {
    bv.RoundSte: (-0.5, 0.5),
    bv.DPURoundSte: (-0.5, 0.5),
    bv.FloorSte: (0.0, 1.0),
    bv.CeilSte: (-1.0, 0.0),
    bv.RoundToZeroSte: (-1.0, 1.0),
    bv.StochasticRoundSte: (-1.0, 1.0),
}
CLAMPS = (bv.TensorClamp, bv.TensorClampSte, bv.InplaceTensorClampSte)
_widths: weakref.WeakKeyDictionary[UntypedStorage, tuple[Any, float]]
_widths = weakref.WeakKeyDictionary()


def integers_of(quant: Any, bit_width: Tensor) -> Integers | None:
    """Return the integers of an ``IntQuant`` or ``DecoupledIntQuant``; None if they are not fixed."""
    residual = _RESIDUALS.get(type(quant.float_to_int_impl))
    clamp = type(quant.tensor_clamp_impl)
    if residual is None or clamp not in CLAMPS or delays(quant):
        return None
    if type(quant).to_int not in (bv.IntQuant.to_int, bv.DecoupledIntQuant.to_int):  # overridden by a subclass
        return None
    if bit_width.requires_grad or bit_width.numel() != 1 or bit_width.is_meta:
        return None
    width = number_of(bit_width)
    if not 1 <= width <= 32 or width != int(width):
        return None
    minimum, maximum = quant.min_int(bit_width), quant.max_int(bit_width)
    lowest = (-(2 ** (int(width) - 1)) + bool(quant.narrow_range)) if quant.signed else 0
    return Integers(
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
        repeats=type(quant.float_to_int_impl) is not bv.StochasticRoundSte,
        clips_gradients=clamp is bv.TensorClamp,
    )


def delays(quant: Any) -> bool:
    """Return whether a quantizer starts to quantize after some steps."""
    return type(quant.delay_wrapper.delay_impl) is not bv._NoDelay


def number_of(x: Tensor) -> float:
    """A constant's value, read only once on a GPU, where reading waits."""
    if x.is_cpu:  # `x.data` is set without a new version
        return float(x.item())
    storage, place = x.untyped_storage(), (x._version, x.storage_offset(), x.dtype)
    known = _widths.get(storage)
    if known is None or known[0] != place:
        known = _widths[storage] = place, float(x.item())
    return known[1]


_FLOAT_ROUNDINGS = (bv.RoundSte, bv.DPURoundSte, bv.FloorSte, bv.CeilSte, bv.RoundToZeroSte)
_FLOAT_CLAMPS = (bv.TensorClamp, bv.TensorClampSte)


def float_quant(stock: Callable, quant: bv.FloatQuant, x: Tensor) -> Any:
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
        step = bv.float_internal_scale(quotient, mantissa, bv.min_internal_scale(bias, mantissa), quant.eps)
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


def _is_fixed(quant: bv.FloatQuant) -> bool:
    return (
        type(quant) is bv.FloatQuant
        and not quant.observer_only
        and type(quant.float_to_int_impl) in _FLOAT_ROUNDINGS
        and type(quant.float_clamp_impl) is bv.FloatClamp
        and type(quant.float_clamp_impl.tensor_clamp_impl) in _FLOAT_CLAMPS
    )
