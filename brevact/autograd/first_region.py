"""Changes to the process that are made before its first region that packs, and not at the import of brevact."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

#: Functions that are still to run, in order.
waiting: list[Callable[[], None]] = []
#: Functions that wait for another library: by its module, a name in it, and the function.
waiting_for: dict[str, tuple[str, Callable[[], None]]] = {}
_lock = threading.Lock()


def before_first_region(function: Callable[[], None]) -> None:
    """Run a function once in this process, before the next region that packs is entered.

    Args:
        function: takes no arguments; its changes hold from the first forward in a region on.
    """
    waiting.append(function)


def prepare() -> None:
    """Run the functions that wait. Other threads that enter a region wait for them."""
    with _lock:
        while waiting:
            waiting[0]()
            del waiting[0]


def when_imported(module: str, name: str, function: Callable[[], None]) -> None:
    """Run a function once in this process, before the first region that packs while a module is imported.

    Args:
        module: its path; nobody imports it for this.
        name: attribute that the module must have by then, so that it is not half imported, or another release.
        function: takes no arguments; its changes hold from the first forward in that region on.
    """
    waiting_for[module] = name, function


def prepare_libraries() -> None:
    """Run the functions whose modules are imported."""
    with _lock:
        for module, (name, function) in list(waiting_for.items()):
            if hasattr(sys.modules.get(module), name):
                del waiting_for[module]
                function()
