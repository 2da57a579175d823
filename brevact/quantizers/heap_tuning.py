"""Whether the package tunes the memory of its process: `set_heap_tuning`."""

from __future__ import annotations

from brevact.heap import Tuning, ask_for_large_pages
from brevact.quantizers.checks import check_bool


def set_heap_tuning(enabled: bool) -> bool:
    """Turn the package's tuning of process memory on (the default) or off.

    Only glibc's heap is tuned, never another allocator (`LD_PRELOAD`, musl, macOS). Call this function right after the
    import: sizes that the first training step sets stay set, and PyTorch decides on large pages once, at its first
    tensor of 2 MiB.

    >>> import brevact
    >>> before = brevact.set_heap_tuning(False)
    >>> brevact.set_heap_tuning(before)
    False

    Args:
        enabled: False sets no sizes (`mallopt`), returns no free memory to the system (`malloc_trim`), and unsets
            `THP_MEM_ALLOC_ENABLE` if the import has set it.

    Returns:
        The former setting.

    Raises:
        TypeError: `enabled` is no bool.
    """
    check_bool("enabled", enabled)
    before, Tuning.is_on = Tuning.is_on, enabled
    ask_for_large_pages(enabled)
    return before
