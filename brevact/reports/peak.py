"""Peaks of the bytes that PyTorch allocates in a step, above those at its start."""

from __future__ import annotations

import bisect
import gc
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from brevact.private_names.of_profiler import allocations, allocations_in_time, quietly
from brevact.reports.saved_in_file import saved_in_file


def peak_of(step: Callable[[], object], device: torch.device) -> int:
    """Return the peak of a step; the step runs twice."""
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
    """Return the peak of a full-precision step, measured in the memory of a packed one; the step runs twice.

    Saved tensors, except weights, go to a file, and count as if they were in memory.
    """
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
