"""How the input of a norm is kept: its normalized values x^ = (x - mean) * invstd, packed.

A bucket may lie in several rows or channels whose scales differ by orders of magnitude; the gradient multiplies the
error of an element by its own group's 1/sigma. Normalized values have one scale everywhere. Of the statistics, which
the gradient needs, the inverse deviations are kept beside the codes: it reads x less its means as well as x.
An input that is known without a loss, or too small to pack, is saved as by other ops.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from brevact.autograd.norm_decoders import (
    Alignment,
    Centred,
    OutputDecoder,
    PackedOnBackward,
    Unpacked,
    aligned,
    output_decoder,
    packed_decoder,
)
from brevact.autograd.saved import Saved
from brevact.autograd.transforms import is_distributed
from brevact.quantizers import is_traced, normalize, quantize_normalized


class Normalizer(Protocol):
    """A norm as its decoders see it."""

    @property
    def key(self) -> Hashable | None:
        """Equal for norms that normalize a tensor to the same values; None for those with statistics of their own."""

    @property
    def alignment(self) -> Alignment:
        """How its statistics and weights belong to the elements of its input."""


class NormInput(NamedTuple):
    """The input of a norm that is about to be kept, with one mean and one spread (the norm's own form of
    deviations) a group.

    The mean is None for norms without means, and the dtype is that in which the input is read in backward. Where it is
    ``alone``, and kept without a loss, it is kept without its statistics, which somebody else keeps.
    """

    norm: Normalizer
    mean: Tensor | None
    spread: Tensor
    dtype: torch.dtype
    alone: bool = False

    @property
    def key(self) -> Hashable | None:
        """Key under which ops may share the packed values."""
        key = self.norm.key
        return None if key is None else (key, self.dtype)

    @property
    def statistics(self) -> tuple[Tensor, ...]:
        """Mean, if there is one, and spread."""
        return (self.spread,) if self.mean is None else (self.mean, self.spread)

    def normalize(self, x: Tensor) -> Tensor:
        """Return the normalized input."""
        return normalize(x, *aligned(self.norm.alignment, self.mean, self.spread, x.shape))

    def unpacked(self, kept: Saved) -> Saved:
        """Keep the statistics beside an input that is kept without a loss, unless somebody else does."""
        tensors, decoder = kept
        if self.alone:
            return kept
        return (*tensors, *self.statistics), Unpacked(decoder, len(self.statistics))

    def pack(self, x: Tensor, quantizer: Any, seed: int | Tensor) -> Saved:
        """Keep the input packed; without its means, which are not asked for."""
        packed = quantize_normalized(quantizer, x, *aligned(self.norm.alignment, self.mean, self.spread, x.shape), seed)
        return (packed.buffer, self.spread), packed_decoder(self.norm.alignment, packed.spec, self.dtype)

    def pack_later(self, x: Tensor, quantizer: Any, seed: int | Tensor) -> Saved:
        """Keep the input at full precision, to be packed when backward starts."""
        seeds = (seed,) if isinstance(seed, Tensor) else ()
        decoder = PackedOnBackward(
            self.norm.alignment, quantizer, None if seeds else seed, self.dtype, len(self.statistics)
        )
        return (x, *seeds, *self.statistics), decoder


def output_of(
    alignment: Alignment, kept: Saved, out: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Saved | None:
    """Keep the output of a norm as an affine function of its normalized input; None where that is not packed."""
    tensors, decoder = kept
    if not isinstance(decoder, Centred):
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
    return x.detach().clone() if torch.is_grad_enabled() else x.clone()  # a call less in a Function
