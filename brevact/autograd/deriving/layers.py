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
from brevact.autograd.deriving.cache import MOST_HELD, Graph, cache, make_token
from brevact.autograd.region.running import may_free_weights
from brevact.autograd.saving import storage_report
from brevact.autograd.saving.saved import (
    AS_IT_IS,
    Decoder,
    Expression,
    Region,
    Saved,
    TensorFunction,
    View,
    Weight,
    express,
    with_strides,
)
from brevact.autograd.saving.storages import LONE, Tensors, is_tracked
from brevact.heap import Tuning
from brevact.private_names.of_torch import DisableAutocast, DisableTorchFunction, count_holders, is_any_autocast_enabled
from brevact.quantizers import PointFunction, multiply_by_function

#: Most layers recomputed one after the other before one is packed: all of them are held at once.
MOST_NESTED = 4
#: Elements per ATen call of a convolution that runs over a few samples at a time.
_NUMEL_OF_CALL = 1 << 18

#: A layer as a function of its input, its weight and its bias.
Layer = TensorFunction


@dataclass(eq=False, slots=True)
class HeldOutput(Expression):
    """Decoder of an output held for its readers, whose first tensor is a token; ``cost``: as in :class:`Quality`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    cost: int
    leading = 1
    how = storage_report.RECOMPUTED

    def __post_init__(self) -> None:
        Expression.__post_init__(self)
        quality, self.depth = self.quality, self.depth + 1
        self.quality = quality._replace(is_curved=not quality.is_exact, cost=max(quality.cost, self.cost))

    def decode(self, tensors: Tensors) -> Tensor:
        return cache.output(tensors[0], functools.partial(self._computed, tensors))

    def _computed(self, tensors: Tensors) -> tuple[Tensor, Graph | None]:
        raise NotImplementedError


def take(decoder: Decoder, tensors: Tensors) -> tuple[Tensor, bool]:
    """Decode a tensor, no longer held; return it, and whether the caller may overwrite it: nobody else reads it."""
    found = decoder.decode(tensors)
    if not isinstance(decoder, HeldOutput):
        return found, False
    cache.release(tensors[0])
    references = sys.getrefcount(found)
    holders = count_holders(found.untyped_storage()._cdata)  # the tensor, and the Python object
    return found, references <= LONE and holders == 2


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
        return self.parts(tensors)[0]

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
        operands = (*[decoder.decode(kept) for kept, decoder in self.parts(tensors)], *self.others(tensors))
        x, weight, *bias = (each if each.dtype is self.dtype else each.to(self.dtype) for each in operands)
        return x, weight, bias[0] if bias else None

    def _run(self, tensors: Tensors) -> Tensor:
        x, weight, bias = self._operands(tensors)
        Tuning.passed += math.prod(self.shape)
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


def is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    return torch.empty_strided(shape, stride, device="meta").is_contiguous()


def is_output(decoder: Decoder) -> bool:
    return isinstance(decoder.sources[0][0] if isinstance(decoder, View) else decoder, HeldOutput)


def rows_of(decoder: Decoder, tensors: Tensors) -> Callable[[int, int], Tensor] | None:
    """Return a function (start, stop) -> rows of a linear layer's output; None for others, and once it is computed."""
    whole = decoder.sources[0][0] if isinstance(decoder, View) else decoder
    if not isinstance(whole, LayerOutput) or not whole.has_rows or cache.holds(tensors[0]):
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
    if known[1].depth >= _most_nested(input, out):
        return
    of_weight = region.keep_weight(weight)
    if of_weight[1] is AS_IT_IS:
        of_weight = (weight.detach(),), AS_IT_IS
    others = () if bias is None else (as_now(region, bias, False),)
    options = tuple(out.shape), out.stride(), out.dtype, math.ceil(cost), layer
    token = make_token(out.device)
    region.register(out, express(LayerOutput, (known, of_weight), *options, leading=(token,), others=others))
    Tuning.passed += out.numel()


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


def as_now(region: Region, x: Tensor, is_weight: bool) -> Tensor:
    """Copy a bias, which may change before backward; weights only in distributed training: FSDP frees their memory."""
    if is_weight and not region.is_distributed:
        return x.detach()
    return x.detach().clone() if torch.is_grad_enabled() else x.clone()  # one call less in a Function
