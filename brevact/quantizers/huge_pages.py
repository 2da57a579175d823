"""Huge pages for large results on the CPU: fresh memory costs a fault a page, more than decoding into it."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

from torch import Tensor

from brevact.heap import LARGE_PAGE, MADV_HUGEPAGE, SMALLEST_MAPPED, Tuning

SMALLEST = SMALLEST_MAPPED
"""Bytes from which glibc maps every allocation by itself, so that advice on it concerns no other memory."""


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


def prefer_huge_pages(x: Tensor) -> None:
    """Ask the kernel to back the memory of a tensor that was not written with huge pages; no more than a hint."""
    nbytes = x.untyped_storage().nbytes()
    if nbytes < SMALLEST or not Tuning.is_on or not x.is_cpu or (madvise := _madvise()) is None:
        return
    start, stop = x.data_ptr(), x.data_ptr() + nbytes
    first = -(-start // LARGE_PAGE) * LARGE_PAGE
    madvise(first, (stop - first) // LARGE_PAGE * LARGE_PAGE, MADV_HUGEPAGE)
