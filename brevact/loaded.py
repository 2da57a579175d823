"""The memory that importing this package and loading its kernels added to the process, where Linux tells."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


class _Counted:
    """What was counted in this process."""

    nbytes = 0


def resident_bytes() -> int:
    """Return the resident bytes of this process, those of files included.

    Raises:
        OSError: not Linux, or no /proc.
    """
    with open("/proc/self/statm", "rb", buffering=0) as statm:  # anew: threads and forks share no file
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def loaded_bytes() -> int | None:
    """Return the resident bytes that imports and kernels of this package added so far; None where nothing tells."""
    try:
        resident_bytes()
    except OSError:
        return None
    return _Counted.nbytes


@contextmanager
def counted() -> Iterator[None]:
    """Count the resident bytes that a block adds as loaded by this package."""
    try:
        before = resident_bytes()
    except OSError:
        yield
        return
    try:
        yield
    finally:
        _Counted.nbytes += max(resident_bytes() - before, 0)
