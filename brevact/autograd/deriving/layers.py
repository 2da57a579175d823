"""Recompute layer outputs in backward from the saved input and the weight.

The output of a convolution or linear layer is a function of its input, which is packed or derives from packed
tensors, and of a weight, which is in memory anyway. If it costs few multiplications per element
(``BackwardSettings.recompute``), ops that read it in backward run the layer again on the decoded input, and the output
is not saved. The layer is linear, so an unbiased input gives an unbiased output, and independent errors keep about
their size relative to the whole output, but not relative to a deviation that is small against the mean. The gradient of
the layer's weight multiplies the input by values computed from the output, which carry the input's errors: a bias of
the order of their variance, as for nonlinear functions, so the input needs as many bits (``derive_min_bits``).

Several ops read one output: the norm behind the layer, the activation function, the next layer. The first one computes
it, and it is held until the last one has run (``cache``).

Outputs of norms whose input is recomputed in backward: affine functions of it, with the exact statistics.

For a norm with one mean and deviation per channel, the forward pass computes the shifts, and functions of the output
are applied to a few samples at a time, so that the whole output is never in memory.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from brevact.autograd.call_arguments import BoundCall
from brevact.autograd.deriving.cache import MOST_HELD, HeldOutput, decoded, is_held, make_token, may_be_held, take
from brevact.autograd.deriving.expressions import TensorFunction
from brevact.autograd.deriving.known_values import View
from brevact.autograd.deriving.norms import Alignment, NormInput, Unpacked, aligned, as_now
from brevact.autograd.region.running import may_free_weights
from brevact.autograd.saving import storage_report
from brevact.autograd.saving.saved import (
    AS_IT_IS,
    Decoder,
    PassesOn,
    Region,
    Saved,
    Weight,
    one_object_each,
    with_strides,
)
from brevact.autograd.saving.storages import LONE, Tensors, is_tracked
from brevact.heap import count
from brevact.private_names.of_torch import DisableAutocast, DisableTorchFunction, is_any_autocast_enabled
from brevact.quantizers import PointFunction, multiply_by_function

#: Most layers recomputed one after the other before one is packed: all of them are held at once.
MOST_NESTED = 4
#: Elements per ATen call of a convolution that runs over a few samples at a time.
_NUMEL_OF_CALL = 1 << 18

#: A layer as a function of its input, its weight and its bias.
Layer = TensorFunction


@dataclass(eq=False, slots=True)
class LayerOutput(HeldOutput):
    """Decoder of a layer output; its sources are the input and the weight, and a bias may follow."""

    layer: Layer
    decodes_through = True

    def decode_through(self, tensors: Tensors, function: PointFunction, grad: Tensor | None = None) -> Tensor:
        if grad is None:
            return function(self.decode(tensors))
        values, is_owned = take(self, tensors)  # an activation function reads first in forward, so last in backward
        return multiply_by_function(values, function, grad, overwrites=is_owned)

    def input_of(self, tensors: Tensors) -> Saved:
        decoder, count = self.sources[0]
        return tensors[1 : 1 + count], decoder

    @property
    def has_rows(self) -> bool:
        """Whether each output row is a function of the same input row, as in a linear layer."""
        return not isinstance(self.layer, BoundCall) and is_contiguous(self.shape, self.stride)

    def rows(self, tensors: Tensors) -> Callable[[int, int], Tensor]:
        with torch.no_grad(), DisableAutocast():
            x, weight, bias = self._operands(tensors)
        rows = x.reshape(-1, x.shape[-1])

        def compute(start: int, stop: int) -> Tensor:
            with torch.no_grad(), DisableAutocast(), DisableTorchFunction():
                return self.layer(rows[start:stop], weight, bias)

        return compute

    def _computed(self, tensors: Tensors) -> tuple[Tensor, None]:
        if torch.is_grad_enabled() or is_any_autocast_enabled():
            with torch.no_grad(), DisableAutocast():
                return self._run(tensors), None
        return self._run(tensors), None

    def _operands(self, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor | None]:
        (_, inputs), (of_weight, weights) = self.sources
        kept, source = self.input_of(tensors)
        x = source.decode(kept)
        weight = of_weight.decode(tensors[1 + inputs : 1 + inputs + weights])
        operands = (x, weight, *tensors[1 + inputs + weights :])
        x, weight, *bias = (each if each.dtype is self.dtype else each.to(self.dtype) for each in operands)
        return x, weight, bias[0] if bias else None

    def _run(self, tensors: Tensors) -> Tensor:
        x, weight, bias = self._operands(tensors)
        count(math.prod(self.shape))
        samples, step = self.shape[0], samples_of_call(self.shape)
        with DisableTorchFunction():
            if isinstance(self.layer, BoundCall) and x.is_cpu and 2 * step <= samples == x.shape[0]:
                out = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
                for start in range(0, samples, step):  # ATen would make a second copy of all samples at once
                    out[start : start + step] = self.layer(x[start : start + step], weight, bias)
                return out
            out = self.layer(x, weight, bias)
            out = with_strides(out, self.stride)
            return out.data if out._is_view() else out  # a view would hold its base


def samples_of_call(shape: Sequence[int]) -> int:
    return max(_NUMEL_OF_CALL // max(math.prod(shape[1:]), 1), 1)


_layer_output = one_object_each(LayerOutput)


def is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return torch.empty_strided(shape, stride, device="meta").is_contiguous()


def is_output(decoder: Decoder) -> bool:
    return isinstance(decoder.decoder if isinstance(decoder, View) else decoder, HeldOutput)


def rows_of(decoder: Decoder, tensors: Tensors) -> Callable[[int, int], Tensor] | None:
    """Return a function (start, stop) -> rows of a linear layer's output; None for others, and once it is computed."""
    whole = decoder.decoder if isinstance(decoder, View) else decoder
    if not isinstance(whole, LayerOutput) or not whole.has_rows or is_held(tensors[0]):
        return None
    columns = whole.shape[-1]
    if isinstance(decoder, View) and (
        decoder.shape[-1] != columns or decoder.offset or not is_contiguous(decoder.shape, decoder.stride)
    ):
        return None
    return whole.rows(tensors)


def is_enough_for_norms(decoder: Decoder) -> bool:
    """Return whether norms may read a decoder's tensor: lossless, or with the relative error of a layer's input."""
    return decoder.quality.is_exact or is_output(decoder)


def remember_output(
    region: Region, layer: Layer, input: Tensor, weight: Tensor, bias: Weight, out: Tensor, cost: float
) -> None:
    if not 0 < cost <= region.recompute or not can_recompute(region, out):
        return
    if may_free_weights(weight):
        return
    known = region.find_kept(input)
    if known is None:
        return
    inputs, of_input = known
    if of_input.depth >= _most_nested(input, out):
        return
    weights, of_weight = region.keep_weight(weight)
    if of_weight is AS_IT_IS:
        weights = (weight.detach(),)
    decoder = (_layer_output if of_input.lasts and of_weight.lasts else LayerOutput)(
        ((of_input, len(inputs)), (of_weight, len(weights))),
        *(tuple(out.shape), out.stride(), out.dtype, math.ceil(cost), layer),
    )
    biases = () if bias is None else (as_now(region, bias, False),)
    region.register(out, ((make_token(out.device), *inputs, *weights, *biases), decoder))
    count(out.numel())


def _most_nested(input: Tensor, out: Tensor) -> int:
    """Return how many layers may be computed in turn for an output: a chain should end where it is narrow."""
    if out.numel() > input.numel():
        return MOST_NESTED
    return MOST_NESTED - 1 if out.numel() == input.numel() else 1


def is_large_and_recomputed(region: Region, input: Tensor) -> bool:
    """Return whether a layer's input is large and recomputed: the weight's gradient comes first, to free the input."""
    known = region.find_known(input) if input.numel() > MOST_HELD and is_tracked(input) else None
    return known is not None and known[1].depth > 0


def can_recompute(region: Region, out: Tensor) -> bool:
    settings = region.settings
    if not settings.derives or settings.double_backward or region.hooks.scope is not None:
        return False
    return out.is_floating_point()


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
    how = storage_report.DERIVED

    def input_of(self, tensors: Tensors) -> Saved:
        return tensors[: self.count], self.decoder

    def is_read_again(self, tensors: Tensors) -> bool:
        return False

    def _finished(self, out: Tensor) -> Tensor:
        return with_strides(out.to(self.dtype), self.stride)


class NormOutputAgain(_NormOutput):
    """Its other tensors are the spread, and the mean, the weight and the bias if there are any."""

    __slots__ = ()

    @torch.no_grad()
    def decode(self, tensors: Tensors) -> Tensor:
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
    decodes_through = True

    def decode(self, tensors: Tensors) -> Tensor:
        return decoded(self, tensors, self._decode) if self.is_read_again(tensors) else self._decode(tensors)

    def _decode(self, tensors: Tensors) -> Tensor:
        x, scale, shift = self._read(tensors)
        is_owned = isinstance(self.decoder, HeldOutput) and not is_held(tensors[0])
        is_owned = is_owned and sys.getrefcount(x) <= LONE  # no other thread has taken the output since
        if is_owned and x.is_cpu and x.dtype is self.dtype is scale.dtype and x.stride() == self.stride:
            for rows in x.split(max(_NUMEL_IN_CACHE // math.prod(self.shape[1:]), 1)):
                rows.copy_(_affine(rows, scale, shift))
            return x
        return self._finished(_affine(x, scale, shift))

    def is_read_again(self, tensors: Tensors) -> bool:
        return may_be_held(math.prod(self.shape), tensors[0])

    def _read(self, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        spread, shift, *weight = tensors[self.count :]
        with torch.no_grad():
            scale = self.alignment.inverse(spread)
            return self.decoder.decode(tensors[: self.count]), scale * weight[0] if weight else scale, shift

    def decode_through(self, tensors: Tensors, function: PointFunction, grad: Tensor | None = None) -> Tensor:
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
    return torch.zeros(channels, dtype=dtype, device=device), torch.ones(channels, dtype=dtype, device=device)


_output, _of_channels = one_object_each(NormOutputAgain), one_object_each(ChannelsAgain)


def recomputed_output(
    region: Region, norm: NormInput, kept: Saved, out: Tensor, weight: Weight, bias: Weight
) -> Saved | None:
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
