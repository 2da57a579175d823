"""The uniform quantizer: evenly spaced levels between the minimum and the maximum of each group."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from brevact.geometry import LARGEST_BLOCK, Geometry, UniformPlan, block_size_for
from brevact.quantizers import kernel_ops
from brevact.quantizers.brief import brief
from brevact.quantizers.checks import check_bit_width, check_bucket_size, check_int, member_of
from brevact.quantizers.formats.lossless import ELEMENTS
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import PackedSpec, Part
from brevact.quantizers.quantizer import Quantizer
from brevact.quantizers.rounding import Rounding

BIT_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
_METADATA_DTYPES = (torch.bfloat16, torch.float32)


class Granularity(str, Enum):
    """Which elements share a scale and a minimum.

    >>> x = torch.arange(24.0).reshape(2, 3, 4)
    >>> UniformQuantizer(granularity=Granularity.CHANNEL, channel_dim=1).quantize(x).scale.shape
    torch.Size([3])
    """

    BUCKET = "bucket"
    """Runs of `bucket_size` consecutive elements in memory order."""
    TENSOR = "tensor"
    """All of them."""
    CHANNEL = "channel"
    """Those of one index of `channel_dim`."""
    SAMPLE = "sample"
    """Those of one index of dimension 0."""


@dataclass(frozen=True, kw_only=True)
class UniformQuantizer(Quantizer):
    """Quantizer to 2^bit_width evenly spaced levels between the minimum and the maximum of each group of elements.

    In float32, with B = 2^bit_width - 1, for the elements x of a group:

        m = round_down(min(x)),  s = round_up((max(x) - m) / B)
        q = clip(round((x - m) / s), 0, B),  decoded as m + s * q

    An element that is exactly 0 decodes to 0: if m is negative, then m = -k * s with an integer k and the least s that
    covers the range. NaN and infinities decode to NaN. `PackedActivation` specifies both, and the bytes.

    *Dithered rounding* shifts the levels of a bucket by u * s, with one random u in [-1/2, 1/2), rounds to the nearest
    level, and stores m - u * s in place of m. The error is uniform over (-s/2, s/2] for every value: unbiased, with
    variance s^2 / 12. Stochastic rounding has variance t (1 - t) s^2 at the position t between two levels, s^2 / 6 on
    average. Errors of a bucket depend on one u, so equal values have equal errors. A bucket therefore rounds
    stochastically where an element is exactly 0, or where many values are equal or lie on levels
    (`reference.spreads`); so does one in twenty of the other buckets.

    Source: ActNN, arXiv:2104.14129, section 4.1; of dithered rounding, Schuchman, Dither signals and their effect on
    quantization noise, IEEE Transactions on Communication Technology 12, 1964. Differs: metadata are rounded first,
    outwards so that nothing is clipped, and codes computed from the rounded ones; a group with NaN or infinities has
    one level fewer; a bucket shares its dither, so that the decoder does not have to know it.

    >>> q = UniformQuantizer(bit_width=2, rounding=Rounding.NEAREST, bucket_size=4)
    >>> q.quantize(torch.tensor([0.0, 1.0, 2.0, 3.0])).dequantize()
    tensor([0., 1., 2., 3.])

    Args:
        bit_width: Bits a code: 1 to 8, 12, 16 or 24; 32 stores the elements.
        rounding: Nearest, stochastic or dithered.
        bucket_size: Consecutive elements that share a scale under `Granularity.BUCKET`; None for the whole tensor.
            Dithered rounding takes at most 512, or a multiple of 8 up to 4096.
        granularity: Which elements share a scale and a minimum. A tensor without the dimension named is one group.
        channel_dim: Dimension whose indices are groups under `Granularity.CHANNEL`; may be negative.
        scale_dtype: Stored type of the scale, bfloat16 or float32.
        minimum_dtype: Stored type of the minimum, float32 or bfloat16. The latter costs accuracy where the offset is
            large against the range: at 1000 +- 0.01 its spacing is 4. Dithered rounding needs float32.

    Raises:
        ValueError: If an argument is out of range.
        TypeError: If an argument has the wrong type.
    """

    bit_width: int = 2
    rounding: Rounding = Rounding.STOCHASTIC
    bucket_size: int | None = 512
    granularity: Granularity = Granularity.BUCKET
    channel_dim: int = 1
    scale_dtype: torch.dtype = torch.bfloat16
    minimum_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_bit_width("bit_width", self.bit_width, BIT_WIDTHS)
        check_bucket_size("bucket_size", self.bucket_size)
        check_int("channel_dim", self.channel_dim)
        object.__setattr__(self, "rounding", member_of("rounding", Rounding, self.rounding))
        object.__setattr__(self, "granularity", member_of("granularity", Granularity, self.granularity))
        for name in ("scale_dtype", "minimum_dtype"):
            if getattr(self, name) not in _METADATA_DTYPES:
                raise ValueError(
                    f"{name}: got {brief(getattr(self, name))}; accepted are torch.bfloat16 and torch.float32 "
                    "(torch.float16 overflows at 65504)"
                )
        if self.rounding is Rounding.DITHERED:
            self._check_dithered()

    def _check_dithered(self) -> None:
        """Refuse formats without a minimum to shift, or without groups whose spread is known when codes are made."""
        size = self.bucket_size
        if self.granularity is not Granularity.BUCKET or size is None or block_size_for(size) % size:
            raise ValueError(
                f"rounding: got 'dithered' with granularity={self.granularity.value!r} and bucket_size={size}; "
                f"accepted are buckets of at most 512 elements, or of a multiple of 8 up to {LARGEST_BLOCK}; or use "
                "rounding='stochastic'"
            )
        if self.minimum_dtype is not torch.float32:
            raise ValueError(
                f"minimum_dtype: got {self.minimum_dtype} with rounding='dithered', which shifts minima by parts of a "
                "step that bfloat16 does not hold; accepted is torch.float32; or use rounding='stochastic'"
            )

    def __hash__(self) -> int:
        """Hash of the fields, computed once: it is part of the key of every cache."""
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))
        return known

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @functools.cached_property
    def is_stochastic(self) -> bool:
        return self.rounding is not Rounding.NEAREST and not self.is_lossless

    @property
    def is_lossless(self) -> bool:  # type: ignore[override]  # of a field, which is frozen
        return self.bit_width == 32

    @property
    def for_smooth(self) -> StretchedQuantizer | None:
        """The same format for inputs of smooth functions; None for codes of more than 8 bits and for subclasses."""
        return self._as(StretchedQuantizer) if type(self) is UniformQuantizer and self.bit_width <= 8 else None

    def _as(self, kind: type) -> Any:
        return kind(**{name: getattr(self, name) for name in self.__dataclass_fields__})

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        if self.is_lossless:
            return ELEMENTS.parts(layout)
        geometry = self.geometry(layout)
        return (
            Part("codes", torch.uint8, geometry.code_bytes),
            Part("minimum", self.minimum_dtype, geometry.groups),
            Part("scale", self.scale_dtype, geometry.groups),
        )

    def encode(self, dense: Tensor, spec: PackedSpec[Any], seed: int | Tensor | None, buffer: Tensor) -> None:
        if self.bit_width == 32:
            ELEMENTS.encode(dense, spec, seed, buffer)
        else:
            kernel_ops.quantize_uniform(dense, spec.plan or plan_of(spec), seed, None, None, None, buffer)

    def geometry(self, layout: Layout) -> Geometry:
        try:
            return _geometry(self, layout)
        except TypeError:  # symbols have no hash
            return _geometry.__wrapped__(self, layout)

    def decode(self, buffer: Tensor, spec: PackedSpec[Any], target: Tensor, other: Tensor | None = None) -> None:
        if self.bit_width == 32:
            ELEMENTS.decode(buffer, spec, target, other)
        else:
            kernel_ops.dequantize_uniform(buffer, spec.plan or plan_of(spec), None, None, None, other, None, target)


class StretchedQuantizer(UniformQuantizer):
    """Quantizer of x by uniform codes of y = x + 50 x / (2.5 + |x|), so that levels are 21 times denser around 0.

    For inputs of smooth activation functions, whose derivatives bend there, however far other elements lie. Decoded
    elements have a rounding error of float32, constant buckets, too; those that are 0 decode to 0.

    >>> q = UniformQuantizer(bit_width=4, bucket_size=4, rounding=Rounding.NEAREST)
    >>> x = torch.tensor([-1.0, 0.5, 2.0, 300.0])
    >>> q.quantize(x).dequantize()
    tensor([ -1.0000,  -1.0000,  -1.0000, 300.8750])
    >>> q.for_smooth.quantize(x).dequantize()
    tensor([ -1.0000,   0.5173,   3.6825, 300.7515])
    """

    is_stretched = True

    @functools.cached_property
    def nominal(self) -> UniformQuantizer:
        return self._as(UniformQuantizer)


@functools.lru_cache(maxsize=4096)
def _geometry(quantizer: UniformQuantizer, layout: Layout) -> Geometry:
    granularity, n, bit_width = quantizer.granularity, layout.numel, quantizer.bit_width
    if granularity is Granularity.BUCKET:
        return Geometry.of_buckets(n, bit_width, quantizer.bucket_size)
    if granularity is Granularity.TENSOR:
        return Geometry.of_buckets(n, bit_width, None)
    dim = 0 if granularity is Granularity.SAMPLE else quantizer.channel_dim
    return Geometry.of_indices(n, bit_width, *layout.groups_along(dim))


def plan_of(spec: PackedSpec[UniformQuantizer]) -> UniformPlan:
    """Return the plan of the kernel ops for a tensor, whose quantizer is not lossless; the spec keeps it."""
    plan: UniformPlan | None = spec.plan
    if plan is None:
        quantizer = spec.quantizer
        geometry, dtypes = quantizer.geometry(spec.layout), (quantizer.scale_dtype, quantizer.minimum_dtype)
        _, minimum_at, scale_at = spec.offsets
        flags = quantizer.rounding is Rounding.DITHERED, quantizer.is_stretched
        plan = spec.plan = UniformPlan(geometry, *dtypes, minimum_at, scale_at, *flags)
    return plan
