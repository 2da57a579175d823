"""Outputs of layers that are computed again in backward, from their known input and the weight.

The output of a convolution or a linear layer is a function of its input, which is packed or derives from packed
tensors, and of a weight, which is there anyway. Where an element of it costs few multiplications
(``BackwardSettings.recompute``), what reads the output in backward reads the layer run again on the decoded input, and
nothing is stored of it. The layer is linear, so that an unbiased input gives an unbiased output, and independent errors
of elements have about the same size relative to all of the output behind it, though not relative to a deviation that is
small beside the mean. The gradient of the layer's weight multiplies the input by what
has been computed of the output, whose errors are the same: a bias of the order of their variance, as that of curved
functions, so that the input must have as many bits (``derive_min_bits``).

Several ops read one output: the norm behind the layer, the activation function, the next layer. It is computed for the
first of them and held until the last one has run: under a token, an empty tensor which each of them saves, and whose
storage ends with the last one. Where hooks around the region hand out copies of what is saved, each reader computes it.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from brevact.autograd import storage_report
from brevact.autograd.decoders import AS_IT_IS
from brevact.autograd.expressions import TensorFunction
from brevact.autograd.keeper import EagerKeeper, Keeper
from brevact.autograd.known_values import View
from brevact.autograd.normalizing import as_now
from brevact.autograd.quality import Quality
from brevact.autograd.saved import Decoder, Saved, one_object_each
from brevact.autograd.storages import WeakStorage
from brevact.autograd.transforms import may_free_weights
from brevact.private_names.of_torch import (
    DisableTorchFunction,
    count_holders,
    current_graph_task,
    is_any_autocast_enabled,
    queue_callback,
)

#: Layers that are computed again one after the other, before one is packed: all of them are held at once.
MOST_NESTED = 3

#: A layer as a function of its input, its weight and its bias.
Layer = TensorFunction


class WithOptions(NamedTuple):
    """A layer of torch with what follows its bias."""

    function: Callable[..., Tensor]
    options: tuple[Any, ...]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.function(x, weight, bias, *self.options)


class _Held:
    """What token storages carry: the output, its version, and the stream on which it was computed."""

    __slots__ = ("stream", "values", "version")

    def __init__(self, values: Tensor) -> None:
        self.values, self.version, self.stream = values, values._version, _stream_of(values)

    def find(self) -> Tensor | None:
        """Return the output, if nobody has written to it, and who asks runs on its stream."""
        is_same = self.values._version == self.version and self.stream == _stream_of(self.values)
        return self.values if is_same else None


def _stream_of(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


#: Attribute of the storage of a token under which it carries the output.
_HELD = "_brevact_output"


class _Task(threading.local):
    """The backward pass in which this thread has computed outputs, and tokens that hold some."""

    number = -1
    tokens: list[WeakStorage] | None = None


_task = _Task()


def _hold(token: Tensor, values: Tensor) -> None:
    """Hold an output until its readers have run; those of a graph that is kept, until the backward pass has ended."""
    task = current_graph_task()
    if task == -1:
        return
    if _task.number != task or _task.tokens is None:
        tokens: list[WeakStorage] = []
        _task.number, _task.tokens = task, tokens
        queue_callback(lambda: _let_go(tokens))
    storage = token.untyped_storage()
    storage.__dict__[_HELD] = _Held(values)
    _task.tokens.append(WeakStorage(storage))


def _let_go(tokens: list[WeakStorage]) -> None:
    for reference in tokens:
        storage = reference()
        if storage is not None:
            storage.__dict__.pop(_HELD, None)
    tokens.clear()
    if _task.tokens is tokens:
        _task.tokens = None


@dataclass(frozen=True, eq=False, slots=True)
class LayerOutput(Decoder):
    """Decoder of the output of a layer; its tensors are a token, those of the input and the weight, and the bias.

    Args:
        layer: the layer.
        source: decoder of the input, and the number of its tensors.
        weight: decoder of the weight, and the number of its tensors.
        shape: of the output.
        stride: of the output.
        dtype: of the output, in which the layer has run.
        lasts: whether the next training step finds the same object.
        depth: layers that are computed for the output, one after the other, this one included.
        quality: of the output: that of the input.
    """

    layer: Layer
    source: tuple[Decoder, int]
    weight: tuple[Decoder, int]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    lasts: bool = field()  # without which the property of the base class would be its default
    depth: int = field()
    quality: Quality = field()

    def decode(self, tensors: tuple[Tensor, ...]) -> Tensor:
        held: _Held | None = tensors[0].untyped_storage().__dict__.get(_HELD)
        found = None if held is None else held.find()
        if found is None:
            found = self._computed(tensors)
            _hold(tensors[0], found)
        return found

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[str, int]:
        return storage_report.RECOMPUTED, math.prod(self.shape) * self.dtype.itemsize

    def input_of(self, tensors: tuple[Tensor, ...]) -> Saved:
        """Return what keeps the input."""
        decoder, count = self.source
        return tensors[1 : 1 + count], decoder

    @property
    def has_rows(self) -> bool:
        """Whether rows of the output are functions of the rows of the input, as of a linear layer."""
        return not isinstance(self.layer, WithOptions) and is_contiguous(self.shape, self.stride)

    def rows(self, tensors: tuple[Tensor, ...]) -> Callable[[int, int], Tensor]:
        """Return what computes some rows of the output."""
        with torch.no_grad(), _without_autocast(tensors[0].device):
            x, weight, bias = self._operands(tensors)
        rows = x.reshape(-1, x.shape[-1])

        def compute(start: int, stop: int) -> Tensor:
            with torch.no_grad(), _without_autocast(rows.device), DisableTorchFunction():
                return self.layer(rows[start:stop], weight, bias)

        return compute

    def _computed(self, tensors: tuple[Tensor, ...]) -> Tensor:
        if torch.is_grad_enabled() or is_any_autocast_enabled():
            with torch.no_grad(), _without_autocast(tensors[0].device):
                return self._run(tensors)
        return self._run(tensors)

    def _operands(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
        (source, inputs), (of_weight, weights) = self.source, self.weight
        x = source.decode(tensors[1 : 1 + inputs])
        weight = of_weight.decode(tensors[1 + inputs : 1 + inputs + weights])
        operands = (x, weight, *tensors[1 + inputs + weights :])
        x, weight, *bias = (each if each.dtype is self.dtype else each.to(self.dtype) for each in operands)
        return x, weight, bias[0] if bias else None

    def _run(self, tensors: tuple[Tensor, ...]) -> Tensor:
        operands = self._operands(tensors)
        with DisableTorchFunction():
            out = self.layer(*operands)
            if out.stride() == self.stride:
                return out
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=out.device).copy_(out)


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Let ops run in the types of their tensors. Torch knows no autocast of some devices, as of "meta"."""
    return torch.autocast(device.type, enabled=False) if is_any_autocast_enabled() else nullcontext()


_layer_output = one_object_each(LayerOutput)


def is_contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether a tensor of these strides lies in memory row after row."""
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True


def take(decoder: Decoder, tensors: tuple[Tensor, ...]) -> tuple[Tensor, bool]:
    """Decode a tensor, and return whether the caller may overwrite it: the output of a layer that nobody else reads.

    The output is not held any longer: a reader that comes later computes it again.
    """
    found = decoder.decode(tensors)
    if not isinstance(decoder, LayerOutput):
        return found, False
    held = tensors[0].untyped_storage().__dict__.pop(_HELD, None)
    del held
    storage = found.untyped_storage()
    # The local name and the argument of the call; the tensor and the object of Python.
    return found, sys.getrefcount(found) <= 2 and count_holders(storage._cdata) == 2


def is_output(decoder: Decoder) -> bool:
    """Return whether a decoder gives back the output of a layer, or a view of it."""
    return isinstance(decoder.decoder if isinstance(decoder, View) else decoder, LayerOutput)


def rows_of(decoder: Decoder, tensors: tuple[Tensor, ...]) -> Callable[[int, int], Tensor] | None:
    """Return what computes some rows, (start, stop) -> (stop - start, C), of the output of a linear layer.

    None for other decoders, and where somebody has computed the output as a whole.
    """
    whole = decoder.decoder if isinstance(decoder, View) else decoder
    if not isinstance(whole, LayerOutput) or not whole.has_rows or _HELD in tensors[0].untyped_storage().__dict__:
        return None
    columns = whole.shape[-1]
    if isinstance(decoder, View) and (
        decoder.shape[-1] != columns or decoder.offset or not is_contiguous(decoder.shape, decoder.stride)
    ):
        return None
    return whole.rows(tensors)


def serves_norms(decoder: Decoder) -> bool:
    """Return whether norms may read what a decoder gives back in place of normalized values of their own.

    That is without a loss, or has the relative error of the input of a layer; the norm keeps its exact statistics.
    """
    return decoder.quality.is_exact or is_output(decoder)


def remember_output(
    region: Keeper, layer: Layer, input: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, cost: float
) -> None:
    """Remember that the output of a layer, which has run, can be computed again.

    Args:
        region: in which it ran.
        layer: computes it of its input, its weight and its bias.
        input: its input, which the region keeps if the weight trains.
        weight: its weight.
        bias: its bias.
        out: its output.
        cost: multiplications and additions that an element of it takes.
    """
    if not 0 < cost <= region.recompute or not _can_run_again(cast("EagerKeeper", region), input, weight, out):
        return
    known = region.find_kept(input)
    if known is None or known[1].depth >= MOST_NESTED:
        return
    inputs, of_input = known
    weights, of_weight = region.keep_weight(weight)
    if of_weight is AS_IT_IS:
        weights = (weight.detach(),)
    lasts, quality = of_input.lasts and of_weight.lasts, of_input.quality
    decoder = (_layer_output if lasts else LayerOutput)(
        layer,
        (of_input, len(inputs)),
        (of_weight, len(weights)),
        tuple(out.shape),
        out.stride(),
        out.dtype,
        lasts,
        of_input.depth + 1,
        quality._replace(is_curved=not quality.is_exact, cost=max(quality.cost, math.ceil(cost))),
    )
    biases = () if bias is None else (as_now(bias, False),)
    region.register(out, ((torch.empty(0, device=out.device), *inputs, *weights, *biases), decoder))


def _can_run_again(region: EagerKeeper, input: Tensor, weight: Tensor, out: Tensor) -> bool:
    """Return whether a layer is one to compute again; of input and output the smaller one is the one to store."""
    settings = region.settings
    if not settings.derives or settings.double_backward or region.hooks.scope is not None:
        return False
    return out.numel() >= input.numel() and out.is_floating_point() and not may_free_weights(weight)
