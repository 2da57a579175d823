"""An allocator for the process whose freed memory is reused.

PyTorch's tensors leave gaps in glibc's heap that the next ones do not fit into (`brevact.heap`); other allocators have
none, but must be loaded when a process starts.
"""

from __future__ import annotations

import ctypes.util
from importlib import metadata
from pathlib import Path

#: Libraries by the names of their allocators.
ALLOCATORS = {"mimalloc": "mimalloc", "jemalloc": "jemalloc", "tcmalloc": "tcmalloc_minimal"}


def mimalloc() -> str | None:
    """Return the path or name of mimalloc's shared library for LD_PRELOAD; None if there is none here."""
    try:
        files = metadata.files("cmeel-mimalloc") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "libmimalloc.so":
            return str(Path(str(file.locate())).resolve())
    return ctypes.util.find_library("mimalloc")


def allocator_in_use() -> str:
    """Return the name of this process's preloaded allocator; "" for the C library's own."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return next((name for name, library in ALLOCATORS.items() if f"lib{library}" in maps), "")
