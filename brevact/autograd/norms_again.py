"""Outputs of norms whose input is computed again in backward: affine functions of it, with the exact statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from brevact.autograd import storage_report
from brevact.autograd.layers_again import is_output
from brevact.autograd.norm_decoders import Alignment, Unpacked, aligned
from brevact.autograd.normalizing import NormInput, as_now
from brevact.autograd.quality import Quality
from brevact.autograd.saved import Decoder, Saved, one_object_each


@dataclass(frozen=True, eq=False, slots=True)
class NormOutputAgain(Decoder):
    """Decoder of the output of a norm; its tensors are those of the input, the inverse deviations, and others it has.

    Args:
        source: decoder of the input, and the number of its tensors.
        alignment: of the statistics, the weight and the bias.
        has: whether there are means, a weight and a bias.
        shape: of the output.
        stride: of the output.
        dtype: of the output.
    """

    source: tuple[Decoder, int]
    alignment: Alignment
    has: tuple[bool, bool, bool]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def quality(self) -> Quality:
        return self.source[0].quality

    @property
    def lasts(self) -> bool:
        return self.source[0].lasts

    @property
    def depth(self) -> int:
        return self.source[0].depth

    def input_of(self, tensors: tuple[Tensor, ...]) -> Saved:
        """Return what keeps the input."""
        decoder, count = self.source
        return tensors[:count], decoder

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        kept, decoder = self.input_of(tensors)
        spread, *others = tensors[len(kept) :]
        with torch.no_grad():
            out = self._affine(decoder.decode(kept), spread, others).to(self.dtype)
        if out.stride() == self.stride:
            return out
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=out.device).copy_(out)

    def _affine(self, x: Tensor, spread: Tensor, others: list[Tensor]) -> Tensor:
        given = iter(others)
        mean, weight, bias = (next(given) if there else None for there in self.has)
        shift, scale = aligned(self.alignment, mean, spread, self.shape)
        weight, bias = (y if y is None else self.alignment.align_weight(y, self.shape) for y in (weight, bias))
        if weight is not None and weight.shape != scale.shape:  # no factor that is as large as the input
            out = (x * scale if shift is None else (x - shift).mul_(scale)).mul_(weight)
            return out if bias is None else out.add_(bias)
        scale = scale if weight is None else scale * weight
        if shift is not None:
            bias = -shift * scale if bias is None else bias - shift * scale
        if bias is None:
            return x * scale
        if scale.numel() == self.shape[1] == scale.shape[1] and len(self.shape) > 2:
            return _by_channels(x, scale.flatten(), bias.flatten())
        return torch.addcmul(bias, x.to(scale.dtype), scale)

    def is_read_again(self, tensors: tuple[Tensor, ...]) -> bool:
        return False

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        return storage_report.DERIVED, math.prod(self.shape) * self.dtype.itemsize


def _by_channels(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """x * scale + bias of maps, by the kernel of batch norm in eval mode: a quarter of the time of ``addcmul``."""
    return torch.batch_norm(x, scale, bias, torch.zeros_like(scale), torch.ones_like(scale), False, 0.0, 0.0, False)


_output = one_object_each(NormOutputAgain)


def output_again(norm: NormInput, kept: Saved, out: Tensor, weight: Tensor | None, bias: Tensor | None) -> Saved | None:
    """Keep the output of a norm as a function of its input, which is computed again; None where that is not."""
    tensors, decoder = kept
    if isinstance(decoder, Unpacked):
        tensors, decoder = decoder.without_statistics(tensors)
    if not is_output(decoder):
        return None
    others = tuple(
        y if y is None else y if y is norm.mean else as_now(y, y is weight) for y in (norm.mean, weight, bias)
    )
    make = _output if decoder.lasts else NormOutputAgain
    has = others[0] is not None, others[1] is not None, others[2] is not None
    result = make((decoder, len(tensors)), norm.norm.alignment, has, tuple(out.shape), out.stride(), out.dtype)
    return (*tensors, norm.spread, *(y for y in others if y is not None)), result
