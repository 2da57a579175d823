"""Decoders of norm inputs and outputs: packed normalized values, and affine functions of them.

A norm's input is saved as packed normalized values x^ = (x - mean) * invstd. A bucket may span several rows or channels
whose scales differ by orders of magnitude; the gradient multiplies an element's error by its own group's 1/sigma.
Normalized values have one scale everywhere. Of the statistics that the gradient needs, only the spreads are saved
beside the codes: the gradient can read x minus its means in place of x. An input that is known losslessly, or too small
to pack, is saved as by other ops.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from brevact.autograd.deriving.cache import decoded, may_be_held
from brevact.autograd.region.settings import SaveMode
from brevact.autograd.saving import storage_report
from brevact.autograd.saving.saved import Decoder, PassesOn, Quality, Region, Saved, Weight, one_object_each
from brevact.autograd.saving.storages import Tensors
from brevact.quantizers import (
    Layout,
    PackedActivation,
    PackedSpec,
    PointFunction,
    decode_affine,
    decode_in_one_pass,
    decode_through,
    denormalize,
    normalize,
    quantize_normalized,
)
from brevact.quantizers.normalizing import NormalizedPlan, has_uniform_codes, plan_of_decoding, reciprocal_of
from brevact.quantizers.point_functions import decode_through_plan

if TYPE_CHECKING:
    from brevact.autograd.ops.norm_formulas import Norm, RowScale


def along_channels(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reshape (C,) or (N * C,) numbers to broadcast over an (N, C, ...) tensor of this shape."""
    samples = 1 if x.numel() == shape[1] else shape[0]
    return x.reshape(samples, shape[1], *[1] * (len(shape) - 2))


class Alignment(NamedTuple):
    """How a norm's statistics and weights map to the elements of its input: one number per channel (and sample).

    ``eps`` is added to saved variances; None for deviations. ``groups``: a sample's channels have one mean and one
    deviation per group. ``of_last_dims``: statistics broadcast as they are, and weights have the last dimensions.
    """

    eps: float | None = None
    groups: int = 0
    of_last_dims: bool = False

    def align(self, statistic: Tensor, shape: tuple[int, ...]) -> Tensor:
        if self.of_last_dims:
            return statistic
        if self.groups:
            n, c = shape[:2]
            statistic = statistic[:, :, None].expand(n, self.groups, c // self.groups).reshape(n * c)
        return along_channels(statistic, shape)

    def align_weight(self, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        if self.of_last_dims:
            return weight.view(*[1] * (len(shape) - weight.dim()), *weight.shape)
        return along_channels(weight, shape)

    def inverse(self, spread: Tensor) -> Tensor:
        """Return the inverse deviations, in float32 or wider, from the spreads that the norm saves."""
        if spread.dtype is not torch.float32:
            spread = spread.to(torch.promote_types(spread.dtype, torch.float32))
        return spread if self.eps is None else torch.rsqrt(spread + self.eps)


#: A norm's input, or input minus means, with its means and spreads.
WithStatistics = tuple[Tensor, Tensor | None, Tensor]


def aligned(
    alignment: Alignment, mean: Tensor | None, spread: Tensor, shape: tuple[int, ...]
) -> tuple[Tensor | None, Tensor]:
    mean = None if mean is None else alignment.align(mean, shape)
    return mean, alignment.align(alignment.inverse(spread), shape)


@dataclass(frozen=True, slots=True)
class Unpacked(PassesOn):
    statistics: int = field()  # otherwise the base class's value would be the default

    def decode(self, tensors: Tensors) -> Tensor:
        return self.decoder.decode(tensors[: -self.statistics])

    def without_statistics(self, tensors: Tensors) -> Saved:
        return tensors[: -self.statistics], self.decoder

    def with_statistics(self, tensors: Tensors) -> WithStatistics:
        mean = tensors[-2] if self.statistics == 2 else None
        return self.decode(tensors), mean, tensors[-1]

    def described(self, tensors: Tensors) -> tuple[str, int]:
        return self.decoder.described(tensors[: -self.statistics])


class Centred(Decoder):
    """Decoder of a norm's input minus its means, from packed normalized values; its last tensor is the spread."""

    __slots__ = ("_alignment", "_dtype", "_plans", "quality", "spec")
    quality: Quality
    lasts = True
    statistics = 1

    def __init__(self, alignment: Alignment, spec: PackedSpec[Any], dtype: torch.dtype) -> None:
        self._alignment, self.spec, self._dtype = alignment, spec, dtype
        self.quality = Quality(spec.quantizer)
        self._plans: dict[torch.Size, NormalizedPlan | None] = {}  # by the sizes of deviations

    def decode(self, tensors: Tensors) -> Tensor:
        packed, alignment = self.packed(tensors), self._alignment
        spec, buffer = packed.spec, packed.buffer
        invstd = alignment.align(alignment.inverse(tensors[-1]), spec.layout.shape)
        sizes = invstd.shape
        if sizes not in self._plans:
            self._plans[sizes] = plan_of_decoding(spec, sizes, self._dtype)
        plan = self._plans[sizes]
        if plan is None or invstd.dtype is torch.float64 or type(buffer) is not Tensor or not spec.accepts(buffer):
            return denormalize(packed, None, invstd, self._dtype)
        return plan.decode_affine(buffer, reciprocal_of(invstd), None)

    def with_statistics(self, tensors: Tensors) -> WithStatistics:
        return self.decode(tensors), torch.zeros_like(tensors[-1]), tensors[-1]

    def sources(self, tensors: Tensors) -> Tensors:
        return tensors[:1]

    def packed(self, tensors: Tensors) -> PackedActivation:
        return PackedActivation(self.spec, tensors[0])

    def described(self, tensors: Tensors) -> tuple[str, int]:
        return storage_report.PACKED, self.spec.layout.numel * self._dtype.itemsize


class _PackedOnBackward(Centred):
    """Decoder of a full-precision input; its tensors are the input, a seed if it is on a device, and the statistics."""

    __slots__ = ("_seed", "statistics")
    lasts = False

    def __init__(self, alignment: Alignment, spec: PackedSpec[Any], dtype: torch.dtype, seed: Any, count: int) -> None:
        super().__init__(alignment, spec, dtype)
        self._seed, self.statistics = seed, count

    def sources(self, tensors: Tensors) -> Tensors:
        return tensors

    def packed(self, tensors: Tensors) -> PackedActivation:
        seed = tensors[1] if self._seed is None else self._seed
        mean = tensors[-2] if self.statistics == 2 else None
        statistics = aligned(self._alignment, mean, tensors[-1], tensors[0].shape)
        return quantize_normalized(self.spec.quantizer, tensors[0], *statistics, seed)

    def described(self, tensors: Tensors) -> tuple[str, int]:
        return storage_report.FULL_PRECISION, tensors[0].numel() * tensors[0].itemsize


@dataclass(eq=False, slots=True)
class OutputDecoder(Decoder):
    """Decoder of a norm's output, x^ * weight + bias; its tensors are those of x^, the weight and the bias.

    ``source`` decodes x^ from the first ``count`` tensors; ``has`` says whether there are a weight and a bias. If a
    plan packed x^, and there is a weight, the plan decodes, in fewer calls.
    """

    alignment: Alignment
    source: Centred
    count: int
    has: tuple[bool, bool]
    shape: torch.Size
    dtype: torch.dtype
    plan: NormalizedPlan | None
    quality: Quality = field(init=False)
    lasts: bool = field(init=False)
    decodes_through = True
    how = storage_report.DERIVED

    def __post_init__(self) -> None:
        self.quality, self.lasts = self.source.quality, self.source.lasts

    def _read(self, tensors: Tensors) -> tuple[PackedActivation, Tensor | None, Tensor | None]:
        packed, (has_weight, has_bias) = self.source.packed(tensors[: self.count]), self.has
        shape = packed.spec.layout.shape
        scale = self.alignment.align_weight(tensors[self.count], shape) if has_weight else None
        shift = self.alignment.align_weight(tensors[-1], shape) if has_bias else None
        return packed, scale, shift

    def decode(self, tensors: Tensors) -> Tensor:
        return decoded(self, tensors, self._decode) if self.is_read_again(tensors) else self._decode(tensors)

    def decode_as(self, tensors: Tensors, dtype: torch.dtype) -> Tensor:
        if dtype is torch.bfloat16 and self.dtype is torch.float32 and not self.is_read_again(tensors):
            return decode_affine(*self._read(tensors), dtype)
        return self.decode(tensors).to(dtype)

    def _decode(self, tensors: Tensors) -> Tensor:
        if self.plan is None:
            return decode_affine(*self._read(tensors), self.dtype)
        return self.plan.decode_affine(tensors[0], tensors[1], tensors[2] if self.has[1] else None)

    def is_read_again(self, tensors: Tensors) -> bool:
        return may_be_held(self.shape.numel(), tensors[0])

    @property
    def is_affine(self) -> bool:
        """Whether packed values are multiplied by a weight, as :meth:`decode_in_one_pass` does."""
        return self.has[0] and self.source.lasts

    def decode_in_one_pass(
        self, tensors: Tensors, addend: Tensor | None, mask: Tensor | None, *, overwrites: bool
    ) -> Tensor | None:
        """Return (output + addend) * mask (packed, in the output's order), or None; ``overwrites``: into ``addend``."""
        if self.plan is not None and (addend is None or self.plan.matches(addend)):
            shift = tensors[2] if self.has[1] else None
            return self.plan.decode_affine(tensors[0], tensors[1], shift, addend, mask, overwrites=overwrites)
        return decode_in_one_pass(*self._read(tensors), self.dtype, addend, mask, overwrites=overwrites)

    def decode_through(self, tensors: Tensors, function: PointFunction, grad: Tensor | None = None) -> Tensor:
        if self.is_read_again(tensors):
            values = function(decoded(self, tensors, self._decode))
            return values if grad is None else grad * values
        if self.plan is not None:
            shift = tensors[2] if self.has[1] else None
            return decode_through_plan(self.plan, tensors[0], function, tensors[1], shift, grad)
        packed, scale, shift = self._read(tensors)
        return decode_through(packed, function, scale, shift, self.dtype, grad)


packed_decoder = one_object_each(Centred)
output_decoder = one_object_each(OutputDecoder)


#: Least elements of a row with a bucket of its own: metadata add 2 % to its bytes at 4 bits.
_LEAST_ROW = 256


@functools.lru_cache(maxsize=64)
def _halved(quantizer: Any) -> Any:
    return replace(quantizer, bucket_size=quantizer.bucket_size // 2)


class NormInput(NamedTuple):
    """A norm's input to save, with one mean and one spread (the norm's own form of deviation) per group.

    ``mean`` is None for norms without means; ``dtype`` is that in which backward reads the input. If ``alone``, and
    saved losslessly, the input is saved without its statistics, which somebody else saves.
    """

    norm: Norm | RowScale
    mean: Tensor | None
    spread: Tensor
    dtype: torch.dtype
    alone: bool = False

    @property
    def key(self) -> Hashable | None:
        key = self.norm.key
        return None if key is None else (key, self.dtype)

    @property
    def statistics(self) -> Tensors:
        return (self.spread,) if self.mean is None else (self.mean, self.spread)

    def normalize(self, x: Tensor) -> Tensor:
        return normalize(x, *aligned(self.norm.alignment, self.mean, self.spread, x.shape))

    def unpacked(self, kept: Saved) -> Saved:
        tensors, decoder = kept
        if self.alone:
            return kept
        return (*tensors, *self.statistics), Unpacked(decoder, len(self.statistics))

    def pack(self, x: Tensor, quantizer: Any, seed: int | Tensor, save_mode: SaveMode) -> Saved:
        """Pack the input, now or in backward; its means are not saved with codes, since backward does not read them."""
        quantizer = self._of_rows(quantizer, x)
        if save_mode is not SaveMode.SAVE_QUANTIZED:
            seeds, count = (seed,) if isinstance(seed, Tensor) else (), len(self.statistics)
            spec, own_seed = PackedSpec.of(quantizer, Layout.of(x)), None if seeds else seed
            later = _PackedOnBackward(self.norm.alignment, spec, self.dtype, own_seed, count)
            return (x, *seeds, *self.statistics), later
        packed = quantize_normalized(quantizer, x, *aligned(self.norm.alignment, self.mean, self.spread, x.shape), seed)
        return (packed.buffer, self.spread), packed_decoder(self.norm.alignment, packed.spec, self.dtype)

    def _of_rows(self, quantizer: Any, x: Tensor) -> Any:
        """Return the quantizer for ``x``: a bucket that would hold two rows takes one.

        A channel of massive activations makes the others' scale differ by rows, and has two outliers in two rows.
        """
        if not (self.norm.alignment.of_last_dims and has_uniform_codes(quantizer)):
            return quantizer
        size = quantizer.bucket_size or 0
        is_of_two = size >= 2 * _LEAST_ROW and 2 * x.numel() == size * self.spread.numel()
        return _halved(quantizer) if is_of_two else quantizer


def output_of(region: Region, norm: Any, kept: Saved, out: Tensor, weight: Weight, bias: Weight) -> Saved | None:
    tensors, decoder = kept
    if not isinstance(decoder, Centred):
        return None
    if decoder.spec.layout.result_stride != out.stride():
        return None  # it would be decoded in another memory order
    sources = decoder.sources(tensors)
    affine = tuple([as_now(region, x, x is weight) for x in (weight, bias) if x is not None])
    has = weight is not None, bias is not None
    make = output_decoder if decoder.lasts else OutputDecoder
    plan = norm.packing if weight is not None and decoder.lasts else None
    return (*sources, *affine), make(norm.alignment, decoder, len(sources), has, out.shape, out.dtype, plan)


def as_now(region: Region, x: Tensor, is_weight: bool) -> Tensor:
    """Copy a bias, which may change before backward; weights only in distributed training: FSDP frees their memory."""
    if is_weight and not region.is_distributed:
        return x.detach()
    return x.detach().clone() if torch.is_grad_enabled() else x.clone()  # one call less in a Function
