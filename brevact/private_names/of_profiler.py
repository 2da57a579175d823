"""What torch's profiler records of memory: each allocation by itself, which it does not document."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Allocation(NamedTuple):
    """A block that PyTorch's allocator has handed out (bytes positive) or taken back (negative)."""

    time: int
    """Nanoseconds since the epoch, as of `time.time_ns`."""
    address: int
    nbytes: int


_LEVEL = "KINETO_LOG_LEVEL"
_one_at_a_time = threading.RLock()  # two profilers in two threads crash the process


@contextmanager
def quietly() -> Iterator[None]:
    """Let the profiler begin without lines on the terminal, unless the user has set the level of its log.

    Threads wait for each other.
    """
    with _one_at_a_time:
        is_set = _LEVEL in os.environ
        os.environ.setdefault(_LEVEL, "99")  # read once a process
        try:
            yield
        finally:
            if not is_set:
                os.environ.pop(_LEVEL, None)


def allocations(profile: Any) -> Iterator[int]:
    """Yield the bytes of each allocation that a finished ``torch.profiler.profile`` has seen, freed ones negative."""
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            yield event.nbytes()


def allocations_in_time(profile: Any, device: str) -> list[Allocation]:
    """Return the allocations of a finished ``torch.profiler.profile`` on devices of a kind, oldest first."""
    found, pending = [], list(profile.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag.name == "Allocation" and event.extra_fields.device.type == device:
            fields = event.extra_fields
            found.append(Allocation(event.start_time_ns, fields.ptr, fields.alloc_size))
    return sorted(found, key=lambda each: each.time)
