"""Peaks of the bytes that PyTorch allocates in a step, above those at its start."""

from __future__ import annotations

import bisect
import gc
import itertools
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from brevact.autograd import running
from brevact.autograd.storages import WeakStorage, storage_address
from brevact.heap import count
from brevact.private_names.of_profiler import allocations, allocations_in_time, quietly
from brevact.user_lines import warn

#: Least bytes of a tensor that goes to the file.
_LEAST = 1 << 16
#: Bytes per read or write call: Linux transfers at most 2 GiB.
_AT_ONCE = 1 << 30


class Life:
    """A storage with tensors in the file: its address, when it was saved, and when the last node released it, in ns."""

    def __init__(self, storage: UntypedStorage) -> None:
        self.address, self.saved, self.end = storage.data_ptr(), time.time_ns(), 0
        self.storage = WeakStorage(storage)
        #: File position of each tensor, by version and view.
        self.positions: dict[Any, int] = {}
        #: Address and time of each tensor read back.
        self.copies: list[tuple[int, int]] = []


class _InFile:
    def __init__(self, life: Life, x: Tensor, position: int) -> None:
        self.life, self.position = life, position
        self.form = x.shape, x.stride(), x.dtype, x.device

    def __del__(self) -> None:
        self.life.end = max(self.life.end, time.time_ns())


class SavedInFile:
    """The file, and the hooks that write and read it."""

    def __init__(self, model: nn.Module, file: Any) -> None:
        self._file, self._lock = file, threading.Lock()  # each device runs backward in its own thread
        self._weights = {storage_address(x) for x in (*model.parameters(), *model.buffers())}
        self._lives: dict[int, Life] = {}
        self.lives: list[Life] = []

    @torch.no_grad()
    def pack(self, x: Tensor) -> Any:
        """Write a tensor to the file and return its handle; return weights, small and unusual tensors unchanged."""
        x = x if x.grad_fn is None else x.detach()
        if type(x) is not Tensor or x.layout is not torch.strided or x.is_quantized or x.is_nested or x.is_meta:
            return x
        if x.numel() * x.itemsize < _LEAST or x.is_conj() or x.is_neg() or storage_address(x) in self._weights:
            return x
        address, storage = storage_address(x), x.untyped_storage()
        life = self._lives.get(address)
        if life is None or life.storage.expired():
            life = self._lives[address] = Life(storage)
            self.lives.append(life)
        place = x._version, x.storage_offset(), x.shape, x.stride(), x.dtype
        count(x.numel())
        if place not in life.positions:
            values = x.as_strided((_extent(x.shape, x.stride()),), (1,)).cpu()
            try:
                with self._lock:
                    life.positions[place] = self._file.seek(0, os.SEEK_END)
                    self._through(self._file.write, values)
            except OSError as error:
                del life.positions[place]
                warn(f"{error}: tensors stay in memory; let TMPDIR name a folder on a disk with more room")
                return x
        return _InFile(life, x, life.positions[place])

    def unpack(self, held: Any) -> Tensor:
        if not isinstance(held, _InFile):
            return held
        shape, strides, dtype, device = held.form
        values = torch.empty(_extent(shape, strides), dtype=dtype)
        count(values.numel())
        with self._lock:
            self._file.seek(held.position)
            self._through(self._file.readinto, values)
        values = values.to(device)
        held.life.copies.append((values.data_ptr(), time.time_ns()))
        return values.as_strided(shape, strides)

    @staticmethod
    def _through(move: Callable[[Any], int], values: Tensor) -> None:
        bytes_: Any = values.view(torch.uint8).numpy()
        view = memoryview(bytes_)
        while view:
            view = view[move(view[:_AT_ONCE]) :]


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


@contextmanager
def saved_in_file(model: nn.Module) -> Iterator[SavedInFile]:
    """Save autograd's tensors, except weights, to a temporary file; backward must run inside the block."""
    running.prepare()  # of the heap: these passes fragment it as little as packed ones then
    with tempfile.TemporaryFile(buffering=0) as file:
        saved = SavedInFile(model, file)
        with running.measuring_hooks(saved.pack, saved.unpack):
            yield saved


def peak_of(step: Callable[[], object], device: torch.device) -> int:
    step()  # warm up compiled kernels and cached constants
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _profiled() as profile:
        step()
    return max(itertools.accumulate(allocations(profile)), default=0)


@dataclass(eq=False)
class _Block:
    """A block of memory that PyTorch allocates in the step; times in nanoseconds since the epoch."""

    start: int
    end: float
    nbytes: int


def peak_by_file(step: Callable[[], object], model: nn.Module, device: torch.device) -> int:
    """Return the peak of a full-precision step, measured in the memory of a packed one; the step runs twice."""
    with saved_in_file(model):
        step()
    gc.collect()
    with saved_in_file(model) as saved, _profiled() as profile:
        step()
    of_address: dict[int, list[_Block]] = {}
    changes: list[tuple[float, int]] = []
    for each in allocations_in_time(profile, device.type):
        blocks = of_address.setdefault(each.address, [])
        if each.nbytes > 0:
            blocks.append(_Block(each.time, math.inf, each.nbytes))
        elif blocks:
            blocks[-1].end = each.time
        else:
            changes.append((each.time, each.nbytes))  # allocated before the step
    for life in saved.lives:
        for block in _block_at(of_address, life.address, life.saved):
            block.end = max(block.end, life.end)
        for copy in life.copies:
            for block in _block_at(of_address, *copy):
                block.nbytes = 0
    for block in itertools.chain.from_iterable(of_address.values()):
        changes += (block.start, block.nbytes), (block.end, -block.nbytes)
    return max(itertools.accumulate((nbytes for _, nbytes in sorted(changes)), initial=0))


@contextmanager
def _profiled() -> Iterator[Any]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with quietly(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        yield profile


def _block_at(of_address: dict[int, list[_Block]], address: int, moment: int) -> list[_Block]:
    """Return the block that was at an address; none if it was allocated before the step."""
    blocks = of_address.get(address, [])
    place = bisect.bisect(blocks, moment, key=lambda block: block.start) - 1
    return blocks[place : place + 1] if place >= 0 and moment < blocks[place].end else []
