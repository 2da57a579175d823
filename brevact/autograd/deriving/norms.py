"""Decoders of norm inputs and outputs: packed normalized values, and affine functions of them.

A norm's input is saved as packed normalized values x^ = (x - mean) * invstd. A bucket may span several rows or channels
whose scales differ by orders of magnitude; the gradient multiplies an element's error by its own group's 1/sigma.
Normalized values have one scale everywhere. Of the statistics that the gradient needs, only the spreads are saved
beside the codes: the gradient can read x minus its means in place of x. An input that is known losslessly, or too small
to pack, is saved as by other ops.

Outputs are affine functions of the normalized values, or of an input that backward recomputes, with the exact
statistics. For a recomputed input and a norm with one mean and deviation per channel, the forward pass computes the
shifts, and functions of the output are applied to a few samples at a time, so that the whole output is never in memory.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from brevact.autograd.deriving.cache import cache, decoded, may_be_held
from brevact.autograd.deriving.layers import HeldOutput, as_now, is_output
from brevact.autograd.region.settings import SaveMode
from brevact.autograd.saving import storage_report
from brevact.autograd.saving.saved import (
    Decoder,
    Expression,
    OfOne,
    Quality,
    Region,
    Saved,
    Weight,
    express,
    one_object_each,
    with_strides,
)
from brevact.autograd.saving.storages import LONE, Tensors
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


@dataclass(eq=False, slots=True)
class Unpacked(OfOne):
    """Decoder of a norm's input beside its statistics."""

    statistics: int = field()  # otherwise the base class's value would be the default

    def decode(self, tensors: Tensors) -> Tensor:
        kept, decoder = self.source(tensors)
        return decoder.decode(kept)

    def with_statistics(self, tensors: Tensors) -> WithStatistics:
        mean = tensors[-2] if self.statistics == 2 else None
        return self.decode(tensors), mean, tensors[-1]


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
class NormOutput(Expression):
    """Decoder of a norm's output, x^ * weight + bias; its source is x^, the weight and the bias follow.

    ``has`` says whether there are a weight and a bias. If a plan packed x^, and there is a weight, the plan decodes, in
    fewer calls.
    """

    alignment: Alignment
    has: tuple[bool, bool]
    shape: torch.Size
    dtype: torch.dtype
    plan: NormalizedPlan | None
    decodes_through = True
    how = storage_report.DERIVED

    @property
    def of_input(self) -> Centred:
        found = self.sources[0][0]
        assert isinstance(found, Centred)
        return found

    def _read(self, tensors: Tensors) -> tuple[PackedActivation, Tensor | None, Tensor | None]:
        count, (has_weight, has_bias) = self.sources[0][1], self.has
        packed = self.of_input.packed(tensors[:count])
        shape = packed.spec.layout.shape
        scale = self.alignment.align_weight(tensors[count], shape) if has_weight else None
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
        return self.has[0] and self.lasts

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
            return Decoder.decode_through(self, tensors, function, grad)
        if self.plan is not None:
            shift = tensors[2] if self.has[1] else None
            return decode_through_plan(self.plan, tensors[0], function, tensors[1], shift, grad)
        packed, scale, shift = self._read(tensors)
        return decode_through(packed, function, scale, shift, self.dtype, grad)


packed_decoder = one_object_each(Centred)


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
        if self.alone:
            return kept
        return express(Unpacked, (kept,), len(self.statistics), others=self.statistics)

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
    plan = norm.packing if weight is not None and decoder.lasts else None
    return express(*(NormOutput, ((sources, decoder),), norm.alignment, has, out.shape, out.dtype, plan), others=affine)


#: Elements to which a norm is applied at once: they stay in a CPU cache. A GPU takes all elements.
_NUMEL_IN_CACHE = 1 << 16


@dataclass(eq=False, slots=True)
class _OfRecomputed(OfOne):
    """Decoder of a norm's output; its source is the recomputed input; ``has``: which other tensors there are."""

    alignment: Alignment
    has: tuple[bool, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    allows_double_backward = False
    how = storage_report.DERIVED

    def input_of(self, tensors: Tensors) -> Saved:
        return self.source(tensors)

    def is_read_again(self, tensors: Tensors) -> bool:
        return False

    def _finished(self, out: Tensor) -> Tensor:
        return with_strides(out.to(self.dtype), self.stride)


class NormOutputAgain(_OfRecomputed):
    """Its other tensors are the spread, and the mean, the weight and the bias if there are any."""

    __slots__ = ()

    @torch.no_grad()
    def decode(self, tensors: Tensors) -> Tensor:
        kept, decoder = self.source(tensors)
        x, (spread, *others) = decoder.decode(kept), tensors[len(kept) :]
        given = iter(others)
        mean, weight, bias = (next(given) if there else None for there in self.has)
        shift, scale = aligned(self.alignment, mean, spread, self.shape)
        weight, bias = (y if y is None else self.alignment.align_weight(y, self.shape) for y in (weight, bias))
        if weight is not None and weight.shape != scale.shape:  # no factor that is as large as the input
            out = (x * scale if shift is None else (x - shift).mul_(scale)).mul_(weight)
            return self._finished(out if bias is None else out.add_(bias))
        scale = scale if weight is None else scale * weight
        if shift is not None:
            bias = -shift * scale if bias is None else bias - shift * scale
        return self._finished(x * scale if bias is None else torch.addcmul(bias, x.to(scale.dtype), scale))


class ChannelsAgain(_OfRecomputed):
    """Decoder of a channel norm's output; its other tensors are the spread, the shifts, and perhaps the weight."""

    __slots__ = ()
    decodes_through = True

    def decode(self, tensors: Tensors) -> Tensor:
        return decoded(self, tensors, self._decode) if self.is_read_again(tensors) else self._decode(tensors)

    def _decode(self, tensors: Tensors) -> Tensor:
        x, scale, shift = self._read(tensors)
        is_owned = isinstance(self.sources[0][0], HeldOutput) and not cache.holds(tensors[0])
        is_owned = is_owned and sys.getrefcount(x) <= LONE  # no other thread has taken the output since
        if is_owned and x.is_cpu and x.dtype is self.dtype is scale.dtype and x.stride() == self.stride:
            for rows in x.split(max(_NUMEL_IN_CACHE // math.prod(self.shape[1:]), 1)):
                rows.copy_(_affine(rows, scale, shift))
            return x
        return self._finished(_affine(x, scale, shift))

    def is_read_again(self, tensors: Tensors) -> bool:
        return may_be_held(math.prod(self.shape), tensors[0])

    def _read(self, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        kept, decoder = self.source(tensors)
        spread, shift, *weight = tensors[len(kept) :]
        with torch.no_grad():
            scale = self.alignment.inverse(spread)
            return decoder.decode(kept), scale * weight[0] if weight else scale, shift

    def decode_through(self, tensors: Tensors, function: PointFunction, grad: Tensor | None = None) -> Tensor:
        if self.is_read_again(tensors):
            return Decoder.decode_through(self, tensors, function, grad)
        x, scale, shift = self._read(tensors)
        samples, size = self.shape[0], math.prod(self.shape[1:])
        step = samples if x.is_cuda else max(_NUMEL_IN_CACHE // size, 1)
        if step >= samples or x.stride() != self.stride or x.dtype is not self.dtype:
            values = function(self._finished(_affine(x, scale, shift)))
            return values if grad is None else grad * values
        other = grad if grad is not None and grad.stride() == self.stride and grad.dtype is self.dtype else None
        out = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=x.device)
        for start in range(0, samples, step):
            rows = slice(start, start + step)
            values = function(_affine(x[rows], scale, shift))
            if other is None:
                out[rows] = values
            else:
                torch.mul(other[rows], values, out=out[rows])
        return out if grad is None or other is not None else grad * out


def _affine(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x * scale + shift, by batch norm's eval kernel: a quarter of the time of ``addcmul``."""
    mean, var = _of_none(scale.numel(), scale.dtype, scale.device)
    return torch.batch_norm(x, scale, shift, mean, var, False, 0.0, 0.0, False)


@functools.lru_cache
def _of_none(channels: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(channels, dtype=dtype, device=device), torch.ones(channels, dtype=dtype, device=device)


def recomputed_output(
    region: Region, norm: NormInput, kept: Saved, out: Tensor, weight: Weight, bias: Weight
) -> Saved | None:
    if isinstance(kept[1], Unpacked):
        kept = kept[1].source(kept[0])
    if not is_output(kept[1]):
        return None
    alignment, rest = norm.norm.alignment, (tuple(out.shape), out.stride(), out.dtype)
    if norm.mean is not None and norm.mean.shape == norm.spread.shape == out.shape[1:2] and out.dim() > 2:
        with torch.no_grad():
            scale = alignment.inverse(norm.spread)
            scale = scale if weight is None else scale * weight
            shift = -norm.mean * scale if bias is None else bias - norm.mean * scale
        others = norm.spread, shift, *(() if weight is None else (as_now(region, weight, True),))
        return express(ChannelsAgain, (kept,), alignment, (weight is not None,), *rest, others=others)
    given = norm.mean, *(y if y is None else as_now(region, y, y is weight) for y in (weight, bias))
    has, others = tuple(y is not None for y in given), (norm.spread, *(y for y in given if y is not None))
    return express(NormOutputAgain, (kept,), alignment, has, *rest, others=others)
