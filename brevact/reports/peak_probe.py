"""Measure the parts of a step's memory at its peak: `peak_memory_of`.

Torch's profiler records each block that PyTorch allocates, with its address and time. After the forward pass, the
graph's nodes show which blocks are saved; hooks on them see activation gradients, and Python's profiling hook sees when
tensors are decoded. The passes themselves run unchanged.
"""

from __future__ import annotations

import bisect
import gc
import itertools
import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from brevact.autograd.decoders import SavedByHook
from brevact.autograd.saved import Decoder
from brevact.private_names.of_graph import function_of, saved_by
from brevact.private_names.of_profiler import Allocation, allocations_in_time, quietly
from brevact.reports.peak import PeakMemory
from brevact.reports.saved_in_file import Life, saved_in_file

#: Decoder methods that return an activation, or its product with a gradient.
_DECODING = "decode", "decode_through", "multiply", "multiply_"
#: Modules whose Functions pack: this package, and those that torch.compile generates.
_PACKING = "brevact", "torch._functorch"


@dataclass(frozen=True, eq=False)
class _Block:
    """A block of memory that PyTorch allocates in the step; times in nanoseconds since the epoch."""

    start: int
    end: float
    nbytes: int


class _Blocks:
    def __init__(self, allocations: list[Allocation]) -> None:
        self._of: dict[int, list[_Block]] = {}
        self._frees_before: list[tuple[int, int]] = []  # of blocks allocated before the step
        for each in allocations:
            blocks = self._of.setdefault(each.address, [])
            if each.nbytes > 0:
                blocks.append(_Block(each.time, math.inf, each.nbytes))
            elif blocks:
                blocks[-1] = replace(blocks[-1], end=each.time)
            else:
                self._frees_before.append((each.time, each.nbytes))
        self._add_up()

    def _add_up(self) -> None:
        changes: list[tuple[float, int]] = [*self._frees_before]
        for block in self:
            changes += (block.start, block.nbytes), (block.end, -block.nbytes)
        changes.sort()
        self._times = [moment for moment, _ in changes]
        self._totals = list(itertools.accumulate(nbytes for _, nbytes in changes))

    def of_memory(self, lives: Iterable[Life]) -> _Blocks:
        """Return the blocks as if tensors in the file had stayed in memory, without the copies read back."""
        gone = self.found(copy for life in lives for copy in life.copies)
        ends: dict[_Block | None, float] = {}
        for life in lives:
            block = self.find(life.address, life.saved)
            ends[block] = max(life.end, ends.get(block, 0))
        found = _Blocks([])
        found._frees_before = self._frees_before
        for address, blocks in self._of.items():
            left = [block for block in blocks if block not in gone]
            found._of[address] = [replace(block, end=max(block.end, ends.get(block, 0))) for block in left]
        found._add_up()
        return found

    def find(self, address: int, moment: int) -> _Block | None:
        blocks = self._of.get(address, [])
        place = bisect.bisect(blocks, moment, key=lambda block: block.start) - 1
        return blocks[place] if place >= 0 and moment < blocks[place].end else None

    def found(self, places: Iterable[tuple[int, int]]) -> set[_Block]:
        """Return the blocks at these addresses and times, without those from before the step."""
        return {block for place in places if (block := self.find(*place)) is not None}

    def __iter__(self) -> Iterator[_Block]:
        for blocks in self._of.values():
            yield from blocks

    def peak(self) -> tuple[int, float]:
        """Return the peak in bytes above the start, and its time."""
        most = max(self._totals, default=0)
        return (most, self._times[self._totals.index(most)]) if most > 0 else (0, 0)


@dataclass
class StepProbe:
    """Records addresses of one step's tensors, each with a time at which the tensor was alive."""

    packed: list[tuple[int, int]] = field(default_factory=list)
    unpacked: list[tuple[int, int]] = field(default_factory=list)
    weight_gradients: list[tuple[int, int]] = field(default_factory=list)
    activation_gradients: list[tuple[int, int]] = field(default_factory=list)
    decodings: list[tuple[int, int]] = field(default_factory=list)
    _leaves: list[Tensor] = field(default_factory=list)
    _began: int = 0
    _depth: int = 0

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a loss and record its tensors."""
        self._look_through(loss)
        codes = _decoding_codes()
        outer = sys.getprofile()

        def see(frame: FrameType, event: str, value: object) -> None:
            if frame.f_code in codes:
                self._see(event)

        sys.setprofile(see)
        try:
            loss.backward()
        finally:
            _profile_by(outer)
        now = time.time_ns()
        for leaf in self._leaves:
            if leaf.grad is not None:
                self.weight_gradients += _places((leaf.grad,), now)

    def _see(self, event: str) -> None:
        if event == "call":
            self._began = self._began if self._depth else time.time_ns()
            self._depth += 1
        elif event == "return" and self._depth:
            self._depth -= 1
            if not self._depth:
                self.decodings.append((self._began, time.time_ns()))

    def _look_through(self, loss: Tensor) -> None:
        """Record the graph's saved tensors, and hook its nodes to record gradients."""
        pending: list[Any] = [loss.grad_fn]
        seen = set[Any]()
        now = time.time_ns()
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            pending += (each for each, _ in node.next_functions)
            if node.name() == "torch::autograd::AccumulateGrad":
                self._leaves.append(node.variable)
                continue
            node.register_prehook(self._note_gradients)
            may_pack = function_of(node).startswith(_PACKING)
            for held in saved_by(node):
                by_hook = isinstance(held, SavedByHook)
                for x in _tensors_in(held):
                    is_packed = x.dtype is torch.uint8 and (may_pack or by_hook)
                    (self.packed if is_packed else self.unpacked).extend(_places((x,), now))

    def _note_gradients(self, gradients: tuple[Tensor | None, ...]) -> None:
        self.activation_gradients += _places(gradients, time.time_ns())


class Step(Protocol):
    """A training step: forward and backward pass; a probe runs the backward pass by :meth:`StepProbe.backward`."""

    def __call__(self, probe: StepProbe | None = None) -> object: ...


def _profile_by(profiler: Any) -> None:
    """Resume a profiler that `sys.getprofile` returned: cProfile's is not callable up to Python 3.11."""
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        profiler.enable()


def _tensors_in(held: Any) -> Iterator[Tensor]:
    """Yield a saved value's tensors: itself, or those in the result of this package's pack hook."""
    handles = held.handles if isinstance(held, SavedByHook) else held if isinstance(held, tuple) else (held,)
    yield from (x for x in handles if isinstance(x, Tensor))


def _places(tensors: Iterable[Tensor | None], moment: int) -> list[tuple[int, int]]:
    """Return the addresses of the storages of tensors, with a moment; those without storage have none."""
    found = []
    for x in tensors:
        try:
            if x is not None:
                found.append((x.untyped_storage().data_ptr(), moment))
        except (NotImplementedError, RuntimeError, ValueError):
            continue
    return found


def _decoding_codes() -> set[CodeType]:
    found, pending = set[CodeType](), [Decoder]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        methods = (vars(kind).get(name) for name in _DECODING)
        found |= {method.__code__ for method in methods if isinstance(method, FunctionType)}
    return found


def peak_memory_of(step: Step) -> PeakMemory:
    """Measure the parts of a CPU step's peak; the step runs twice, first to warm up (compiled kernels and caches)."""
    step(None)
    gc.collect()
    probe = StepProbe()
    return _parts(_Blocks(_allocations(step, probe, "cpu")), probe)


def peak_memory_by_file(step: Step, model: nn.Module, device: str) -> PeakMemory:
    """Measure the parts of a full-precision step's peak, in the memory of a packed one; the step runs twice.

    Saved tensors, except weights, go to a file, and count as if they were in memory; `device` is the device's type.
    """
    with saved_in_file(model):
        step(None)
    gc.collect()
    probe = StepProbe()
    with saved_in_file(model) as saved:
        blocks = _Blocks(_allocations(step, probe, device)).of_memory(saved.lives)
    probe.unpacked += ((life.address, life.saved) for life in saved.lives)
    return _parts(blocks, probe)


def _allocations(step: Step, probe: StepProbe, device: str) -> list[Allocation]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with quietly(), torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step(probe)
    return allocations_in_time(profile, device)


def _parts(blocks: _Blocks, probe: StepProbe) -> PeakMemory:
    """Divide the blocks that are alive at the peak: each counts in the first part that contains it."""
    most, moment = blocks.peak()
    left = {block for block in blocks if block.start <= moment < block.end}
    parts = {}
    for name, chosen in {
        "packed": blocks.found(probe.packed),
        "unpacked": blocks.found(probe.unpacked),
        "weight_gradients": blocks.found(probe.weight_gradients),
        "activation_gradients": blocks.found(probe.activation_gradients),
        "decoded": {block for block in left if any(start <= block.start <= end for start, end in probe.decodings)},
    }.items():
        parts[name] = sum(block.nbytes for block in left & chosen)
        left -= chosen
    return PeakMemory(**parts, other=most - sum(parts.values()))
