"""Integers of a range, and minifloats, as low-bit codes: pure data, without state."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class IntegerCodes:
    """Integers in [minimum, minimum + step * (2^bit_width - 1)] as codes of ``bit_width`` bits.

    Args:
        bit_width: bits per code, 1 to 32.
        minimum: integer of code 0.
        step: distance of neighbours; 2 for the binary -1 and 1.
        has_spare: whether the last code is no integer (a narrow range, three values in two bits), but NaN.
    """

    bit_width: int
    minimum: int
    step: int = 1
    has_spare: bool = False

    @property
    def nan_code(self) -> int:
        """NaN's code: the last one, or the first one if integers are signed and none is spare."""
        return 0 if self.minimum < 0 and not self.has_spare else 2**self.bit_width - 1

    def encode(self, values: Tensor) -> Tensor:
        """Return the codes of integers stored as floats, clamped to the range; uint8 up to 8 bits."""
        largest = self.minimum + self.step * (2**self.bit_width - 1 - self.has_spare)
        if self.bit_width <= 8:
            codes = values.to(torch.int16)
        else:  # a bound may be inexact or infinite in the dtype
            codes = values.double().clamp_(self.minimum, largest).to(torch.int64)
        codes = codes.clamp_(self.minimum, largest).sub_(self.minimum)
        if self.step != 1:
            codes = codes.div_(self.step, rounding_mode="floor")
        return codes.to(torch.uint8) if self.bit_width <= 8 else codes

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the integers of codes in a floating-point type."""
        wide = torch.int64 if self.bit_width > 30 else torch.int32
        values = codes.to(wide).mul(self.step).add_(self.minimum).to(dtype)
        return values.masked_fill_(codes == self.nan_code, math.nan) if self.has_spare else values

    def without_nan_code(self, codes: Tensor) -> Tensor:
        """Return codes with NaN's code replaced by its neighbour."""
        return codes.clamp_min(1) if self.nan_code == 0 else codes.clamp_max(self.nan_code - 1)

    def decode_flagged(self, codes: Tensor, values: Tensor) -> Tensor:
        """Return values where one code is NaN, from the values where none is.

        With one bit, the other code is the middle of the two.
        """
        if self.bit_width == 1:
            values = torch.full_like(values, self.minimum + self.step / 2)
        return values.masked_fill(codes == self.nan_code, math.nan)


@dataclass(frozen=True, kw_only=True)
class MinifloatCodes:
    """Minifloats: sign s, exponent field e, mantissa field m of M bits encode (-1)^s * 2^(e - bias) * (1 + m / 2^M).

    The field e = 0 is that of subnormals, 2^(1 - bias) * m / 2^M. A code is s, e, m from its highest bit down. If no
    mantissa field is NaN, the code of -0 is, as in the FNUZ formats, and zeros lose their sign.

    >>> e2m1 = MinifloatCodes(exponent_bit_width=2, mantissa_bit_width=1, exponent_bias=1)
    >>> e2m1.bit_width, [e2m1.decode(torch.tensor([code]), torch.float32).item() for code in (1, 2, 7, 15)]
    (4, [0.5, 1.0, 6.0, -6.0])

    Source: OCP 8-bit floating point specification 1.0; OCP microscaling formats specification 1.0, section 5.3; 8-bit
    numerical formats for deep neural networks, arXiv:2206.02915 (NaN as -0).

    Args:
        exponent_bit_width: bits of the exponent field, at least 1.
        mantissa_bit_width: bits of the mantissa field.
        exponent_bias: subtracted from the exponent field.
        signed: whether there is a sign bit.
        infinity: mantissa field of infinity under the highest exponent field, or None.
        nan: mantissa fields of NaN there.
    """

    exponent_bit_width: int
    mantissa_bit_width: int
    exponent_bias: int
    signed: bool = True
    infinity: int | None = None
    nan: tuple[int, ...] = ()

    @property
    def bit_width(self) -> int:
        """Bits per code."""
        return int(self.signed) + self.exponent_bit_width + self.mantissa_bit_width

    @property
    def has_spare(self) -> bool:
        """Whether a code is NaN in every tensor."""
        return self.signed or bool(self.nan)

    @property
    def nan_code(self) -> int:
        """NaN's code; unsigned minifloats without one use the largest finite number's."""
        if self.nan:
            return self._top + self.nan[0]
        return (
            1 << (self.bit_width - 1) if self.signed else self._top + (self.infinity or 2**self.mantissa_bit_width) - 1
        )

    @property
    def _top(self) -> int:
        """The smallest code of the highest exponent field."""
        return (2**self.exponent_bit_width - 1) << self.mantissa_bit_width

    def encode(self, values: Tensor) -> Tensor:
        """Return the int32 codes of the nearest minifloats."""
        dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
        magnitudes = values.abs().to(dtype).contiguous()
        codes = torch.bucketize(magnitudes, _boundaries(self, dtype, values.device), out_int32=True)
        if self.infinity is not None:
            codes.masked_fill_(magnitudes.isinf(), self._top + self.infinity)
        if self.nan:
            codes.masked_fill_(magnitudes.isnan(), self._top + self.nan[0])
        if self.signed:
            negative = values.signbit() if self.nan else values.signbit().logical_and_(codes > 0)
            codes += negative.to(torch.int32) << (self.bit_width - 1)
        return codes

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the minifloats of codes in a floating-point type."""
        return _values(self, dtype, codes.device)[codes.to(torch.int32)]

    def without_nan_code(self, codes: Tensor) -> Tensor:
        """Return codes with NaN's code replaced by the next smaller number's."""
        return codes.masked_fill(codes == self.nan_code, self.nan_code - 1)

    def decode_flagged(self, codes: Tensor, values: Tensor) -> Tensor:
        """Return values where one code is NaN, from the values where none is."""
        return values.masked_fill(codes == self.nan_code, math.nan)


def _magnitudes(codes: MinifloatCodes) -> list[float]:
    """Values of the codes without a sign, ascending but for infinity and NaN."""
    top = 2**codes.exponent_bit_width - 1
    found = []
    for field, mantissa in itertools.product(range(top + 1), range(2**codes.mantissa_bit_width)):
        significand = mantissa + (2**codes.mantissa_bit_width if field else 0)
        found.append(math.ldexp(significand, max(field, 1) - codes.exponent_bias - codes.mantissa_bit_width))
        if field == top and mantissa == codes.infinity:
            found[-1] = math.inf
        if field == top and mantissa in codes.nan:
            found[-1] = math.nan
    return found


@functools.lru_cache(maxsize=64)
def _values(codes: MinifloatCodes, dtype: torch.dtype, device: torch.device) -> Tensor:
    magnitudes = _magnitudes(codes)
    signed = [*magnitudes, *(-x for x in magnitudes)] if codes.signed else magnitudes
    if codes.has_spare:
        signed[codes.nan_code] = math.nan
    return torch.tensor(signed, dtype=torch.float64, device="cpu").to(device, dtype)


@functools.lru_cache(maxsize=64)
def _boundaries(codes: MinifloatCodes, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Midpoints of neighbouring finite magnitudes."""
    finite = [x for x in _magnitudes(codes) if math.isfinite(x)]
    halves = [(a + b) / 2 for a, b in itertools.pairwise(finite)]
    return torch.tensor(halves, dtype=torch.float64, device="cpu").to(device, dtype)
