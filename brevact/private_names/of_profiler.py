"""What torch's profiler records of memory: each allocation by itself, which it does not document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def allocations(profile: Any) -> Iterator[int]:
    """Yield the bytes of each allocation that a finished ``torch.profiler.profile`` has seen, freed ones negative."""
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            yield event.nbytes()
