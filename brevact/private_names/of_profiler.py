"""The torch profiler's undocumented memory records: single allocations."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LEVEL = "KINETO_LOG_LEVEL"
_one_at_a_time = threading.RLock()  # two profilers in two threads crash the process


@contextmanager
def quietly() -> Iterator[None]:
    """Start the profiler without terminal output unless the user set its log level; threads wait for each other."""
    with _one_at_a_time:
        is_set = _LEVEL in os.environ
        os.environ.setdefault(_LEVEL, "99")  # read once per process
        try:
            yield
        finally:
            if not is_set:
                os.environ.pop(_LEVEL, None)


def allocations(profile: Any) -> Iterator[int]:
    """Yield the bytes of each allocation in a finished ``torch.profiler.profile``, negative for freed ones."""
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            yield event.nbytes()
