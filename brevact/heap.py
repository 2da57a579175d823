"""The heap while activations are packed: freed memory serves the next tensors, large tensors return to the system.

glibc maps tensors by themselves from a size on that it learns from those it has freed, up to 32 MiB; smaller ones it
takes from its heap. What is free at the end of the heap it returns at once, and each step of a training run faults it
in again, page by page. With packed activations what lives long is small: a heap that keeps a part of what is free costs
no more memory at the peak, and tensors that are always mapped from 8 MiB on leave no gaps in it.

So both sizes are set when the first activation on the CPU is packed, unless the environment says otherwise:
`BREVACT_MALLOPT=0`, or settings of glibc's own (`MALLOC_TRIM_THRESHOLD_`, `GLIBC_TUNABLES`, ...). Other allocators and
other systems are left alone.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
from collections.abc import Mapping

VARIABLE = "BREVACT_MALLOPT"
SMALLEST_MAPPED = 8 << 20
"""Bytes from which a tensor is mapped by itself, and returned when it is freed."""

MOST_KEPT = 128 << 20
"""Bytes that may be free at the end of the heap."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
_log = logging.getLogger("brevact")


def is_left_alone(environment: Mapping[str, str]) -> bool:
    """Whether an environment says how the heap is to be.

    Args:
        environment: variables by name.
    """
    return (
        environment.get(VARIABLE) == "0"
        or any(name in environment for name in _SETTINGS)
        or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
    )


@functools.cache
def keep_free_memory() -> bool:
    """Set both sizes, once in a process; return whether they were set."""
    if platform.libc_ver()[0] != "glibc" or is_left_alone(os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    done = bool(mallopt(_M_MMAP_THRESHOLD, SMALLEST_MAPPED)) and bool(mallopt(_M_TRIM_THRESHOLD, MOST_KEPT))
    _log.info("glibc maps tensors from 8 MiB on and keeps up to 128 MiB of the heap; %s=0 leaves it alone", VARIABLE)
    return done
