"""Whether the package tunes the memory of its process: `set_heap_tuning`."""

from __future__ import annotations

from brevact.heap import Tuning
from brevact.large_pages import ask_for_large_pages
from brevact.quantizers.brief import brief


def set_heap_tuning(enabled: bool) -> bool:
    """Let the package tune the memory of the process, as it does by default, or leave all of it alone.

    The heap is glibc's; other allocators (`LD_PRELOAD`, musl, macOS) are never touched. Call it right after the import:
    sizes that the first training step has set stay, and PyTorch decides on large pages once, at its first tensor of
    2 MiB.

    >>> import brevact
    >>> before = brevact.set_heap_tuning(False)
    >>> brevact.set_heap_tuning(before)
    False

    Args:
        enabled: False sets no sizes (`mallopt`), returns no free memory to the system (`malloc_trim`), asks for no
            large pages for decoded tensors (`madvise`), and takes `THP_MEM_ALLOC_ENABLE` back, which the import sets
            where it is not set.

    Returns:
        What was so before.

    Raises:
        TypeError: `enabled` is no bool.
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled: got {brief(enabled)} of type {type(enabled).__name__}; accepted are True and False")
    before, Tuning.is_on = Tuning.is_on, enabled
    ask_for_large_pages(enabled)
    return before
