"""Save a norm's input as packed normalized values x^ = (x - mean) * invstd.

A bucket may span several rows or channels whose scales differ by orders of magnitude; the gradient multiplies an
element's error by its own group's 1/sigma. Normalized values have one scale everywhere. Of the statistics that the
gradient needs, only the spreads are saved beside the codes: the gradient can read x minus its means in place of x.
An input that is known losslessly, or too small to pack, is saved as by other ops.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from brevact.autograd.norm_decoders import (
    Centred,
    OutputDecoder,
    PackedOnBackward,
    Unpacked,
    aligned,
    output_decoder,
    packed_decoder,
)
from brevact.autograd.saved import Keeper, Saved
from brevact.quantizers import normalize, quantize_normalized

if TYPE_CHECKING:
    from brevact.autograd.ops.norm.formulas import Norm
    from brevact.autograd.ops.norm.written_out import RowScale


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
        """Key under which ops may share the packed values."""
        key = self.norm.key
        return None if key is None else (key, self.dtype)

    @property
    def statistics(self) -> tuple[Tensor, ...]:
        return (self.spread,) if self.mean is None else (self.mean, self.spread)

    def normalize(self, x: Tensor) -> Tensor:
        return normalize(x, *aligned(self.norm.alignment, self.mean, self.spread, x.shape))

    def unpacked(self, kept: Saved) -> Saved:
        tensors, decoder = kept
        if self.alone:
            return kept
        return (*tensors, *self.statistics), Unpacked(decoder, len(self.statistics))

    def pack(self, x: Tensor, quantizer: Any, seed: int | Tensor) -> Saved:
        """Pack the input; its means are not saved, since backward does not read them."""
        packed = quantize_normalized(quantizer, x, *aligned(self.norm.alignment, self.mean, self.spread, x.shape), seed)
        return (packed.buffer, self.spread), packed_decoder(self.norm.alignment, packed.spec, self.dtype)

    def pack_later(self, x: Tensor, quantizer: Any, seed: int | Tensor) -> Saved:
        seeds = (seed,) if isinstance(seed, Tensor) else ()
        decoder = PackedOnBackward(
            self.norm.alignment, quantizer, None if seeds else seed, self.dtype, len(self.statistics)
        )
        return (x, *seeds, *self.statistics), decoder


def output_of(
    region: Keeper, norm: Any, kept: Saved, out: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Saved | None:
    """Return a norm's output as an affine function of its normalized input; None if that is not packed."""
    tensors, decoder = kept
    if not isinstance(decoder, Centred):
        return None
    if decoder.stride(tensors) != out.stride():
        return None  # it would be decoded in another memory order
    sources = decoder.sources(tensors)
    affine = tuple([as_now(region, x, x is weight) for x in (weight, bias) if x is not None])
    has = weight is not None, bias is not None
    make = output_decoder if decoder.lasts else OutputDecoder
    plan = norm.packing if weight is not None and decoder.lasts else None
    return (*sources, *affine), make(norm.alignment, decoder, len(sources), has, out.shape, out.dtype, plan)


def as_now(region: Keeper, x: Tensor, is_weight: bool) -> Tensor:
    """Copy a bias, which may change before backward; weights only in distributed training: FSDP frees their memory."""
    if is_weight and not region.is_distributed:
        return x.detach()
    return x.detach().clone() if torch.is_grad_enabled() else x.clone()  # one call less in a Function
