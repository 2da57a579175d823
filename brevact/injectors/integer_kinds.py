"""The integers that Brevitas' integer quantizers round to, read from their modules."""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import Tensor, UntypedStorage

from brevact.autograd.ops.fake_quantization import Integers
from brevact.integers import IntegerRounding
from brevact.private_names.of_brevitas import (
    CeilSte,
    DecoupledIntQuant,
    DPURoundSte,
    FloorSte,
    InplaceTensorClampSte,
    IntQuant,
    RoundSte,
    RoundToZeroSte,
    StochasticRoundSte,
    TensorClamp,
    TensorClampSte,
    _NoDelay,
)

#: Deterministic roundings that kernels know.
_ROUNDINGS = {
    RoundSte: IntegerRounding.NEAREST,
    FloorSte: IntegerRounding.FLOOR,
    CeilSte: IntegerRounding.CEIL,
    RoundToZeroSte: IntegerRounding.TO_ZERO,
    DPURoundSte: IntegerRounding.DPU,
}
#: Range of the rounding residual, x - round(x), by the kind of rounding.
_RESIDUALS = {
    RoundSte: (-0.5, 0.5),
    DPURoundSte: (-0.5, 0.5),
    FloorSte: (0.0, 1.0),
    CeilSte: (-1.0, 0.0),
    RoundToZeroSte: (-1.0, 1.0),
    StochasticRoundSte: (-1.0, 1.0),
}
CLAMPS = (TensorClamp, TensorClampSte, InplaceTensorClampSte)
_widths: weakref.WeakKeyDictionary[UntypedStorage, tuple[Any, float]]
_widths = weakref.WeakKeyDictionary()


def integers_of(quant: Any, bit_width: Tensor) -> Integers | None:
    """Return the integers of an ``IntQuant`` or ``DecoupledIntQuant``; None if they are not fixed."""
    residual = _RESIDUALS.get(type(quant.float_to_int_impl))
    clamp = type(quant.tensor_clamp_impl)
    if residual is None or clamp not in CLAMPS or delays(quant):
        return None
    if type(quant).to_int not in (IntQuant.to_int, DecoupledIntQuant.to_int):  # overridden by a subclass
        return None
    if bit_width.requires_grad or bit_width.numel() != 1 or bit_width.is_meta:
        return None
    width = _number(bit_width)
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
        repeats=type(quant.float_to_int_impl) is not StochasticRoundSte,
        clips_gradients=clamp is TensorClamp,
    )


def delays(quant: Any) -> bool:
    """Return whether a quantizer starts to quantize after some steps."""
    return type(quant.delay_wrapper.delay_impl) is not _NoDelay


def _number(x: Tensor) -> float:
    """A constant's value, read only once on a GPU, where reading waits."""
    if x.is_cpu:  # `x.data` is set without a new version
        return float(x.item())
    storage, place = x.untyped_storage(), (x._version, x.storage_offset(), x.dtype)
    known = _widths.get(storage)
    if known is None or known[0] != place:
        known = _widths[storage] = place, float(x.item())
    return known[1]
