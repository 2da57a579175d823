"""The resident memory of this process, which Linux alone tells in the way that these benchmarks need."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path

_STATM = Path("/proc/self/statm")


def return_free_memory() -> None:
    """Hand freed memory back to the system; does nothing where the C library cannot."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def resident_bytes() -> int | None:
    """Resident set of this process, after returning free memory to the system; None where it is not known."""
    if not _STATM.exists():
        return None
    gc.collect()
    return_free_memory()
    return int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
