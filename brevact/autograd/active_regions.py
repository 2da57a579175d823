"""The regions that a thread is in."""

from __future__ import annotations

import threading
from typing import Any


class _Active(threading.local):
    def __init__(self) -> None:
        self.regions: list[Any] = []  # outermost first
        self.disabled = 0


active = _Active()


def current_region() -> Any:
    """Return the innermost ``Region`` of this thread, or None."""
    return active.regions[-1] if active.regions else None
