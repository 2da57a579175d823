"""The heap while activations are packed: a part of what a step frees serves the next one.

glibc takes tensors from its heap up to a size that it learns from those it has freed, 32 MiB at most; larger ones it
maps by themselves. When more is free at the end of the heap than it has learned to keep, 64 MiB at most, it returns all
of it, and each step of a training run faults it in again, page by page. With packed activations little of a process
lives long, and what is free at the end of the heap is in use again soon.

So both sizes are set when the first activation on the CPU is about to be packed by kernels: up to 128 MiB that are free
at the end of the heap stay, and tensors from 32 MiB on are mapped, and returned as soon as they are freed, unless free
memory of the heap holds them. Mapping smaller ones would leave fewer gaps, but a step would fault them in again: from
8 MiB on, that costs ResNet-50 on images of 224x224 a fifth of a step.

The heap is left as it is where the environment says so: `BREVACT_MALLOPT=0`, or settings of glibc's own that concern
these sizes (`MALLOC_TRIM_THRESHOLD_`, `GLIBC_TUNABLES`, ...). What a program has set by `mallopt` is overridden. Other
allocators and other systems are left alone.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
from collections.abc import Mapping

VARIABLE = "BREVACT_MALLOPT"
SMALLEST_MAPPED = 32 << 20
"""Bytes from which a tensor is mapped by itself, if free memory of the heap does not hold it."""

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
    try:
        process, libc = ctypes.CDLL(None), ctypes.CDLL("libc.so.6")
        is_own = _address(process.malloc) == _address(libc.malloc)
        done = is_own and libc.mallopt(_M_MMAP_THRESHOLD, SMALLEST_MAPPED) == 1
        done = done and libc.mallopt(_M_TRIM_THRESHOLD, MOST_KEPT) == 1
    except (AttributeError, OSError):
        return False
    if done:
        _log.info(
            "glibc keeps up to %d MiB of the heap, and maps tensors from %d MiB on; %s=0 leaves it alone",
            *(MOST_KEPT >> 20, SMALLEST_MAPPED >> 20, VARIABLE),
        )
    return done


def _address(function: object) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
