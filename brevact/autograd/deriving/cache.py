"""The cache of tensors that backward decodes or recomputes, for the readers that follow one another.

For small tensors the calls take longer than the work: decoded values are held for the next reader, until the codes are
freed: outputs of norms, weights that are recomputed, and codes of forward quantizers for the gates of a recurrent cell,
which read the same state; four megabytes in all.

Outputs of recomputed layers, of any size, are held until their readers have run, at most to the end of the backward
pass, under a token: an empty tensor that each reader saves. If hooks around the region return copies of saved tensors,
each reader recomputes the output.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from brevact.autograd.saving.saved import Saved
from brevact.autograd.saving.storages import Tensors, find_record, record_of, versions_of
from brevact.private_names.of_torch import current_graph_task, is_functorch_tensor, queue_callback

#: Elements of the largest tensor that is held: a few hundred kilobytes, which decode faster than the calls take.
MOST_HELD = 1 << 18

#: An output, and the tensors that it was computed from, connected by a graph.
Graph = tuple[Tensor, tuple[Tensor | None, ...]]


@dataclass(eq=False, slots=True)
class _Held:
    """A small tensor, with its decoder and further tensors, or a layer's output, with its backward pass and stream."""

    values: Tensor
    source: tuple[Any, ...]
    versions: tuple[int, ...]
    task: int = -1
    graph: Graph | None = None


class Cache(threading.local):
    """This thread's decoded tensors, each held while the storage of its first saved tensor, the owner, lives.

    Small ones have at most ``most`` elements in all.
    """

    def __init__(self, most: int) -> None:
        self._most, self._elements = most, 0
        self._small: dict[weakref.ref[Any], _Held] = {}
        self._outputs: dict[weakref.ref[Any], _Held] = {}  # an owner may have one, and a small tensor that follows
        self._task = -1
        #: Whether outputs are computed for one reader, long before the next one runs, and not held.
        self.passes_on = False

    def decoded(self, decoder: Any, tensors: Tensors, decode: Callable[[Tensors], Tensor]) -> Tensor:
        """Return a small tensor, decoded once for all readers."""
        owner, source = tensors[0].untyped_storage(), (decoder, *tensors[1:])
        held = self._small.get(weakref.ref(owner))
        if held is not None and [*map(id, held.source)] == [*map(id, source)]:
            if versions_of((held.values, *tensors)) == held.versions:
                return held.values
        values = decode(tensors)
        if type(values) is Tensor and values.numel() <= MOST_HELD and not is_functorch_tensor(values):
            self._elements += values.numel()
            if self._elements > self._most:
                self._small.clear()
                self._elements = values.numel()
            self._small[weakref.ref(owner, self._small.pop)] = _Held(values, source, versions_of((values, *tensors)))
        return values

    def output(self, token: Tensor, compute: Callable[[], tuple[Tensor, Graph | None]]) -> Tensor:
        """Return a layer's output, computed once for the readers of a backward pass."""
        held = self._output(token)
        if held is not None:
            return held.values
        values, graph = compute()
        task = current_graph_task()
        if task != -1 and not self.passes_on:
            if self._task != task:
                self._task = task
                queue_callback(functools.partial(_let_go, task, self._outputs))
            new = _Held(values, _stream_of(token), (values._version,), task, graph)
            self._outputs[weakref.ref(token.untyped_storage(), self._outputs.pop)] = new
        return values

    def _output(self, token: Tensor) -> _Held | None:
        """Return an unmodified output of this stream and backward pass: one that raised leaves its own."""
        held = self._outputs.get(weakref.ref(token.untyped_storage()))
        if held is None or held.task != current_graph_task() or held.source != _stream_of(token):
            return None
        return held if held.versions == (held.values._version,) else None

    def take_graph(self, token: Tensor) -> Graph | None:
        """Return the graph that computed a token's output for an earlier reader; each graph is returned once."""
        held = self._output(token)
        if held is None:
            return None
        graph, held.graph = held.graph, None
        return graph

    def holds(self, token: Tensor) -> bool:
        return weakref.ref(token.untyped_storage()) in self._outputs

    def release(self, token: Tensor) -> None:
        self._outputs.pop(weakref.ref(token.untyped_storage()), None)

    @contextmanager
    def not_held(self) -> Iterator[None]:
        """Compute outputs for one reader without holding them: other readers run much later in backward."""
        before, self.passes_on = self.passes_on, True
        try:
            yield
        finally:
            self.passes_on = before


def _let_go(task: int, outputs: dict[weakref.ref[Any], _Held]) -> None:
    """Drop a backward pass' outputs, of the thread that computed them."""
    for reference in [reference for reference, held in list(outputs.items()) if held.task == task]:
        outputs.pop(reference, None)


cache = Cache(1 << 20)
decoded = cache.decoded


def _stream_of(x: Tensor) -> tuple[int]:
    return (torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0,)


def may_be_held(numel: int, codes: Tensor) -> bool:
    """Return whether a tensor of ``numel`` elements is decoded once for several readers; a GPU would wait for it."""
    return numel <= MOST_HELD and type(codes) is Tensor and codes.is_cpu and not is_functorch_tensor(codes)


_places = itertools.count()


def make_token(device: torch.device) -> Tensor:
    token = torch.empty(0, device=device)
    record = record_of(token)
    assert record is not None  # the storage is new
    record.place = next(_places)
    return token


def place_of(kept: Saved) -> int:
    """Return the position in the forward pass of a layer's output, or of the norm's output behind the layer."""
    record = find_record(kept[0][0])
    return -1 if record is None else record.place
