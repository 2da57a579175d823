"""Process-wide changes made before the first region that packs, not at the import of brevact."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

#: Functions still to run, in order.
waiting: list[Callable[[], None]] = []
#: Functions that wait for another library, by its module: a name in the module, and the function.
waiting_for: dict[str, tuple[str, Callable[[], None]]] = {}
_lock = threading.Lock()


def before_first_region(function: Callable[[], None]) -> None:
    """Run a function once in this process, before the next region that packs is entered."""
    waiting.append(function)


def prepare() -> None:
    """Run the waiting functions; other threads that enter a region block meanwhile."""
    with _lock:
        while waiting:
            waiting[0]()
            del waiting[0]


def when_imported(module: str, name: str, function: Callable[[], None]) -> None:
    """Run a function once, before the first packing region after ``module`` is imported and has attribute ``name``."""
    waiting_for[module] = name, function


def prepare_libraries() -> None:
    with _lock:
        for module, (name, function) in list(waiting_for.items()):
            if hasattr(sys.modules.get(module), name):
                del waiting_for[module]
                function()
