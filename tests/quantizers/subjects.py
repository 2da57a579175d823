"""The quantizers under contract, and tensors that they have to take. A new quantizer joins by a line in `SUBJECTS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from brevact.quantizers import (
    DualPrecisionQuantizer,
    Granularity,
    MixedQuantizer,
    NormalizedFormat,
    NormalizedQuantizer,
    PackedActivation,
    Rounding,
    SampleQuantizer,
    SignMagnitudeQuantizer,
    UniformQuantizer,
    WeibullQuantizer,
    reference,
    uneven,
    unpack_codes,
)
from brevact.quantizers.formats.dual_precision import map_blocks
from brevact.quantizers.formats.mixed import DrawnMix
from brevact.quantizers.formats.sign_magnitude import SignMagnitudeLevels
from brevact.quantizers.formats.uniform import plan_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True)
class Subject:
    """A quantizer and the facts that the laws need.

    Args:
        quantizer: The quantizer.
        step: Of a packed activation and its tensor: the distance of the two levels around each element, or of the
            element to the grid, in the shape of the tensor; NaN for groups that are marked as broken. In groups that
            are flagged, because something in them is not finite, the levels that are left to the other elements count.
        largest_error: Steps by which an element may change; None for 0.5 (nearest) and 1 (others).
        unbiased: Whether the expectation of the decoded values is the tensor; None to read it from the rounding.
        keeps_range: Whether the step follows from the range of a group alone.
        two_signs: Whether zeros stay zero beside elements of both signs: one bit has two levels.
        constant_dtype: Dtype that stores a group of equal elements exactly; None if none does.
        is_noisy: Whether seeds show; they do not where each element is a bucket of its own.
        roundings: Float32 roundings between an element and its decoded value, with one to spare.
    """

    quantizer: Any
    step: Callable[[PackedActivation, Tensor], Tensor]
    largest_error: float | None = None
    unbiased: bool | None = None
    keeps_range: bool = True
    two_signs: bool = True
    constant_dtype: torch.dtype | None = torch.float32
    is_noisy: bool = True
    roundings: int = 5

    @property
    def is_stochastic(self) -> bool:
        return self.quantizer.is_stochastic

    @property
    def is_unbiased(self) -> bool:
        if self.unbiased is not None:
            return self.unbiased
        return self.quantizer.rounding is not Rounding.NEAREST

    def tolerance(self, x: Tensor, packed: PackedActivation) -> Tensor:
        """Largest error per element: steps, float32 arithmetic, and the rounding of the result's type.

        Each float32 rounding, that of float64 inputs, too, is half a unit in the last place of the largest magnitude.
        """
        largest = self.largest_error or (0.5 if self.quantizer.rounding is Rounding.NEAREST else 1.0)
        reach = x.double().abs().max() * 2 if x.numel() else 0.0
        info = torch.finfo(x.dtype)
        size = torch.maximum(x.double().abs(), packed.dequantize().double().abs().nan_to_num())
        rounding = size * max(info.eps, 2**-23) + info.smallest_normal * info.eps
        return self.step(packed, x).double() * largest + reach * self.roundings * 2**-24 + rounding


def uniform_step(packed: PackedActivation, x: Tensor) -> Tensor:
    """The stored scale of each element's group; in uneven ones, the gap between the levels around the element."""
    plan, x = plan_of(packed.spec), packed.layout.flatten(x.detach()).float()
    group = torch.arange(x.numel()) // plan.geometry.inner % max(plan.geometry.groups, 1)
    step = packed.scale.float().abs()[group]
    if plan.uneven and (rows := torch.signbit(packed.scale)[group].nonzero()[:, 0]).numel():
        parts = packed.minimum.view(torch.int32)[group[rows], None], packed.scale.view(torch.int16)[group[rows], None]
        codes = torch.arange(1 << plan.geometry.bit_width)
        limit = min(torch.finfo(packed.layout.dtype).max, torch.finfo(torch.float32).max)
        levels = uneven.values(codes, *parts, plan.geometry.bit_width, limit)
        near, far, z = levels[:, :-1].contiguous(), levels[:, -1], x[rows]
        above = torch.searchsorted(near, z[:, None]).clamp(1, near.shape[1] - 1)
        gap = (near.gather(1, above) - near.gather(1, above - 1))[:, 0]
        is_far = far.isfinite() & ((z - far).abs() <= far.abs() * 2.0**-16)
        step[rows] = torch.where(is_far, far.abs() * 2.0**-15, gap)
    return packed.layout.restore(step)


def stretched_step(packed: PackedActivation, x: Tensor) -> Tensor:
    """The larger of the ways to an element that is stretched a step farther, and back."""
    layout, flat = packed.layout, packed.layout.flatten(x.detach()).float()
    y = reference.stretched(flat)
    step = layout.flatten(uniform_step(packed, layout.restore(y)))
    return layout.restore(torch.maximum(reference.shrunk(y + step) - flat, flat - reference.shrunk(y - step)))


def sign_magnitude_step(packed: PackedActivation, x: Tensor) -> Tensor:
    """The stored scale of each element's bucket, over the number of levels."""
    geometry = packed.quantizer.geometry(packed.layout)
    group = torch.arange(geometry.numel) // geometry.inner
    return packed.layout.restore(packed.scale.float()[group] / packed.quantizer.levels)


def mixed_step(packed: PackedActivation, x: Tensor) -> Tensor:
    quantizer = packed.quantizer
    if not isinstance(quantizer, DrawnMix):  # buckets that are all alike
        return (sign_magnitude_step if isinstance(quantizer, SignMagnitudeLevels) else uniform_step)(packed, x)
    result, size = torch.empty(quantizer.numel), quantizer.size
    is_high = unpack_codes(packed.tensors[1], 1, -(-quantizer.numel // size)).bool()
    is_high = is_high.repeat_interleave(size)[: quantizer.numel]
    for (own, _), where in zip(quantizer.packs(packed), (~is_high, is_high), strict=True):
        result[where] = mixed_step(own, packed.layout.flatten(x)[where])
    return packed.layout.restore(result)


def sample_step(packed: PackedActivation, x: Tensor) -> Tensor:
    flat = torch.empty(packed.layout.numel)
    for own, rows in packed.quantizer.packs(packed):
        values = packed.layout.flatten(x).view(-1, own.quantizer.bucket_size)[rows].flatten()
        flat.view(-1, own.quantizer.bucket_size)[rows] = uniform_step(own, values).view(len(rows), -1)
    return packed.layout.restore(flat)


def grid_step(packed: PackedActivation, x: Tensor, *, clips: bool = False) -> Tensor:
    """Distance to the farther of the two levels around each element.

    Elements beyond their group's levels: 0, as a scale that is too small cuts them off; for formats that state that
    they clip, the distance to the end of the levels.
    """
    geometry, layout = packed.quantizer.geometry(packed.layout), packed.layout
    grid = packed.quantizer.grid(geometry, packed.tensors[1:], x.device)
    group = torch.arange(geometry.numel) // geometry.inner % max(geometry.groups, 1)
    flat = layout.flatten(x.detach()).double()
    offset, scale = (None if part is None else part.double()[group] for part in (grid.offset, grid.scale))
    flagged = torch.zeros_like(group, dtype=torch.bool) if scale is None else torch.signbit(scale)
    scale = None if scale is None else scale.abs()
    z = flat if offset is None else flat - offset
    z = z if scale is None else torch.where(scale > 0, z / scale, 0.0)
    levels = grid.levels.double()[group if len(grid.levels) > 1 else torch.zeros_like(group)]
    is_nan = flagged | (levels[:, -1].isnan() & ~levels[:, 0].isnan())  # the value of the last code
    levels[:, -1] = torch.where(is_nan, levels[:, -2], levels[:, -1])
    above = (z[:, None] >= levels).sum(1).clamp(1, levels.shape[1] - 1)[:, None] if z.numel() else group[:, None]
    neighbours = torch.cat((levels.gather(1, above - 1), levels.gather(1, above)), 1) if z.numel() else levels
    far = (neighbours - z[:, None]).abs().amax(1) if z.numel() else z
    outside = (z - z.clamp(levels[:, 0], levels[:, -1])).abs() if z.numel() else z
    step = torch.where(outside > 0, outside if clips else 0.0, far)
    step = step if scale is None else step * scale
    step = step if offset is None else step + 0.0 * offset  # NaN for broken groups
    return layout.restore((step + 0.0 * levels[:, 0] if z.numel() else step).float())


def dual_step(packed: PackedActivation, x: Tensor) -> Tensor:
    """The stored scale of each element's map."""
    blocks = map_blocks(packed.layout, packed.quantizer.block)
    scale = unpack_codes(packed.tensors[3], 15, blocks.maps).short().view(torch.bfloat16).float()
    return _of_maps(scale, packed)


def _of_maps(values: Tensor, packed: PackedActivation) -> Tensor:
    layout = packed.layout
    distinct = [size if d in layout.dims else 1 for d, size in enumerate(layout.shape)]
    elements = map_blocks(layout, packed.quantizer.block).elements
    return values.repeat_interleave(elements).view(distinct).expand(layout.shape)


def groups_of(packed: PackedActivation) -> Tensor:
    """Number of the group of each element, in the shape of the tensor."""
    quantizer, layout = packed.quantizer, packed.layout
    if isinstance(quantizer, DualPrecisionQuantizer):
        return _of_maps(torch.arange(map_blocks(layout, quantizer.block).maps), packed)
    if isinstance(quantizer, DrawnMix):
        return layout.restore(torch.arange(layout.numel) // quantizer.size)
    if isinstance(quantizer, SampleQuantizer):
        return layout.restore(torch.zeros(layout.numel))  # the widths of all samples depend on each other
    geometry = quantizer.geometry(layout)
    return layout.restore(torch.arange(geometry.numel) // geometry.inner % max(geometry.groups, 1))


def _dual(**settings: object) -> Subject:
    # Constants are exact where float16 holds them (a test of its own). Two more roundings: the means are subtracted and
    # added.
    quantizer = DualPrecisionQuantizer(**settings)
    return Subject(quantizer, dual_step, keeps_range=False, constant_dtype=None, roundings=7)


def _mixed(**settings: object) -> Subject:
    return Subject(MixedQuantizer(**settings), mixed_step)


def _normalized(**settings: object) -> Subject:
    # The formats round by formulas of their own, not always to the closer level: within the farther one's distance.
    # Their levels end at a number of deviations.
    step = partial(grid_step, clips=True)
    return Subject(NormalizedQuantizer(**settings), step, largest_error=1.0, keeps_range=False)


def _sample(**settings: object) -> Subject:
    return Subject(SampleQuantizer(**settings), sample_step, two_signs=settings["bit_width"] >= 4)


def _sign_magnitude(**settings: object) -> Subject:
    quantizer = SignMagnitudeQuantizer(**settings)
    return Subject(quantizer, mixed_step, constant_dtype=torch.float32 if quantizer.use_max else None)


def _uniform(**settings: object) -> Subject:
    quantizer = UniformQuantizer(**settings)
    dtype, is_noisy = quantizer.minimum_dtype, quantizer.bucket_size != 1
    two_signs = quantizer.bit_width > 1
    return Subject(quantizer, uniform_step, constant_dtype=dtype, is_noisy=is_noisy, two_signs=two_signs)


def _weibull(**settings: object) -> Subject:
    # Nearest is within half the distance of the levels, which is at most that of the farther one.
    quantizer = WeibullQuantizer(**settings)
    return Subject(quantizer, grid_step, largest_error=1.0, is_noisy=quantizer.bucket_size != 1)


SUBJECTS: dict[str, Subject] = {
    **{
        f"uniform-{rounding.value}-{bit_width}": _uniform(bit_width=bit_width, rounding=rounding)
        for rounding in Rounding
        for bit_width in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24)
    },
    **{
        f"uniform-{granularity.value}": _uniform(bit_width=3, granularity=granularity)
        for granularity in (Granularity.TENSOR, Granularity.CHANNEL, Granularity.SAMPLE)
    },
    **{f"uniform-bucket-{size}": _uniform(bit_width=2, bucket_size=size) for size in (1, 7, 64, 100, 1000, 5000, None)},
    "uniform-dithered-bucket-100": _uniform(bit_width=2, rounding=Rounding.DITHERED, bucket_size=100),
    "uniform-float32-scale": _uniform(bit_width=2, scale_dtype=torch.float32),
    "mixed-2-4": _mixed(),
    "mixed-nearest-3-6": _mixed(bit_width=3, mix_bit_width=6, mix_prob=0.4, rounding=Rounding.NEAREST),
    "mixed-dithered": _mixed(rounding=Rounding.DITHERED),
    "mixed-bucket-100": _mixed(bucket_size=100, mix_prob=0.3),
    "mixed-tensor": _mixed(granularity=Granularity.TENSOR),
    "mixed-never": _mixed(mix_prob=0),
    "mixed-always": _mixed(mix_prob=1),
    **{
        f"{format.value}-{rounding.value}": _normalized(format=format, rounding=rounding)
        for format in NormalizedFormat
        for rounding in (Rounding.NEAREST, Rounding.STOCHASTIC)
        if (format, rounding) != (NormalizedFormat.L2, Rounding.STOCHASTIC)
    },
    "L2-stochastic": replace(_normalized(format="L2", rounding="stochastic"), unbiased=False),  # ends at 1.4 deviations
    "L4-other-channels": _normalized(format="L4", channel_dim=2),
    **{f"weibull-{bit_width}": _weibull(bit_width=bit_width) for bit_width in (2, 3, 4)},
    **{f"weibull-bucket-{size}": _weibull(bit_width=3, bucket_size=size) for size in (1, 100, None)},
    "weibull-nearest": _weibull(bit_width=3, rounding=Rounding.NEAREST),
    "dual-2": _dual(),
    "dual-4-block-3": _dual(bit_width=4, block=3),
    "dual-nearest-8-block-16": _dual(bit_width=8, block=16, rounding=Rounding.NEAREST),
    **{f"sample-{bit_width}": _sample(bit_width=bit_width) for bit_width in (1, 2.5, 4, 8)},
    "sample-nearest": _sample(bit_width=3, rounding=Rounding.NEAREST),
    "sample-bucket-64": _sample(bit_width=2, bucket_size=64),
    "sign-magnitude": _sign_magnitude(),
    "sign-magnitude-nearest-4": _sign_magnitude(rounding=Rounding.NEAREST, mix_levels_prob=0),
    "sign-magnitude-nearest-3-7": _sign_magnitude(rounding=Rounding.NEAREST, base_levels=3, mix_levels=7),
    "sign-magnitude-l2": _sign_magnitude(use_max=False),
    "sign-magnitude-bucket-100": _sign_magnitude(bucket=100, base_levels=1, mix_levels=64, mix_levels_prob=0.5),
    "sign-magnitude-tensor": _sign_magnitude(bucket=None, mix_levels_prob=0.5),
    **{
        f"stretched-{width}": Subject(
            UniformQuantizer(bit_width=width, rounding=rounding).for_smooth,
            stretched_step,
            unbiased=False,
            constant_dtype=None,
            roundings=5 * 21,  # of y, up to 21 times x
        )
        for width, rounding in ((4, Rounding.DITHERED), (8, Rounding.STOCHASTIC))
    },
    "uniform-bfloat16-minimum": _uniform(bit_width=4, minimum_dtype=torch.bfloat16),
}


def takes_rounding(rounding: Rounding, settings: dict[str, Any]) -> bool:
    """Whether a uniform quantizer with these settings rounds so: where levels are shifted, buckets lie in blocks."""
    is_shiftable = settings.get("minimum_dtype", torch.float32) is torch.float32
    size = settings.get("bucket_size", 512)
    in_blocks = size is not None and (size <= 512 or (size % 8 == 0 and size <= 4096))
    in_buckets = settings.get("granularity", Granularity.BUCKET) is Granularity.BUCKET
    return rounding is not Rounding.DITHERED or (is_shiftable and in_blocks and in_buckets)


TENSORS: dict[str, Callable[[], Tensor]] = {
    "vector": lambda: torch.randn(1000),
    "one bucket": lambda: torch.randn(512),
    "ragged": lambda: torch.randn(3, 5, 7, 11),
    "0-d": lambda: torch.randn(()),
    "one element": lambda: torch.randn(1, 1, 1),
    "empty": lambda: torch.randn(4, 0, 3),
    "channels_last": lambda: torch.randn(3, 5, 7, 11).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(30, 41).t(),
    "permuted": lambda: torch.randn(6, 7, 8, 9).permute(2, 0, 3, 1),
    "expanded": lambda: torch.randn(9, 1, 11).expand(9, 13, 11),
    "expanded from one": lambda: torch.randn(()).expand(5, 6),
    "offset": lambda: torch.randn(1003)[3:],
    "columns of a matrix": lambda: torch.randn(20, 60)[:, 5:40],
    "every other": lambda: torch.randn(12, 40)[::2, ::3],
    "expanded with gaps": lambda: torch.randn(8, 1, 20)[:, :, ::2].expand(8, 3, 10),
    "odd strides of size 1": lambda: torch.randn(64).as_strided((8, 1, 8), (8, 777, 1)),
    "needs a gradient": lambda: torch.randn(40, 20).requires_grad_(),
    "negated view": lambda: torch._neg_view(torch.randn(40, 20)),
    "negated view with gaps": lambda: torch.randn(50, dtype=torch.complex64).conj().imag,
}
