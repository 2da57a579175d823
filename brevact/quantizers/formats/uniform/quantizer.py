"""The uniform quantizer: evenly spaced levels between the minimum and the maximum of each group."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from brevact.geometry import Geometry, UniformPlan, block_size_for
from brevact.quantizers import passes
from brevact.quantizers.brief import brief
from brevact.quantizers.checks import DTYPES, check_input, check_int, member_of
from brevact.quantizers.layout import Layout
from brevact.quantizers.packed import PackedActivation, PackedSpec, Part
from brevact.quantizers.philox import seed_value

BIT_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
_METADATA_DTYPES = (torch.bfloat16, torch.float32)


class Rounding(str, Enum):
    """How a position between two levels becomes a code.

    >>> UniformQuantizer(rounding="nearest").rounding
    <Rounding.NEAREST: 'nearest'>
    """

    NEAREST = "nearest"
    """The closer level, half to even: smallest error, biased."""
    STOCHASTIC = "stochastic"
    """Up with probability equal to the fraction: unbiased."""


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
class UniformQuantizer:
    """Uniform quantizer with a minimum and a scale a group.

    With B = 2^bit_width - 1 and the stored m = round_down(min), s = round_up((max - m) / B):
    q = clip(round((x - m) / s), 0, B), decoded as m + s * q. All arithmetic is float32.

    Source: ActNN, arXiv:2104.14129, section 4.1. Differs: metadata are rounded first, outwards so that nothing is
    clipped, and codes computed from the rounded ones; NaN and infinities decode to NaN, and a group that holds them has
    a level less for its other elements, whose range it is (see `PackedActivation`).

    >>> q = UniformQuantizer(bit_width=2, rounding=Rounding.NEAREST, bucket_size=4)
    >>> q.quantize(torch.tensor([0.0, 1.0, 2.0, 3.0])).dequantize()
    tensor([0., 1., 2., 3.])

    Args:
        bit_width: Bits a code: 1 to 8, 12, 16 or 24; 32 stores the tensor as it is.
        rounding: Nearest or stochastic.
        bucket_size: Elements that share a scale under `Granularity.BUCKET`; None for the whole tensor.
        granularity: Which elements share a scale and a minimum. A tensor without the dimension named is one group.
        channel_dim: Dimension whose indices are groups under `Granularity.CHANNEL`; may be negative.
        scale_dtype: Stored type of the scale, bfloat16 or float32.
        minimum_dtype: Stored type of the minimum, float32 or bfloat16. The latter costs accuracy where the offset is
            large against the range: at 1000 +- 0.01 its spacing is 4.

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
    is_stochastic: bool = field(init=False, repr=False, compare=False)
    """Whether the codes depend on the seed."""

    def __post_init__(self) -> None:
        """Validate, and turn strings into enums."""
        check_int("bit_width", self.bit_width)
        if self.bit_width not in BIT_WIDTHS:
            raise ValueError(f"bit_width: got {self.bit_width}; accepted are {', '.join(map(str, BIT_WIDTHS))}")
        if self.bucket_size is not None:
            check_int("bucket_size", self.bucket_size)
            if self.bucket_size < 1:
                raise ValueError(
                    f"bucket_size: got {self.bucket_size}; accepted is a positive int, or None for the whole tensor"
                )
        check_int("channel_dim", self.channel_dim)
        object.__setattr__(self, "rounding", member_of("rounding", Rounding, self.rounding))
        object.__setattr__(self, "granularity", member_of("granularity", Granularity, self.granularity))
        is_stochastic = self.rounding is Rounding.STOCHASTIC and self.bit_width < 32
        object.__setattr__(self, "is_stochastic", is_stochastic)
        for name in ("scale_dtype", "minimum_dtype"):
            if getattr(self, name) not in _METADATA_DTYPES:
                raise ValueError(
                    f"{name}: got {brief(getattr(self, name))}; accepted are torch.bfloat16 and torch.float32 "
                    "(torch.float16 overflows at 65504)"
                )

    def __hash__(self) -> int:
        """Hash of the fields, computed once: it is part of the key of every cache."""
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))
            object.__setattr__(self, "_hash", known)
        return known

    def __getstate__(self) -> dict[str, object]:
        """What is pickled and copied: hashes do not outlive the process."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @property
    def is_lossless(self) -> bool:
        """Whether decoding gives back what was quantized."""
        return self.bit_width == 32

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        """What is stored for a tensor, known before quantizing.

        Args:
            layout: Layout of the tensor to quantize.

        Returns:
            Codes, minimum and scale; at 32 bits the elements' bytes as codes alone.
        """
        if self.is_lossless:
            return (Part("codes", torch.uint8, layout.numel * layout.dtype.itemsize),)
        geometry = self.geometry(layout)
        return (
            Part("codes", torch.uint8, geometry.code_bytes),
            Part("minimum", self.minimum_dtype, geometry.groups),
            Part("scale", self.scale_dtype, geometry.groups),
        )

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        """Quantize and pack a tensor.

        Args:
            x: float32, bfloat16, float16 or float64 tensor of any shape and strides. float64 is rounded to float32
                first.
            seed: Key of the random bits of stochastic rounding: an int, a 0-d int64 tensor, or None to draw one from
                torch's generator. Unused, and not drawn, for nearest.

        Returns:
            The packed activation, on the device of `x`.

        Raises:
            TypeError: If `x` is not a dense floating-point tensor of these types, or `seed` is of another type.
        """
        if type(x) is not Tensor or x.is_nested or x.dtype not in DTYPES or x.layout is not torch.strided:
            check_input(x)
        spec = PackedSpec.of(self, Layout.of(x))
        if self.is_lossless:
            flat = spec.layout.flatten(x.detach()).clone(memory_format=torch.contiguous_format)
            return PackedActivation(spec, flat.view(torch.uint8))
        layout, buffer = spec.layout, spec.empty(x)
        key = seed_value(seed, x.device) if self.is_stochastic else None
        dense = x if layout.is_dense and not x.is_neg() else layout.flatten(x.detach())
        passes.quantize_uniform(dense, spec.plan or plan_of(spec), key, buffer)
        return PackedActivation(spec, buffer)

    def geometry(self, layout: Layout) -> Geometry:
        """Blocks and groups of a tensor.

        Args:
            layout: Layout of the tensor.

        Returns:
            Its packing grid; equal arguments share one object.
        """
        try:
            return _geometry(self, layout)
        except TypeError:  # symbols have no hash
            return _geometry.__wrapped__(self, layout)

    def decode(self, buffer: Tensor, spec: PackedSpec[UniformQuantizer], target: Tensor) -> None:
        """Decode into memory that is dense in the layout's memory order.

        Args:
            buffer: Stored bytes.
            spec: Their spec.
            target: Tensor of the layout's dtype whose memory holds the layout's elements in that order.
        """
        if self.is_lossless:
            target.as_strided((spec.layout.numel,), (1,)).copy_(buffer.view(spec.layout.dtype))
        else:
            passes.dequantize_uniform(buffer, spec.plan or plan_of(spec), None, target)

    def decode_multiply(
        self, buffer: Tensor, spec: PackedSpec[UniformQuantizer], other: Tensor, target: Tensor
    ) -> None:
        """Decode, multiply and write to memory that is dense in the layout's memory order.

        Args:
            buffer: Stored bytes.
            spec: Their spec.
            other: Factor of the layout's dtype, dense in the layout's memory order.
            target: Tensor of the layout's dtype, dense in that order; may be `other`.
        """
        if self.is_lossless:
            flat = (spec.layout.numel,), (1,)
            torch.mul(buffer.view(spec.layout.dtype), other.as_strided(*flat), out=target.as_strided(*flat))
        else:
            passes.dequantize_uniform(buffer, spec.plan or plan_of(spec), other, target)


@functools.lru_cache(maxsize=4096)
def _geometry(quantizer: UniformQuantizer, layout: Layout) -> Geometry:
    """Blocks and groups of a tensor under a quantizer."""
    granularity, n = quantizer.granularity, layout.numel
    bucket_size = quantizer.bucket_size if granularity is Granularity.BUCKET else None
    if bucket_size is not None:
        inner, groups = bucket_size, -(-n // bucket_size)
    elif granularity in (Granularity.BUCKET, Granularity.TENSOR):
        inner, groups = n, 1
    else:
        inner, groups = layout.groups_along(0 if granularity is Granularity.SAMPLE else quantizer.channel_dim)
    return Geometry(
        numel=n,
        bit_width=quantizer.bit_width,
        block_size=block_size_for(bucket_size),
        inner=max(inner, 1),
        groups=groups if n else 0,
        one_run=inner * groups >= n,
    )


def plan_of(spec: PackedSpec[UniformQuantizer]) -> UniformPlan:
    """What the passes need to know of a tensor.

    Args:
        spec: Spec of a `UniformQuantizer` that is not lossless.

    Returns:
        Its plan, which the spec keeps.
    """
    plan: UniformPlan | None = spec.plan
    if plan is None:
        quantizer = spec.quantizer
        geometry, dtypes = quantizer.geometry(spec.layout), (quantizer.scale_dtype, quantizer.minimum_dtype)
        plan = spec.plan = UniformPlan(geometry, *dtypes, *spec.offsets[1:])
    return plan
