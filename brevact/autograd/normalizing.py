"""How the input of a norm is kept: its normalized values x^ = (x - mean) * invstd, packed.

A bucket may lie in several rows or channels whose scales differ by orders of magnitude; the gradient multiplies the
error of an element by its own group's 1/sigma. Normalized values have one scale everywhere. Of the statistics, which
the gradient needs, the inverse deviations are kept beside the codes: it reads x less its means as well as x.
What is known without a loss, or too small to pack, is kept as other ops keep it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from brevact.autograd import storage_report
from brevact.autograd.decoded_last import decoded, is_held
from brevact.autograd.quality import EXACT, Quality
from brevact.autograd.saved import one_object_each
from brevact.autograd.transforms import is_distributed
from brevact.quantizers import (
    Layout,
    PackedActivation,
    PackedSpec,
    PointFunction,
    decode_affine,
    decode_through,
    denormalize,
    is_traced,
    normalize,
    quantize_normalized,
)

#: Input of a norm, or the input less its means, and the means and statistics that belong to it.
WithStatistics = tuple[Tensor, Tensor | None, Tensor]


class Alignment(Hashable, Protocol):
    """How the statistics and the weights of a norm belong to the elements of its input."""

    def align(self, statistic: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Shape one number a group so that it broadcasts over a tensor of this shape."""

    def align_weight(self, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Shape a weight or a bias so that it broadcasts over a tensor of this shape, with as many dimensions."""

    def inverse(self, spread: Tensor) -> Tensor:
        """Return the inverse deviations, in float32 or more, of the numbers that the norm keeps for them."""


class Normalizer(Protocol):
    """What is asked of a norm."""

    @property
    def key(self) -> Hashable | None:
        """Equal for norms that normalize a tensor to the same values; None for those with statistics of their own."""

    @property
    def alignment(self) -> Alignment:
        """How its statistics and weights belong to the elements of its input."""


class NormInput(NamedTuple):
    """The input of a norm that is about to be kept.

    Args:
        norm: the norm.
        mean: one number a group; None for norms without means.
        spread: what the norm keeps of the deviations, one number a group.
        dtype: in which the input is read in backward.
        alone: whether an input that is kept without a loss is kept without its statistics, which somebody else keeps.
    """

    norm: Normalizer
    mean: Tensor | None
    spread: Tensor
    dtype: torch.dtype
    alone: bool = False

    @property
    def key(self) -> Hashable | None:
        """Key under which what is packed may be shared."""
        return None if self.norm.key is None else (self.norm.key, self.dtype)

    @property
    def statistics(self) -> tuple[Tensor, ...]:
        """Mean, if there is one, and spread."""
        return (self.spread,) if self.mean is None else (self.mean, self.spread)

    def aligned(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """Mean and inverse deviations, shaped to broadcast over the input."""
        alignment = self.norm.alignment
        mean = None if self.mean is None else alignment.align(self.mean, x.shape)
        return mean, alignment.align(alignment.inverse(self.spread), x.shape)

    def normalize(self, x: Tensor) -> Tensor:
        """Return the normalized input."""
        return normalize(x, *self.aligned(x))

    def unpacked(self, kept: tuple[tuple[Tensor, ...], Any]) -> tuple[tuple[Tensor, ...], Any]:
        """Keep the statistics beside an input that is kept without a loss, unless somebody else does."""
        tensors, decoder = kept
        if self.alone:
            return kept
        return (*tensors, *self.statistics), _Unpacked(decoder, len(self.statistics))

    def pack(self, x: Tensor, quantizer: Any, seed: int | Tensor) -> tuple[tuple[Tensor, ...], Any]:
        """Keep the input packed; without its means, which are not asked for."""
        packed = quantize_normalized(quantizer, x, *self.aligned(x), seed)
        return (packed.buffer, self.spread), packed_decoder(self.norm.alignment, packed.spec, self.dtype)

    def pack_later(self, x: Tensor, quantizer: Any, seed: int | Tensor) -> tuple[tuple[Tensor, ...], Any]:
        """Keep the input at full precision, to be packed when backward starts."""
        seeds = (seed,) if isinstance(seed, Tensor) else ()
        decoder = _PackedOnBackward(self.norm, quantizer, None if seeds else seed, self.dtype, len(self.statistics))
        return (x, *seeds, *self.statistics), decoder


def output_of(
    alignment: Alignment, kept: tuple[tuple[Tensor, ...], Any], out: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[tuple[Tensor, ...], Any] | None:
    """Keep the output of a norm as an affine function of its normalized input.

    Args:
        alignment: how its weights belong to its elements.
        kept: what keeps its input.
        out: its output.
        weight: its weight.
        bias: its bias.

    Returns:
        What keeps the output; None where the input is not packed.
    """
    tensors, decoder = kept
    if not isinstance(decoder, PackedDecoder | _PackedOnBackward):
        return None
    if not is_traced(out) and decoder.stride(tensors) != out.stride():
        return None  # it would be decoded in another order of memory
    sources = decoder.sources(tensors)
    affine = tuple(as_now(x, x is weight) for x in (weight, bias) if x is not None)
    has = weight is not None, bias is not None
    make = output_decoder if decoder.lasts else OutputDecoder
    return (*sources, *affine), make(alignment, decoder, len(sources), has, out.shape, out.dtype)


def as_now(x: Tensor, is_weight: bool) -> Tensor:
    """Return a weight or a bias as it is now: in a copy, since plain PyTorch allows a bias to change before backward.

    A weight may not, as PyTorch keeps it for backward itself. Where processes share parameters (FSDP), their memory is
    freed between the passes.
    """
    if is_traced(x) or (is_weight and not is_distributed()):
        return x.detach()
    return x.detach().clone()


class OutputDecoder(NamedTuple):
    """Decoder of the output of a norm, x^ * weight + bias; its tensors are what keeps x^, the weight and the bias."""

    alignment: Alignment
    source: PackedDecoder | _PackedOnBackward
    count: int
    has: tuple[bool, bool]
    shape: torch.Size
    dtype: torch.dtype

    @property
    def quality(self) -> Quality:
        return self.source.quality

    @property
    def lasts(self) -> bool:
        return self.source.lasts

    def _read(self, tensors: tuple[Tensor, ...]) -> tuple[PackedActivation, Tensor | None, Tensor | None]:
        packed = self.source.packed(tensors[: self.count])
        affine = list(tensors[self.count :])
        scale, shift = (
            self.alignment.align_weight(affine.pop(0), packed.layout.shape) if there else None for there in self.has
        )
        return packed, scale, shift

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return decoded(self, tensors, self._decode) if self._is_held(tensors) else self._decode(tensors)

    def _decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return decode_affine(*self._read(tensors), self.dtype)

    def _is_held(self, tensors: tuple[Tensor, ...]) -> bool:
        return is_held(self.shape.numel(), tensors[0])

    def decode_through(
        self, tensors: tuple[Tensor, ...], function: PointFunction, grad: Tensor | None = None
    ) -> Tensor:
        if self._is_held(tensors):
            values = function(self.decode(tensors))
            return values if grad is None else grad * values
        packed, scale, shift = self._read(tensors)
        return decode_through(packed, function, scale, shift, self.dtype, grad)

    def multiply(self, tensors: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        return grad * self.decode(tensors)

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        return storage_report.DERIVED, self.shape.numel() * self.dtype.itemsize


class Zeros(NamedTuple):
    """Decoder of zeros, for which nothing is kept."""

    size: torch.Size
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def like(x: Tensor) -> Zeros:
        """Return the decoder of zeros of the sizes of ``x``."""
        return Zeros(x.shape, x.dtype, x.device)

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def multiply(self, tensors: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        return torch.zeros_like(grad)

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        return storage_report.EXACT, self.size.numel() * self.dtype.itemsize


def is_centred(decoder: Any) -> bool:
    """Return whether a decoder gives the input of a norm less its means."""
    return isinstance(decoder, PackedDecoder | _PackedOnBackward)


class _Reading:
    """Decoder of the input of a norm; the last of its tensors are statistics, so many."""

    __slots__ = ("statistics",)
    statistics: int

    def with_statistics(self, tensors: tuple[Tensor, ...]) -> WithStatistics:
        raise NotImplementedError

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return self.with_statistics(tensors)[0]

    def multiply(self, tensors: tuple[Tensor, ...], grad: Tensor) -> Tensor:
        return grad * self.decode(tensors)


class _Unpacked(_Reading):
    """Of an input that is kept without a loss; the tensors are what keeps it, and the statistics."""

    __slots__ = ("_decoder",)

    def __init__(self, decoder: Any, statistics: int) -> None:
        self._decoder, self.statistics = decoder, statistics

    @property
    def quality(self) -> Quality:
        return getattr(self._decoder, "quality", EXACT)

    def with_statistics(self, tensors: tuple[Tensor, ...]) -> WithStatistics:
        mean = tensors[-2] if self.statistics == 2 else None
        return self._decoder.decode(tensors[: -self.statistics]), mean, tensors[-1]

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        return self._decoder.described(tensors[: -self.statistics])


class PackedDecoder(_Reading):
    """Of packed normalized values; the tensors are codes and the spread."""

    __slots__ = ("_alignment", "_dtype", "_spec", "quality")
    lasts = True

    def __init__(self, alignment: Alignment, spec: PackedSpec[Any], dtype: torch.dtype) -> None:
        self._alignment, self._spec, self._dtype, self.statistics = alignment, spec, dtype, 1
        self.quality = Quality(spec.quantizer)

    def stride(self, tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
        """Return the strides of the decoded normalized values."""
        return self._spec.layout.result_stride

    def sources(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tensors that hold the normalized values."""
        return tensors[:1]

    def packed(self, tensors: tuple[Tensor, ...]) -> PackedActivation:
        """Return the normalized values, packed."""
        return PackedActivation(self._spec, tensors[0])

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return _centred(self._alignment, self.packed(tensors), tensors[-1], self._dtype)

    def with_statistics(self, tensors: tuple[Tensor, ...]) -> WithStatistics:
        return self.decode(tensors), torch.zeros_like(tensors[-1]), tensors[-1]

    def normalized(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Return the normalized values."""
        return self.packed(tensors).dequantize()

    def normalized_in_graph(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Return them by one more dimension: a compiler that saw the same op in backward would keep its result."""
        layout = self._spec.layout
        longer = Layout.of_sizes((*layout.shape, 1), (*layout.stride, 1), layout.dtype)
        return PackedActivation(PackedSpec.of(self._spec.quantizer, longer), tensors[0]).dequantize().squeeze(-1)

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        return storage_report.PACKED, self._spec.layout.numel * self._dtype.itemsize


packed_decoder = one_object_each(PackedDecoder)
output_decoder = one_object_each(OutputDecoder)


class _PackedOnBackward(_Reading):
    """Of an input at full precision; the tensors are the input, the seed if it is one, and the statistics."""

    __slots__ = ("_dtype", "_norm", "_quantizer", "_seed")
    lasts = False

    def __init__(self, norm: Normalizer, quantizer: Any, seed: Any, dtype: torch.dtype, statistics: int) -> None:
        self._norm, self._quantizer, self._seed = norm, quantizer, seed
        self._dtype, self.statistics = dtype, statistics

    @property
    def quality(self) -> Quality:
        return Quality(self._quantizer)

    def stride(self, tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
        """Return the strides of the decoded normalized values."""
        return Layout.of(tensors[0]).result_stride

    def sources(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tensors that hold the normalized values."""
        return tensors

    def packed(self, tensors: tuple[Tensor, ...]) -> PackedActivation:
        """Return the normalized values, packed."""
        seed = tensors[1] if self._seed is None else self._seed
        mean = tensors[-2] if self.statistics == 2 else None
        source = NormInput(self._norm, mean, tensors[-1], self._dtype)
        return quantize_normalized(self._quantizer, tensors[0], *source.aligned(tensors[0]), seed)

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return _centred(self._norm.alignment, self.packed(tensors), tensors[-1], self._dtype)

    def with_statistics(self, tensors: tuple[Tensor, ...]) -> WithStatistics:
        return self.decode(tensors), torch.zeros_like(tensors[-1]), tensors[-1]

    def normalized(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """Return the normalized values."""
        return self.packed(tensors).dequantize()

    normalized_in_graph = normalized

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        return storage_report.FULL_PRECISION, tensors[0].nbytes


def _centred(alignment: Alignment, packed: PackedActivation, spread: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the input of a norm less its means."""
    invstd = alignment.align(alignment.inverse(spread), packed.layout.shape)
    return denormalize(packed, None, invstd, dtype)


def normalized_early(kept: tuple[tuple[Tensor, ...], Any]) -> Tensor:
    """Decode in the forward pass the normalized values that are kept for backward, for the caller to overwrite."""
    tensors, decoder = kept
    return (decoder.normalized_in_graph if is_traced(tensors[0]) else decoder.normalized)(tensors)
