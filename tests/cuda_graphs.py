"""CUDA graphs in miniature, on the CPU: ops are recorded, and run again on the same tensors.

As on a device, a capture computes nothing: tensors that it writes have their values of before, and those that it makes
are NaN until a replay.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Device:
    """What the miniature of a device does and has seen."""

    capturing = False
    sync_mode = 0
    graphs = 0
    most_graphs = 100
    registered: list[Any]

    def __init__(self) -> None:
        self.registered = []

    def wait(self) -> None:
        """What `loss.item()` does."""
        if self.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.sync_mode:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    def set_sync_mode(self, mode: Any) -> None:
        self.sync_mode = {"default": 0, "warn": 1}.get(mode, mode)


class Graph(TorchDispatchMode):
    """A CUDAGraph that records ops of the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, list[Tensor], list[bool]]] = []
        self.written: dict[int, tuple[Tensor, Tensor]] = {}
        self.storages: dict[int, Tensor] = {}

    def register_generator_state(self, generator: torch.Generator) -> None:
        DEVICE.registered.append(generator)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for place, (argument, value) in enumerate(zip(func._schema.arguments, args, strict=False)):
            is_statistic = func is torch.ops.aten.native_batch_norm.default and place in (3, 4)
            if is_statistic or (argument.alias_info is not None and argument.alias_info.is_write):
                for x in (each for each in tree_leaves(value) if isinstance(each, Tensor)):
                    if x.untyped_storage().data_ptr() not in self.storages:
                        self.written.setdefault(id(x), (x, x.clone()))
        out = func(*args, **kwargs)
        outs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        known = {x.untyped_storage().data_ptr() for x in given}
        fresh = [x.untyped_storage().data_ptr() not in known for x in outs]
        for x, is_fresh in zip(outs, fresh, strict=True):
            if is_fresh:
                self.storages[x.untyped_storage().data_ptr()] = x
        self.calls.append((func, args, kwargs, outs, fresh))
        return out

    def finish(self) -> None:
        for *_, outs, fresh in self.calls:
            for x, is_fresh in zip(outs, fresh, strict=True):
                if is_fresh and x.is_floating_point():
                    x.data.fill_(torch.nan)
        for x, before in self.written.values():
            x.data.copy_(before)

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, outs, fresh in self.calls:
                new = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
                for x, value, is_fresh in zip(outs, new, fresh, strict=True):
                    if is_fresh:
                        x.data.copy_(value)


class Stream:
    def wait_stream(self, other: Any) -> None:
        pass


@contextmanager
def graph(recorder: Graph, **options: Any) -> Iterator[None]:
    DEVICE.graphs += 1
    if DEVICE.graphs > DEVICE.most_graphs:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nGPU 0 has")
    DEVICE.capturing = True
    try:
        with recorder:
            yield
    finally:
        DEVICE.capturing = False
        recorder.finish()


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    yield


DEVICE = Device()


def put_in_place(monkeypatch: Any) -> Device:
    """Give `torch.cuda` the miniature, and `brevact.captured` the CPU."""
    DEVICE.__init__()
    DEVICE.graphs = DEVICE.sync_mode = 0
    DEVICE.most_graphs = 100
    stream = Stream()
    for name, value in {
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: DEVICE.capturing,
        "Stream": Stream,
        "stream": on_stream,
        "current_stream": lambda: stream,
        "set_stream": lambda stream: None,
        "synchronize": lambda: None,
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": Graph,
        "graph": graph,
        "get_sync_debug_mode": lambda: DEVICE.sync_mode,
        "set_sync_debug_mode": DEVICE.set_sync_mode,
        "default_generators": (torch.default_generator,),
        "current_device": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr("torch.cuda.graphs.graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr("brevact.cuda_graphs._DEVICE", "cpu")
    return DEVICE
