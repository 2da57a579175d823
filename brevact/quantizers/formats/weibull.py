"""The Weibull quantizer: levels of least variance for the long-tailed values of each bucket."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from brevact.geometry import Geometry, Grid
from brevact.quantizers import kernel_ops
from brevact.quantizers.checks import between_levels, check_bit_width, check_bucket_size
from brevact.quantizers.formats.weibull_levels import UNITS, SideFits
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import Part
from brevact.quantizers.quantizer import GridQuantizer
from brevact.quantizers.reference import bounded
from brevact.quantizers.rounding import Rounding

BIT_WIDTHS = (2, 3, 4)
_SMALLEST_WIDTH = 2.0**-100
"""Buckets with a narrower range have no levels but their ends and zero."""


@dataclass(frozen=True, kw_only=True)
class WeibullQuantizer(GridQuantizer):
    """Quantizer to the 2^bit_width levels at which stochastic rounding has the least variance for Weibull magnitudes.

    The magnitudes of a bucket on one side of zero, zeros excluded, are taken to have the density
    k / s (x / s)^(k - 1) exp(-(x / s)^k). The shape k follows from E[x^2] / E[x]^2, the scale s from the mean; a table
    gives the levels for the shape and the largest magnitude. Minimum and maximum of the bucket are levels, so that
    nothing is clipped. A bucket takes the set of least expected variance among

    - zero, and levels on both sides, dealt out in any proportion;
    - as many levels on either side, and no zero;
    - levels above the minimum, with the distance from it as the magnitude, or below the maximum, likewise. A bucket
      with values on one side of zero only, as after ReLU, always takes such a set.

    An element that is exactly 0 decodes to 0: where one lies between minimum and maximum, zero is a level.

    **Bytes** of a bucket beside its codes: float32 minimum, maximum and offset (zero, or the end from which distances
    count), then the bfloat16 distances of the 2^bit_width - 2 other levels from the offset. Code 0 decodes to the
    minimum, the last code to the maximum, the others to offset + distance, clamped to these two. A bucket without a
    finite element has NaN for minimum and maximum. In a bucket that holds NaN or an infinity beside finite elements the
    last distance is infinity, which is clamped to the maximum; there the last code decodes to NaN.

    Source: TinyScript (Fu et al., ICML 2020), algorithms 1 and 2, equation 2. Differs: levels are best for the largest
    value of the bucket, not for 3 standard deviations; shapes go up to 4, not 1; the split of levels between the sides
    is chosen, not even; zero is no level where no element is 0 and that has less variance.

    >>> q = WeibullQuantizer(bit_width=2)
    >>> x = torch.tensor([0.0, 0.0, 0.1, 0.1, 0.2, 0.3, 0.5, 8.0])
    >>> q.quantize(x, seed=0).dequantize()[[0, 1, 7]]
    tensor([0., 0., 8.])

    Args:
        bit_width: Bits a code: 2, 3 or 4.
        rounding: Stochastic: unbiased. Nearest: to the closer of the same levels.
        bucket_size: Consecutive elements that share levels; None for the whole tensor.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If an argument has the wrong type.
    """

    bit_width: int = 2
    rounding: Rounding = Rounding.STOCHASTIC
    bucket_size: int | None = 4096

    def __post_init__(self) -> None:
        check_bit_width("bit_width", self.bit_width, BIT_WIDTHS)
        check_bucket_size("bucket_size", self.bucket_size)
        object.__setattr__(self, "rounding", between_levels(self.rounding))

    def geometry(self, layout: Layout) -> Geometry:
        return Geometry.of_buckets(layout.numel, self.bit_width, self.bucket_size)

    def metadata_parts(self, geometry: Geometry) -> tuple[Part, ...]:
        """Minimum, maximum and offset of each bucket, then the levels between as distances from the offset."""
        groups = geometry.groups
        ends = (Part(name, torch.float32, groups) for name in ("minimum", "maximum", "offset"))
        return *ends, Part("levels", torch.bfloat16, groups * ((1 << self.bit_width) - 2))

    def fit(self, flat: Tensor, geometry: Geometry) -> tuple[Tensor, ...]:
        """(G,) float32 minimum, maximum, offset, and (G, 2^bit_width - 2) bfloat16 ascending distances from it.

        The ends are NaN without a finite element; the last distance is infinity where something is not finite.
        """
        low, high, missing, _ = kernel_ops.ranges(flat, geometry)
        empty = torch.isnan(low)
        low, high = bounded(low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0))
        middle = low.clamp(min=0.0).minimum(high)  # zero, or the end that is closest to it
        width = (high - middle).maximum(middle - low)
        units = torch.full_like(width, UNITS)  # a tensor: CUDA multiplies by a scalar's inverse
        inverse = torch.where(width >= _SMALLEST_WIDTH, units / width, 0.0)
        sums = kernel_ops.moments(flat, geometry, middle, inverse)
        below, above = ((part.double() * inverse).round() for part in (middle - low, high - middle))
        count = 1 << self.bit_width
        fits = SideFits.of(sums.double(), below, above, _sizes(geometry, flat.device) - missing, count)
        chosen = fits.variances().argmin(1)
        offset = torch.where(chosen == count, low, torch.where(chosen == count - 1, high, middle))
        largest = torch.finfo(torch.bfloat16).max
        levels_GN = (fits.levels(chosen) * (width.double() / units)[:, None]).float().clamp(-largest, largest)
        low, high = low.masked_fill(empty, torch.nan), high.masked_fill(empty, torch.nan)
        return low, high, offset, _with_mark(levels_GN.bfloat16(), (missing > 0) & ~empty)

    def grid(self, geometry: Geometry, metadata: tuple[Tensor, ...], device: torch.device) -> Grid:
        low, high, offset, levels = metadata
        low, high = low[:, None], high[:, None]
        between = (offset[:, None] + levels.view(geometry.groups, (1 << self.bit_width) - 2).float()).clamp(low, high)
        last = high.masked_fill(levels.view(between.shape)[:, -1:] == torch.inf, torch.nan)
        return Grid(torch.cat((low, between, last), 1), marks=True)


def _with_mark(levels_GN: Tensor, flagged: Tensor) -> Tensor:
    """Levels with infinity last where flagged; a last one of 0, the middle, moves one forward: zeros stay exact."""
    rest, last = levels_GN[:, :-1], levels_GN[:, -1:]
    marked = torch.full_like(levels_GN, torch.inf)  # autocast to float16 cannot concatenate bfloat16
    marked[:, :-1] = torch.where(last == 0, levels_GN[:, 1:], rest)
    return torch.where(flagged[:, None], marked, levels_GN)


def _sizes(geometry: Geometry, device: torch.device) -> Tensor:
    """Number of elements of each bucket, (G,) float64; the last may have fewer."""
    start = torch.arange(geometry.groups, device=device) * geometry.inner
    return (geometry.numel - start).clamp(max=geometry.inner).double()
