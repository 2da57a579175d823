"""Outputs of norms whose input is recomputed in backward: affine functions of it, with the exact statistics.

For a norm with one mean and deviation per channel, the forward pass computes the shifts, and functions of the output
are applied to a few samples at a time, so that the whole output is never in memory.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from brevact.autograd import storage_report
from brevact.autograd.held_outputs import HeldOutput, decoded, is_held, may_be_held
from brevact.autograd.layer_recompute import is_output
from brevact.autograd.norm_decoders import Alignment, Unpacked, aligned
from brevact.autograd.normalizing import NormInput, as_now
from brevact.autograd.saved import Keeper, PassesOn, Saved, one_object_each
from brevact.autograd.storages import LONE
from brevact.autograd.strides import with_strides
from brevact.quantizers import PointFunction

#: Elements to which a norm is applied at once: they stay in a CPU cache. A GPU takes all elements.
_NUMEL_IN_CACHE = 1 << 16


@dataclass(frozen=True, slots=True)
class _NormOutput(PassesOn):
    """Decoder of a norm's output; ``decoder`` decodes the first ``count`` tensors; ``has``: which others there are."""

    count: int
    alignment: Alignment
    has: tuple[bool, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    allows_double_backward = False

    def input_of(self, tensors: tuple[Tensor, ...]) -> Saved:
        return tensors[: self.count], self.decoder

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        return storage_report.DERIVED, math.prod(self.shape) * self.dtype.itemsize

    def is_read_again(self, tensors: tuple[Tensor, ...]) -> bool:
        return False

    def _finished(self, out: Tensor) -> Tensor:
        return with_strides(out.to(self.dtype), self.stride)


class NormOutputAgain(_NormOutput):
    """Its other tensors are the spread, and the mean, the weight and the bias if there are any."""

    __slots__ = ()

    @torch.no_grad()
    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        x, given = self.decoder.decode(tensors[: self.count]), iter(tensors[self.count + 1 :])
        mean, weight, bias = (next(given) if there else None for there in self.has)
        shift, scale = aligned(self.alignment, mean, tensors[self.count], self.shape)
        weight, bias = (y if y is None else self.alignment.align_weight(y, self.shape) for y in (weight, bias))
        if weight is not None and weight.shape != scale.shape:  # no factor that is as large as the input
            out = (x * scale if shift is None else (x - shift).mul_(scale)).mul_(weight)
            return self._finished(out if bias is None else out.add_(bias))
        scale = scale if weight is None else scale * weight
        if shift is not None:
            bias = -shift * scale if bias is None else bias - shift * scale
        return self._finished(x * scale if bias is None else torch.addcmul(bias, x.to(scale.dtype), scale))


class ChannelsAgain(_NormOutput):
    """Decoder of a channel norm's output; its other tensors are the spread, the shifts, and perhaps the weight."""

    __slots__ = ()

    @property
    def decodes_through(self) -> bool:
        return True

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        return decoded(self, tensors, self._decode) if self.is_read_again(tensors) else self._decode(tensors)

    def _decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        x, scale, shift = self._read(tensors)
        is_owned = isinstance(self.decoder, HeldOutput) and not is_held(tensors[0])
        is_owned = is_owned and sys.getrefcount(x) <= LONE  # no other thread has taken the output since
        if is_owned and x.is_cpu and x.dtype is self.dtype is scale.dtype and x.stride() == self.stride:
            for rows in x.split(max(_NUMEL_IN_CACHE // math.prod(self.shape[1:]), 1)):
                rows.copy_(_affine(rows, scale, shift))
            return x
        return self._finished(_affine(x, scale, shift))

    def is_read_again(self, tensors: tuple[Tensor, ...]) -> bool:
        return may_be_held(math.prod(self.shape), tensors[0])

    def _read(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        spread, shift, *weight = tensors[self.count :]
        with torch.no_grad():
            scale = self.alignment.inverse(spread)
            return self.decoder.decode(tensors[: self.count]), scale * weight[0] if weight else scale, shift

    def decode_through(
        self, tensors: tuple[Tensor, ...], function: PointFunction, grad: Tensor | None = None
    ) -> Tensor:
        if self.is_read_again(tensors):
            values = function(decoded(self, tensors, self._decode))
            return values if grad is None else grad * values
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
    """Statistics that change nothing."""
    return torch.zeros(channels, dtype=dtype, device=device), torch.ones(channels, dtype=dtype, device=device)


_output, _of_channels = one_object_each(NormOutputAgain), one_object_each(ChannelsAgain)


def recomputed_output(
    region: Keeper, norm: NormInput, kept: Saved, out: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Saved | None:
    """Return a norm's output as a function of its recomputed input; None if the input is not recomputed."""
    tensors, decoder = kept
    if isinstance(decoder, Unpacked):
        tensors, decoder = decoder.without_statistics(tensors)
    if not is_output(decoder):
        return None
    given = decoder, len(tensors), norm.norm.alignment
    rest = tuple(out.shape), out.stride(), out.dtype
    if norm.mean is not None and norm.mean.shape == norm.spread.shape == out.shape[1:2] and out.dim() > 2:
        with torch.no_grad():
            scale = norm.norm.alignment.inverse(norm.spread)
            scale = scale if weight is None else scale * weight
            shift = -norm.mean * scale if bias is None else bias - norm.mean * scale
        make = _of_channels if decoder.lasts else ChannelsAgain
        weights = () if weight is None else (as_now(region, weight, True),)
        return (*tensors, norm.spread, shift, *weights), make(*given, (weight is not None,), *rest)
    others = (norm.mean, *(y if y is None else as_now(region, y, y is weight) for y in (weight, bias)))
    result = (_output if decoder.lasts else NormOutputAgain)(*given, tuple(y is not None for y in others), *rest)
    return (*tensors, norm.spread, *(y for y in others if y is not None)), result
