"""Whether the package tunes the heap of its process: `set_heap_tuning`."""

from __future__ import annotations

from brevact.heap import Tuning
from brevact.quantizers.brief import brief


def set_heap_tuning(enabled: bool) -> bool:
    """Let the package tune the heap of the process, as it does by default, or leave the heap alone.

    The heap is glibc's; other allocators (`LD_PRELOAD`, musl, macOS) are never touched. Call it before the first
    training step: sizes that are set stay.

    >>> import brevact
    >>> before = brevact.set_heap_tuning(False)
    >>> brevact.set_heap_tuning(before)
    False

    Args:
        enabled: False sets no sizes (`mallopt`) and returns no free memory to the system (`malloc_trim`).

    Returns:
        What was so before.

    Raises:
        TypeError: `enabled` is no bool.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled: got {brief(enabled)} of type {type(enabled).__name__}; accepted are True and False")
    before, Tuning.is_on = Tuning.is_on, enabled
    return before
