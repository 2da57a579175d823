"""Sign and magnitude: levels that are evenly spaced between minus and plus the scale of each bucket."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from brevact.geometry import SMALLEST_GAP, Geometry, Grid
from brevact.private_names.of_torch import active_fake_mode
from brevact.quantizers import kernel_ops
from brevact.quantizers.checks import between_levels, check_bool, check_bucket_size, check_int, check_number
from brevact.quantizers.formats.mixed import MixingQuantizer
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import Part
from brevact.quantizers.quantizer import GridQuantizer
from brevact.quantizers.rounding import Rounding

LARGEST_LEVELS = 256
_UNITS = 65535.0


@dataclass(frozen=True, kw_only=True)
class SignMagnitudeLevels(GridQuantizer):
    """Quantizer to `levels` magnitudes, their negatives, and 0: the form of a bucket of `SignMagnitudeQuantizer`."""

    levels: int
    bucket: int | None
    use_max: bool
    rounding: Rounding

    def __post_init__(self) -> None:
        check_int("levels", self.levels, 1, LARGEST_LEVELS)
        check_bucket_size("bucket", self.bucket)
        check_bool("use_max", self.use_max)
        object.__setattr__(self, "rounding", between_levels(self.rounding))

    def geometry(self, layout: Layout) -> Geometry:
        return Geometry.of_buckets(layout.numel, (2 * self.levels).bit_length(), self.bucket)

    def metadata_parts(self, geometry: Geometry) -> tuple[Part, ...]:
        return (Part("scale", torch.float32, geometry.groups),)

    def fit(self, flat: Tensor, geometry: Geometry) -> tuple[Tensor, ...]:
        """(G,) scale of finite elements, NaN if none; L2 norms count in 65535ths: equal on all devices."""
        low, high, _, _ = kernel_ops.ranges(flat, geometry)
        largest = torch.maximum(-low, high)
        scale = torch.where(largest > 0, largest.clamp(min=SMALLEST_GAP), largest)
        if not self.use_max:
            inverse = torch.where(scale > 0, torch.full_like(scale, _UNITS) / scale, 0.0)
            sums = kernel_ops.moments(flat, geometry, torch.zeros_like(scale), inverse)
            norm = (sums[:, 2] + sums[:, 5]).double().sqrt() * (scale.double() / torch.full_like(scale, _UNITS))
            scale = torch.maximum(norm.clamp(max=torch.finfo(torch.float32).max).float(), scale)
        return (scale.masked_fill(torch.isnan(largest), float("nan")),)  # each device has NaNs of its own

    def grid(self, geometry: Geometry, metadata: tuple[Tensor, ...], device: torch.device) -> Grid:
        """Levels -1 to 1 in units of the scale, then NaN: 2^b codes are more than 2 * levels + 1."""
        make = _levels.__wrapped__ if active_fake_mode() else _levels  # fake tensors must not stay in the cache
        return Grid(*make(self.levels, device), None, metadata[0], marks=True)


@dataclass(frozen=True, kw_only=True)
class SignMagnitudeQuantizer(MixingQuantizer):
    """Quantizer to 0 and signed multiples of scale / levels, with `levels` drawn for each bucket from two numbers.

    For the elements x of a bucket:

        q = round(|x| / scale * levels),  decoded as sign(x) * q / levels * scale

    The scale is the largest magnitude, or the L2 norm (`use_max=False`). `levels` is `mix_levels` with probability
    `mix_levels_prob`, otherwise `base_levels`; `bucket=None` draws once for the tensor, the thesis' global variant.

    A code has 2 * levels + 1 values and one that marks NaN and infinities. `base_levels=4`, which the thesis calls 2
    bits, has the nine values 0, +-1/4, ..., +-1 and takes 4 bits, `mix_levels=16` 6: `nbytes` counts these bits.

    Source: J. Li, master's thesis, Heidelberg University, 2025, listings 5.1, 5.2 and 5.5. Differs: there the quantized
    values are kept in full precision; magnitudes are clamped to 1 - 1e-8 (which is 1 in float32) and scales to 1e-8;
    here NaN and infinities decode to NaN, and the scale is that of the other elements.

    >>> q = SignMagnitudeQuantizer(rounding="nearest", mix_levels_prob=0)
    >>> q.quantize(torch.tensor([-1.0, -0.4, 0.0, 0.1, 0.7])).dequantize()
    tensor([-1.0000, -0.5000,  0.0000,  0.0000,  0.7500])

    Args:
        base_levels: Magnitudes beside 0 in most buckets, 1 to 256.
        bucket: Elements that share a scale; None for the whole tensor.
        use_max: Whether the scale is the largest magnitude of the bucket, or its L2 norm, which is unbiased as well and
            much coarser: of 512 normal values it is some 22 standard deviations.
        mix_levels: Magnitudes beside 0 in the other buckets.
        mix_levels_prob: Probability of `mix_levels`, from 0 to 1.
        rounding: Nearest (ties to even magnitudes) or stochastic.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If an argument has the wrong type.
    """

    base_levels: int = 4
    bucket: int | None = 512
    use_max: bool = True
    mix_levels: int = 16
    mix_levels_prob: float = 0.3
    rounding: Rounding = Rounding.STOCHASTIC

    kind = SignMagnitudeLevels
    mixed = ("base_levels", "mix_levels", "mix_levels_prob")

    def __post_init__(self) -> None:
        check_int("base_levels", self.base_levels, 1, LARGEST_LEVELS)
        check_int("mix_levels", self.mix_levels, 1, LARGEST_LEVELS)
        check_number("mix_levels_prob", self.mix_levels_prob, 0, 1)
        object.__setattr__(self, "rounding", self._of("base_levels").rounding)  # checks the rest


@functools.lru_cache(maxsize=64)
def _levels(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(1, 2 n + 2) levels k / n and NaN, and (1, 2 n + 1) bounds; half-way between magnitudes lies in the even one."""
    with torch.inference_mode(False):
        k = torch.arange(count + 1, dtype=torch.float64, device="cpu")
        levels, halves = (k / count).float(), ((k[:-1] + 0.5) / count).float()
        even = k[:-1] % 2 == 0  # the smaller of the two is
        far, zero = torch.full_like(halves, 2.0), torch.zeros_like(halves)
        bounds = torch.where(even, torch.nextafter(halves, far), halves)
        mirrored = torch.where(even, -halves, torch.nextafter(-halves, zero))
        nan = torch.full_like(halves[:1], torch.nan)  # which no value reaches
        levels = torch.cat((-levels[1:].flip(0), levels, nan))
        return levels[None].to(device), torch.cat((mirrored.flip(0), bounds, nan))[None].to(device)
