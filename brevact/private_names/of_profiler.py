"""What torch's profiler records of memory: each allocation by itself, which it does not document."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LEVEL = "KINETO_LOG_LEVEL"


@contextmanager
def quietly() -> Iterator[None]:
    """Let the profiler begin without lines on the terminal, unless the user has set the level of its log."""
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
