"""What a process changes before its first region that packs, and not when it imports brevact."""

from __future__ import annotations

import threading
from collections.abc import Callable

#: Functions that are still to run, in order.
waiting: list[Callable[[], None]] = []
_lock = threading.Lock()


def before_first_region(function: Callable[[], None]) -> None:
    """Run a function once in this process, before the next region that packs is entered.

    Args:
        function: takes nothing; what it changes is there for the first forward in a region.
    """
    waiting.append(function)


def prepare() -> None:
    """Run the functions that wait. Other threads that enter a region wait for them."""
    with _lock:
        while waiting:
            waiting[0]()
            del waiting[0]
