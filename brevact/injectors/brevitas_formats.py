"""How each kind of Brevitas tensor quantizer computes: scale and zero point, then the code values.

A format runs a tensor quantizer's parts in the order of its own ``forward``, and stops before the multiplication by the
scale. Bit widths are read when the format is made, so that nothing waits for a GPU later.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from brevact.injectors.number_codes import IntegerCodes, MinifloatCodes
from brevact.injectors.stored_scales import Bytes, Floats, PowersOfTwo
from brevact.private_names.of_brevitas import (
    BinaryQuant,
    BitWidthConst,
    ClampedBinaryQuant,
    DynamicOverSubChannelBlockView,
    FloatQuant,
    Identity,
    PowerOfTwoRestrictValue,
    RescalingIntQuant,
    RuntimeDynamicGroupStatsScaling,
    SignedAbsMax,
    TernaryQuant,
    ZeroZeroPoint,
    _NoDelay,
    binary_sign_ste,
    ternary_sign_ste,
)

_LARGEST_MINIFLOAT = 16
_SMALLEST_SCALE = 2.0**-65  # with it, a byte has room for flags: every fourth power of two, at least


class Format(ABC):
    """Codes, scale and zero point of one kind of tensor quantizer; the base class has no zero point."""

    codes: IntegerCodes | MinifloatCodes

    def __init__(
        self, tensor_quant: nn.Module, view: nn.Module | None = None, scaling_threshold: Tensor | None = None
    ) -> None:
        self.tensor_quant = tensor_quant
        #: Dimension and size of the groups that share a scale; None without groups.
        self.group = _group_of(view)
        self._is_signed = any(is_kind(module, SignedAbsMax) for module in tensor_quant.modules())
        self._smallest = _bound_of_powers(tensor_quant.scaling_impl, scaling_threshold)
        _refuse_delay(getattr(tensor_quant, "int_quant", tensor_quant))

    def observe(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return scale and zero point, None for zero; updates the tensor quantizer's statistics."""
        return self.tensor_quant.scaling_impl(x), None

    @abstractmethod
    def values(self, x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        """Return the code values, grouped if the quantizer has groups."""

    def stored(self, scale: Tensor, zero_point: Tensor | None) -> tuple[Floats, Floats | None]:
        """Return how scale and zero point are stored."""
        if self._smallest is None or scale.dtype == torch.float64:
            return Floats(shape=tuple(scale.shape), dtype=scale.dtype, is_signed=self._is_signed), None
        bound, threshold = self._smallest
        smallest = (torch.full((), bound, dtype=scale.dtype, device="cpu") / threshold).item()
        return PowersOfTwo(shape=tuple(scale.shape), dtype=scale.dtype, smallest=smallest), None


class IntegerFormat(Format):
    """``RescalingIntQuant``: (q - zero_point) * scale for integers q of a range."""

    def __init__(self, tensor_quant: nn.Module) -> None:
        bit_width = _constant(tensor_quant.msb_clamp_bit_width_impl, "bit_width", BitWidthConst)
        if not 1 <= bit_width <= 32:
            raise ValueError(f"bit_width={bit_width} is out of range; accepted is an integer from 1 to 32")
        threshold = tensor_quant.int_scaling_impl(tensor_quant.msb_clamp_bit_width_impl())
        int_quant = tensor_quant.int_quant
        super().__init__(tensor_quant, int_quant.input_view_impl, threshold)
        narrow = bool(int_quant.narrow_range)
        minimum = -(2 ** (bit_width - 1)) + narrow if int_quant.signed else 0
        self.codes = IntegerCodes(bit_width=bit_width, minimum=minimum, has_spare=narrow)
        self._has_zero_point = not is_kind(tensor_quant.zero_point_impl, ZeroZeroPoint)
        shift = getattr(tensor_quant.zero_point_impl, "scale_shift_zero_point", None)
        self._rounds_zero_point = bit_width <= 8 and bool(getattr(shift, "quantize_zero_point", False))

    def observe(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        quant = self.tensor_quant
        bit_width = quant.msb_clamp_bit_width_impl()
        scale = quant.scaling_impl(x, quant.int_scaling_impl(bit_width))
        zero_point = quant.zero_point_impl(x, scale, bit_width)
        return scale, zero_point if self._has_zero_point else None

    def values(self, x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        quant = self.tensor_quant
        bit_width = quant.msb_clamp_bit_width_impl()
        if zero_point is None:
            zero_point = quant.zero_point_impl(x, scale, bit_width)
        return quant.int_quant.to_int(scale, zero_point, bit_width, x)

    def stored(self, scale: Tensor, zero_point: Tensor | None) -> tuple[Floats, Floats | None]:
        kind, _ = super().stored(scale, zero_point)
        if zero_point is None:
            return kind, None
        shape, dtype = tuple(zero_point.shape), zero_point.dtype
        if self._rounds_zero_point:
            return kind, Bytes(shape=shape, dtype=dtype, minimum=self.codes.minimum)
        return kind, Floats(shape=shape, dtype=dtype)


class TernaryFormat(Format):
    """``TernaryQuant``: -1, 0 or 1 times the scale."""

    codes = IntegerCodes(bit_width=2, minimum=-1, has_spare=True)

    def values(self, x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        return x.abs().gt(self.tensor_quant.threshold * scale).float() * ternary_sign_ste(x)


class BinaryFormat(Format):
    """``BinaryQuant`` and ``ClampedBinaryQuant``: -1 or 1 times the scale; zero is positive."""

    codes = IntegerCodes(bit_width=1, minimum=-1, step=2)

    def values(self, x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        clamp = getattr(self.tensor_quant, "tensor_clamp_impl", None)
        return binary_sign_ste(x if clamp is None else clamp(x, -scale, scale))


class MinifloatFormat(Format):
    """``FloatQuant``: minifloats times the scale."""

    def __init__(self, tensor_quant: nn.Module) -> None:
        exponent = _constant(tensor_quant.exponent_bit_width_impl, "exponent_bit_width", BitWidthConst)
        mantissa = _constant(tensor_quant.mantissa_bit_width_impl, "mantissa_bit_width", BitWidthConst)
        clamp = tensor_quant.float_clamp_impl
        self.codes = MinifloatCodes(
            exponent_bit_width=exponent,
            mantissa_bit_width=mantissa,
            exponent_bias=_constant(tensor_quant.exponent_bias_impl, "exponent_bias"),
            signed=bool(tensor_quant.signed),
            infinity=None if clamp.inf_values is None else int(_fields(clamp.inf_values)[0], 2),
            nan=() if clamp.nan_values is None else tuple(int(field, 2) for field in _fields(clamp.nan_values)),
        )
        if self.codes.bit_width > _LARGEST_MINIFLOAT or mantissa < 0:
            raise ValueError(
                f"exponent_bit_width={exponent} and mantissa_bit_width={mantissa} make {self.codes.bit_width} bits; "
                f"accepted are minifloats of at most {_LARGEST_MINIFLOAT} bits"
            )
        super().__init__(tensor_quant, tensor_quant.input_view_impl, self._threshold_of(tensor_quant))

    def observe(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.tensor_quant.scaling_impl(x, self._threshold_of(self.tensor_quant)), None

    def values(self, x: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
        values, _ = self.tensor_quant.quantize(x, scale)
        return self.tensor_quant.float_clamp_impl(values, *self._limits(self.tensor_quant))[0]

    @classmethod
    def _threshold_of(cls, quant: nn.Module) -> Tensor | None:
        return None if quant.float_scaling_impl is None else quant.float_scaling_impl(*cls._limits(quant))

    @staticmethod
    def _limits(quant: nn.Module) -> tuple[Tensor, ...]:
        """Exponent width, largest mantissa and bias: arguments of the clamp and of the scale's threshold."""
        largest = quant.compute_max_mantissa(quant.mantissa_bit_width_impl())
        return quant.exponent_bit_width_impl(), largest, quant.exponent_bias_impl()


_FORMATS: dict[type, Callable[[Any], Format]] = {
    RescalingIntQuant: IntegerFormat,
    FloatQuant: MinifloatFormat,
    TernaryQuant: TernaryFormat,
    BinaryQuant: BinaryFormat,
    ClampedBinaryQuant: BinaryFormat,
}


def format_of(tensor_quant: Any, name: str) -> Format:
    """Return the format of an injector's ``tensor_quant``; the name is for errors.

    Raises a TypeError if the kind has no format or a bit width is learned, a ValueError if one is out of range.
    """
    for kind, form in _FORMATS.items():
        if is_kind(tensor_quant, kind):
            return form(tensor_quant)
    accepted = ", ".join(kind.__name__ for kind in _FORMATS)
    raise TypeError(
        f"tensor_quant of {name} is a {type(tensor_quant).__name__}, whose codes cannot be packed; accepted: {accepted}"
    )


def is_kind(module: Any, kind: type) -> bool:
    """Whether a module is of this class, scripted (``BREVITAS_JIT=1``) or not."""
    return isinstance(module, kind) or getattr(module, "original_name", None) == kind.__name__


def _constant(module: nn.Module, name: str, kind: type | None = None) -> int:
    """Integer returned by a module without state."""
    if kind is not None and not is_kind(module, kind):
        raise TypeError(
            f"{name} comes from a {type(module).__name__}, which may change while codes are stored; accepted is a "
            f"constant one: {name}_impl_type='const'"
        )
    value = float(module())
    if not value.is_integer():
        raise ValueError(f"{name}={value} cannot be stored; accepted is an integer")
    return int(value)


def _refuse_delay(quant: nn.Module) -> None:
    wrapper = getattr(quant, "delay_wrapper", None)  # minifloats have none
    if wrapper is not None and not is_kind(wrapper.delay_impl, _NoDelay):
        raise ValueError(
            f"quant_delay_steps={wrapper.delay_impl.quant_delay_steps} lets a quantizer return the tensor as it is for "
            "some steps, of which there are no codes; leave it out"
        )


def _fields(values: Any) -> tuple[str, ...]:
    return (values,) if isinstance(values, str) else tuple(values)


def _group_of(view: nn.Module | None) -> tuple[int, int] | None:
    if view is None or is_kind(view, Identity) or is_kind(view, nn.Identity):
        return None
    if is_kind(view, DynamicOverSubChannelBlockView):
        return int(view.group_dim), int(view.group_size)
    raise TypeError(
        f"input_view_impl is a {type(view).__name__}, of which the groups are not known; accepted: Identity and "
        "DynamicOverSubChannelBlockView (scaling_per_output_type='group', with group_size= and group_dim=)"
    )


def _bound_of_powers(scaling: nn.Module, threshold: Tensor | None) -> tuple[float, float] | None:
    """Bound and threshold of power-of-two scales that are divided by a power-of-two threshold; None for others."""
    if threshold is None or not is_kind(scaling, RuntimeDynamicGroupStatsScaling):
        return None
    restricted = is_kind(scaling.restrict_clamp_scaling.restrict_value_impl, PowerOfTwoRestrictValue)
    free = is_kind(scaling.restrict_clamp_scale_threshold.restrict_value_impl, Identity)
    bound = scaling.scaling_min_val
    threshold = scaling.restrict_clamp_threshold(scaling.restrict_threshold_pre(threshold))
    mantissa, _ = math.frexp(float(threshold))
    if restricted and free and mantissa == 0.5 and bound is not None and bound >= _SMALLEST_SCALE * float(threshold):
        return float(bound), float(threshold)
    return None
