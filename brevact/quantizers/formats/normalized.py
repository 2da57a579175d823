"""Formats of normalized values: fixed grids of N(x) = (x - mean) / deviation."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from brevact.geometry import Geometry, Grid
from brevact.private_names.of_torch import len_dispatch_stack
from brevact.quantizers import kernel_ops
from brevact.quantizers.checks import between_levels, check_bool, check_int, member_of
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import Part
from brevact.quantizers.quantizer import GridQuantizer
from brevact.quantizers.reference import LARGEST_END, LARGEST_RANGE
from brevact.quantizers.rounding import Rounding

_UNITS = 65535.0
_SMALLEST_WIDTH = 2.0**-110
"""Groups with a narrower range are constant."""
_MOST_GAPS = 60.0
"""Gaps between levels from 0 to the level that zeros take: float32 rounding moves them by less than 2^-17 gaps."""


class NormalizedFormat(str, Enum):
    """Levels for values of mean 0 and variance 1; the letter is the scale, the number the width.

    Source: B. Graham, arXiv:1702.08231, table 1.

    >>> NormalizedQuantizer(format="L4").format
    <NormalizedFormat.L4: 'L4'>
    """

    L2 = "L2"
    """sign(x) 2^(1/2 + clamp(floor(log2 |1.034 x|), -1, 0))."""
    L3 = "L3"
    """sign(x) 2^clamp(floor(log2 |1.316 x|), -1, 2)."""
    L4 = "L4"
    """sign(x) 2^clamp(floor(log2 |1.36 x|), -3, 4)."""
    L5 = "L5"
    """sign(x) sqrt(2)^clamp(floor(log_sqrt2 |1.177 x|), -6, 9)."""
    U4 = "U4"
    """(1/2 + clamp(floor(2 x), -8, 7)) / 2."""
    U5 = "U5"
    """(1/2 + clamp(floor(3 x), -16, 15)) / 3."""
    U8 = "U8"
    """(1/2 + clamp(floor(8 x), -128, 127)) / 8."""
    O4 = "O4"
    """sign(x) (a^(1/2 + clamp(floor(log_a(1 + |x|)), 0, 7)) - 1), a = 1.29."""

    @property
    def bit_width(self) -> int:
        return int(self.value[1:])

    def halves(self) -> tuple[list[float], list[float]]:
        """Positive levels, ascending, and the magnitudes from which each but the first is taken."""
        root, a = math.sqrt(2.0), 1.29
        log = {
            "L2": (2.0, 1.034, -1, 0, 0.5),
            "L3": (2.0, 1.316, -1, 2, 0.0),
            "L4": (2.0, 1.36, -3, 4, 0.0),
            "L5": (root, 1.177, -6, 9, 0.0),
        }
        if self.value in log:
            base, factor, lowest, highest, shift = log[self.value]
            exponents = range(lowest, highest + 1)
            return [base ** (shift + e) for e in exponents], [base**e / factor for e in exponents[1:]]
        if self is NormalizedFormat.O4:
            return [a ** (0.5 + e) - 1 for e in range(8)], [a**e - 1 for e in range(1, 8)]
        steps, count = {"U4": (2, 8), "U5": (3, 16), "U8": (8, 128)}[self.value]
        return [(0.5 + k) / steps for k in range(count)], [k / steps for k in range(1, count)]


@dataclass(frozen=True, kw_only=True)
class NormalizedCodes(GridQuantizer):
    """Quantizer of values that are normalized already: nothing but codes is stored."""

    format: NormalizedFormat
    rounding: Rounding

    @property
    def bit_width(self) -> int:
        return self.format.bit_width

    def geometry(self, layout: Layout) -> Geometry:
        return Geometry.of_buckets(layout.numel, self.bit_width, None)

    def grid(self, geometry: Geometry, metadata: tuple[Tensor, ...], device: torch.device) -> Grid:
        return Grid(*_levels(self.format, device))


@dataclass(frozen=True, kw_only=True)
class NormalizedQuantizer(GridQuantizer):
    """Quantizer to fixed levels of (x - mean) / deviation, with the mean and standard deviation of each channel.

    In a region, batch, layer, group and instance norms store codes of the values that they have normalized themselves
    (`for_normalized`), and no metadata. No level is 0 there: sign(0) is taken as +1.

    Elsewhere each channel stores a float32 mean and deviation. They are computed from values counted in 65535ths of the
    channel's range, which makes them equal on all devices. A constant channel decodes exactly. A channel with an
    element that is exactly 0 stores the nearest mean for which a level lies at 0, and a larger deviation where elements
    inside of the grid would be clipped otherwise, as happens with the few levels of L2. A channel that holds NaN or an
    infinity stores its deviation with the sign bit set: the code of the highest level then decodes to NaN, and finite
    values beyond the level below it take that level.

    Source: B. Graham, arXiv:1702.08231, table 1. Differs: the paper quantizes the forward pass as well, which
    `quantize_forward` requires.

    >>> q = NormalizedQuantizer(format="L4")
    >>> q.for_normalized.quantize(torch.tensor([-20.0, -0.3, 0.0, 0.7, 0.8, 2.9])).dequantize()
    tensor([-16.0000,  -0.2500,   0.1250,   0.5000,   1.0000,   2.0000])

    Args:
        format: Levels.
        rounding: Nearest: the format's own formula. Stochastic: unbiased inside the grid.
        channel_dim: Dimension whose indices share a mean and a deviation; may be negative. A tensor without it is one
            group.
        quantize_forward: Whether norm layers compute their output from the quantized values, so that they store the
            values of the forward pass; with nearest rounding only.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If an argument has the wrong type.
    """

    format: NormalizedFormat = NormalizedFormat.L4
    rounding: Rounding = Rounding.NEAREST
    channel_dim: int = 1
    quantize_forward: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", member_of("format", NormalizedFormat, self.format))
        object.__setattr__(self, "rounding", between_levels(self.rounding))
        check_int("channel_dim", self.channel_dim)
        check_bool("quantize_forward", self.quantize_forward)
        if self.quantize_forward and self.is_stochastic:
            raise ValueError(
                "quantize_forward=True with rounding='stochastic': forward passes would be random in eval mode too,"
                " and others when a checkpoint recomputes them; use rounding='nearest', or quantize_forward=False"
            )

    @property
    def bit_width(self) -> int:
        return self.format.bit_width

    @property
    def for_normalized(self) -> NormalizedCodes:
        """The same format for values that are normalized already."""
        return NormalizedCodes(format=self.format, rounding=self.rounding)

    def geometry(self, layout: Layout) -> Geometry:
        return Geometry.of_indices(layout.numel, self.bit_width, *layout.groups_along(self.channel_dim))

    def metadata_parts(self, geometry: Geometry) -> tuple[Part, ...]:
        groups = geometry.groups
        return Part("mean", torch.float32, groups), Part("scale", torch.float32, groups)

    def fit(self, flat: Tensor, geometry: Geometry) -> tuple[Tensor, ...]:
        """(G,) float32 mean and deviation of finite elements, with a sign bit if there are others; NaN if none."""
        low, high, missing, zeros = kernel_ops.ranges(flat, geometry)
        wide = high - low >= LARGEST_RANGE  # distances from 0 then, at most 2^125
        offset, width = torch.where(wide, 0.0, low), torch.where(wide, LARGEST_END, high - low)
        inverse = torch.where(width >= _SMALLEST_WIDTH, torch.full_like(width, _UNITS) / width, 0.0)
        sums = kernel_ops.moments(flat, geometry, offset, inverse).double()
        count = torch.full_like(sums[:, 4], geometry.numel / geometry.groups) - missing
        mean, square = (sums[:, 4] - sums[:, 1]) / count, (sums[:, 5] + sums[:, 2]) / count
        unit = width.double() / torch.full_like(count, _UNITS)
        deviation = ((square - mean * mean).clamp(min=0.0).sqrt() * unit).float()
        mean = (offset.double() + mean * unit).float()
        has_zero = zeros & (deviation > 0)
        aligned = self._aligned(mean, deviation, low, high, missing > 0)
        mean, deviation = (
            torch.where(has_zero, own, plain) for own, plain in zip(aligned, (mean, deviation), strict=True)
        )
        deviation = torch.where(missing > 0, -deviation, deviation)
        empty = torch.isnan(low)
        return mean.masked_fill(empty, torch.nan), deviation.masked_fill(empty, torch.nan)  # without a sign

    def _aligned(
        self, mean: Tensor, deviation: Tensor, low: Tensor, high: Tensor, flagged: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(G,) closest mean and deviation that decode a level to exactly 0 and keep values within grid and channel."""
        levels = _levels(self.format, mean.device)[0].double()
        gaps = levels.diff()
        ends = torch.full_like(gaps[:, :1], torch.inf)
        far = levels.abs() > _MOST_GAPS * torch.cat((gaps, ends), 1).minimum(torch.cat((ends, gaps), 1))
        ceiling = torch.where(flagged, levels[0, -2], levels[0, -1])[:, None]
        step, zero = deviation.double()[:, None], (-mean.double() / deviation.double())[:, None]
        below = ((zero - levels[:, :1]).clamp(min=0.0) * step).minimum(-low.double()[:, None])
        above = ((ceiling - zero).clamp(min=0.0) * step).minimum(high.double()[:, None])
        steps = torch.where(below > 0, below / (levels - levels[:, :1]), 0.0).maximum(step)
        steps = steps.maximum(torch.where(above > 0, above / (ceiling - levels), 0.0))
        steps = steps.masked_fill(far | (levels > ceiling), torch.inf)
        least = steps.amin(1, keepdim=True)
        chosen = (levels - zero).abs().masked_fill(steps > least, torch.inf).argmin(1)
        scale = least[:, 0].float()
        return -(scale * levels[0, chosen].float()), scale

    def grid(self, geometry: Geometry, metadata: tuple[Tensor, ...], device: torch.device) -> Grid:
        mean, deviation = metadata
        levels, bounds = _levels(self.format, device)
        return Grid(levels, bounds, mean, deviation, marks=True)


def _levels(format: NormalizedFormat, device: torch.device) -> tuple[Tensor, Tensor]:
    """(1, N) levels and (1, N - 1) bounds. On log scales a negative value that meets a bound takes the lower level."""
    if len_dispatch_stack():  # a mode's tensors, such as fake ones, do not outlive it
        return _make_levels(format, device)
    return _kept_levels(format, device)


def _make_levels(format: NormalizedFormat, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        levels, bounds = (torch.tensor(half, dtype=torch.float64, device="cpu").float() for half in format.halves())
        mirrored = -bounds if format.value.startswith("U") else torch.nextafter(-bounds, torch.zeros_like(bounds))
        bounds = torch.cat((mirrored.flip(0), torch.zeros_like(bounds[:1]), bounds))
        return torch.cat((-levels.flip(0), levels))[None].to(device), bounds[None].to(device)


_kept_levels = functools.lru_cache(maxsize=64)(_make_levels)
