"""How a Brevitas quantizer's scales and zero points are stored, with a flag for non-finite groups: pure data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from brevact.injectors.number_codes import IntegerCodes

_POWER_BIAS = 127
_SMALLEST_HALF = 2.0**-24  # of float16, where a smaller bound is zero


@dataclass(frozen=True, kw_only=True)
class Floats:
    """Scales or zero points in their computed type; a scale's sign is its flag.

    Their shape broadcasts against the (grouped) tensor. Scales that may be negative have no room for a flag: a flagged
    one is stored as NaN.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_signed: bool = False

    @property
    def stored_dtype(self) -> torch.dtype:
        """Type of the stored values."""
        return self.dtype

    def of_flagged(self, values: Tensor) -> Tensor:
        """Return the scales by which flagged groups are quantized instead."""
        return torch.full_like(values, math.nan) if self.is_signed else values

    def write(self, values: Tensor, flagged: Tensor | None = None) -> Tensor:
        """Return the stored values; of flagged groups, those of `of_flagged`."""
        return values if flagged is None or self.is_signed else torch.where(flagged, -values, values)

    def read(self, stored: Tensor) -> Tensor:
        """Return the values, without their flags."""
        return stored

    def read_flagged(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values and which groups are flagged."""
        return (stored, stored.isnan()) if self.is_signed else (stored.abs(), stored.signbit())


@dataclass(frozen=True, kw_only=True)
class PowersOfTwo(Floats):
    """Powers of two above ``smallest`` in one byte each.

    Byte e is 2^(e - 127), and byte 0 is ``smallest``, Brevitas' lower bound of scales, which is no power of two and at
    least 2^-65. Bytes of powers below the bound are free for flagged groups, each for one of ``spacing`` powers.
    """

    smallest: float

    @property
    def stored_dtype(self) -> torch.dtype:
        """Type of the stored values."""
        return torch.uint8

    @property
    def lowest(self) -> int:
        """Byte of the smallest power of two."""
        return max(math.ceil(math.log2(self.smallest or _SMALLEST_HALF)) + _POWER_BIAS, 1)

    @property
    def spacing(self) -> int:
        """Distance of flagged groups' exponents: 2, unless codes have more than 8 bits."""
        return -(-(2 * _POWER_BIAS - self.lowest) // (self.lowest - 2))

    def of_flagged(self, values: Tensor) -> Tensor:
        """Return the scales by which flagged groups are quantized instead: the next larger ones."""
        return self.read_flagged(self._rungs(self._exponents(values)))[0]

    def write(self, values: Tensor, flagged: Tensor | None = None) -> Tensor:
        """Return the bytes."""
        exponents = self._exponents(values)
        if flagged is not None:
            return torch.where(flagged, self._rungs(exponents), exponents.masked_fill(values <= self.smallest, 0))
        return exponents.masked_fill_(values <= self.smallest, 0)

    def read(self, stored: Tensor) -> Tensor:
        """Return the values."""
        values = (stored.to(torch.int32) << 23).view(torch.float32).to(self.dtype)  # a byte is float32's exponent field
        return values.masked_fill_(stored == 0, self.smallest)

    def read_flagged(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values and which groups are flagged."""
        flagged = (stored > 0).logical_and_(stored < self.lowest)
        rungs = stored.to(torch.int32).sub_(1).mul_(self.spacing).add_(self.lowest).clamp_max_(2 * _POWER_BIAS)
        return self.read(torch.where(flagged, rungs.to(torch.uint8), stored)), flagged

    def _exponents(self, values: Tensor) -> Tensor:
        exponents = values.to(torch.float64).log2().round_().add_(_POWER_BIAS)
        return exponents.nan_to_num_(self.lowest).clamp_(self.lowest, 2 * _POWER_BIAS).to(torch.uint8)

    def _rungs(self, exponents: Tensor) -> Tensor:
        above = exponents.to(torch.int32).sub_(self.lowest)
        return above.add_(self.spacing - 1).div_(self.spacing, rounding_mode="floor").add_(1).to(torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Bytes(Floats):
    """Integers of at most 8 bits, from a minimum on, in one byte each."""

    minimum: int

    @property
    def stored_dtype(self) -> torch.dtype:
        """Type of the stored values."""
        return torch.uint8

    def write(self, values: Tensor, flagged: Tensor | None = None) -> Tensor:
        """Return the bytes."""
        return IntegerCodes(bit_width=8, minimum=self.minimum).encode(values)

    def read(self, stored: Tensor) -> Tensor:
        """Return the values."""
        return IntegerCodes(bit_width=8, minimum=self.minimum).decode(stored, self.dtype)
