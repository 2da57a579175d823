"""Caches of tensors that backward decodes or recomputes, for the readers that follow one another.

For small tensors the calls take longer than the work: what was decoded is held for the next reader, until its codes are
freed: outputs of norms, weights that are recomputed, and codes of forward quantizers for the gates of a recurrent cell,
which read the same state; four megabytes in all.

A layer's output is held under a token, an empty tensor that each reader saves, whose storage ends with the last one. If
hooks around the region return copies of saved tensors, each reader recomputes the output.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from brevact.autograd.saving import storage_report
from brevact.autograd.saving.saved import Decoder, Quality, Saved
from brevact.autograd.saving.storages import LONE, Tensors, referent, versions_of
from brevact.private_names.of_torch import count_holders, current_graph_task, is_functorch_tensor, queue_callback

#: Elements of the largest tensor that is held: a few hundred kilobytes, which decode faster than the calls take.
MOST_HELD = 1 << 18

Decode = Callable[[Tensors], Tensor]


class Cache(threading.local):
    """This thread's decoded tensors of at most ``most`` elements, each held while the first tensor's storage lives."""

    def __init__(self, most: int) -> None:
        self._most, self._elements = most, 0
        self._of: dict[weakref.ref[Any], tuple[Any, ...]] = {}

    def decoded(self, decoder: Any, tensors: Tensors, decode: Decode) -> Tensor:
        owner = tensors[0].untyped_storage()
        found = self._of.get(weakref.ref(owner))
        if found is not None:
            values, known, others, versions = found
            is_same = known is decoder and len(others) == len(tensors) - 1
            is_same = is_same and all(map(operator.is_, others, tensors[1:]))
            if is_same and versions_of((values, *tensors)) == versions:
                return values
        values = decode(tensors)
        if type(values) is Tensor and values.numel() <= MOST_HELD and not is_functorch_tensor(values):
            self._elements += values.numel()
            if self._elements > self._most:
                self._of.clear()
                self._elements = values.numel()
            self._of[weakref.ref(owner, self._of.pop)] = values, decoder, tensors[1:], versions_of((values, *tensors))
        return values


decoded = Cache(1 << 20).decoded


def may_be_held(numel: int, codes: Tensor) -> bool:
    """Return whether a tensor of ``numel`` elements is decoded once for several readers; a GPU would wait for it."""
    return numel <= MOST_HELD and type(codes) is Tensor and codes.is_cpu and not is_functorch_tensor(codes)


#: An output, and the tensors that it was computed from, connected by a graph.
Graph = tuple[Tensor, tuple[Tensor | None, ...]]


class _Output:
    """An output, held by its token's storage, with its version, backward pass, stream, and graph (None without one)."""

    __slots__ = ("graph", "stream", "task", "values", "version")

    def __init__(self, values: Tensor, task: int, graph: Graph | None = None) -> None:
        self.values, self.version, self.stream = values, values._version, _stream_of(values)
        self.task, self.graph = task, graph

    def find(self) -> Tensor | None:
        """Return the output if it is unmodified, of this stream and backward pass: one that raised leaves its own."""
        is_same = self.task == current_graph_task() and self.values._version == self.version
        return self.values if is_same and self.stream == _stream_of(self.values) else None


def _stream_of(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0


#: Attribute of a token's storage: the output.
_HELD = "_brevact_output"
#: Attribute of a token's storage: its position in the forward pass.
_PLACE = "_brevact_place"
_places = itertools.count()


class _Task(threading.local):
    """This thread's last backward pass that computed outputs, and the tokens that hold them."""

    number = -1
    #: Whether outputs are computed for one reader, long before the next one runs.
    passes_on = False

    def __init__(self) -> None:
        self.tokens: list[weakref.ref[Any]] = []


_task = _Task()


def _hold(token: Tensor, values: Tensor, graph: Graph | None = None) -> None:
    """Hold an output until its readers have run; with ``retain_graph``, until the backward pass ends."""
    task = current_graph_task()
    if task == -1 or _task.passes_on:
        return
    if _task.number != task:
        _task.number, _task.tokens = task, []
        queue_callback(functools.partial(_let_go, _task.tokens))
    storage = token.untyped_storage()
    storage.__dict__[_HELD] = _Output(values, task, graph)
    _task.tokens.append(weakref.ref(storage))


def _let_go(tokens: list[weakref.ref[Any]]) -> None:
    for reference in tokens:
        storage = referent(reference)
        if storage is not None:
            storage.__dict__.pop(_HELD, None)


def make_token(device: torch.device) -> Tensor:
    token = torch.empty(0, device=device)
    token.untyped_storage().__dict__[_PLACE] = next(_places)
    return token


def place_of(kept: Saved) -> int:
    """Return the position in the forward pass of a layer's output, or of the norm's output behind the layer."""
    return int(kept[0][0].untyped_storage().__dict__.get(_PLACE, -1))


@contextmanager
def not_held() -> Iterator[None]:
    """Compute outputs for one reader without holding them: other readers run much later in backward."""
    before, _task.passes_on = _task.passes_on, True
    try:
        yield
    finally:
        _task.passes_on = before


@dataclass(eq=False, slots=True)
class HeldOutput(Decoder):
    """Decoder of an output held for its readers; its tensors are a token, those of its sources, and others.

    ``sources``: decoders and numbers of tensors. ``cost``: multiplications and additions per element.
    """

    sources: tuple[tuple[Decoder, int], ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    cost: int
    quality: Quality = field(init=False)
    lasts: bool = field(init=False)
    depth: int = field(init=False)
    how = storage_report.RECOMPUTED

    def __post_init__(self) -> None:
        quality = functools.reduce(Quality.with_other, (decoder.quality for decoder, _ in self.sources))
        self.quality = quality._replace(is_curved=not quality.is_exact, cost=max(quality.cost, self.cost))
        self.lasts = all(decoder.lasts for decoder, _ in self.sources)
        self.depth = 1 + max(decoder.depth for decoder, _ in self.sources)

    def decode(self, tensors: Tensors) -> Tensor:
        held: _Output | None = tensors[0].untyped_storage().__dict__.get(_HELD)
        found = None if held is None else held.find()
        if found is None:
            found, graph = self._computed(tensors)
            _hold(tensors[0], found, graph)
        return found

    def _computed(self, tensors: Tensors) -> tuple[Tensor, Graph | None]:
        raise NotImplementedError


def take_graph(token: Tensor) -> Graph | None:
    """Return the graph that computed a token's output for an earlier reader; each graph is returned once."""
    held: _Output | None = token.untyped_storage().__dict__.get(_HELD)
    if held is None or held.find() is None:
        return None
    graph, held.graph = held.graph, None
    return graph


def is_held(token: Tensor) -> bool:
    return _HELD in token.untyped_storage().__dict__


def take(decoder: Decoder, tensors: Tensors) -> tuple[Tensor, bool]:
    """Decode a tensor, no longer held; return it, and whether the caller may overwrite it: nobody else reads it."""
    found = decoder.decode(tensors)
    if not isinstance(decoder, HeldOutput):
        return found, False
    tensors[0].untyped_storage().__dict__.pop(_HELD, None)
    references = sys.getrefcount(found)
    holders = count_holders(found.untyped_storage()._cdata)  # the tensor, and the Python object
    return found, references <= LONE and holders == 2
