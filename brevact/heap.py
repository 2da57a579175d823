"""The heap while activations are packed: what is not stored must not stay resident.

glibc takes tensors from its heap up to a size that it learns from those it has freed, 32 MiB at most; larger ones it
maps by themselves. When more is free at the end of the heap than it has learned to keep, 64 MiB at most, it returns all
of it, and each step of a training run faults it in again, page by page. So both sizes are set when the first activation
on the CPU is about to be packed by kernels: up to 128 MiB that are free at the end of the heap stay, and tensors from
32 MiB on are mapped, and returned as soon as they are freed, unless free memory of the heap holds them.

In between, freed activations do not always serve the next ones. PyTorch asks for aligned blocks; glibc looks for a
free block that is larger than what was asked, and hands the rest back as small pieces, which other requests take. A
block that an activation leaves is then too small for the next one, and the heap grows. So the process is looked at
whenever kernels have passed over 4 million elements: where more is resident than was ever in use, and 256 MiB, what is
free inside of the heap is returned to the system (`malloc_trim`).

`brevact.set_heap_tuning(False)` turns both off, and so do settings of glibc's own in the environment that concern
these sizes (`MALLOC_TRIM_THRESHOLD_`, `GLIBC_TUNABLES`, ...). What a program has set by `mallopt` is overridden. Other
allocators and other systems are left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import platform
from collections.abc import Mapping

SMALLEST_MAPPED = 32 << 20
"""Bytes from which a tensor is mapped by itself, if free memory of the heap does not hold it."""

MOST_KEPT = 128 << 20
"""Bytes that may be free at the end of the heap."""

LOOKED_AFTER = 4 << 20
"""Elements of activations that kernels pack or decode between two looks at the process."""

MOST_FREE = 256 << 20
"""Bytes of the heap that may be free and resident where it is larger than what was ever in use."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
_log = logging.getLogger("brevact")


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of <malloc.h>."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks"),
            "keepcost",
        )
    )


class _Heap:
    """What is free and resident in the heap of this process, and its return to the system.

    An AttributeError or an OSError says that it cannot be known: glibc before 2.33, or no /proc.
    """

    def __init__(self, libc: ctypes.CDLL) -> None:
        self._info, self._trim = libc.mallinfo2, libc.malloc_trim
        self._info.restype = _Mallinfo
        self._trim.argtypes, self._trim.restype = (ctypes.c_size_t,), ctypes.c_int
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._beside = self._resident() - self._in_use()
        self._most_in_use = 0

    def _resident(self) -> int:
        """Return the bytes of this process that are resident, without those of files: data may be mapped."""
        with open("/proc/self/statm", "rb", buffering=0) as statm:  # anew: threads and forks share no file
            _, resident, of_files, *_ = statm.read().split()
        return (int(resident) - int(of_files)) * self._page

    def _in_use(self) -> int:
        info = self._info()
        return info.uordblks + info.hblkhd

    def look(self) -> None:
        """Return free memory to the system, if the process is larger than it was ever used for."""
        in_use = self._in_use()
        self._most_in_use = max(self._most_in_use, in_use)
        if self._resident() - self._beside > self._most_in_use + MOST_FREE:
            self._trim(MOST_KEPT)
            # What stays is of others, such as Python's objects: it is no reason to return memory again and again.
            self._beside = max(self._beside, self._resident() - self._in_use() - MOST_KEPT)


class Tuning:
    """What this process does to its heap."""

    is_on = True
    passed = 0
    heap: _Heap | None = None


def is_left_alone(environment: Mapping[str, str]) -> bool:
    """Whether an environment says how the heap is to be.

    Args:
        environment: variables by name.
    """
    return any(name in environment for name in _SETTINGS) or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")


def note_passed(elements: int) -> None:
    """Take note of elements that a kernel packs or decodes, and look at the process now and then.

    Args:
        elements: their number.
    """
    Tuning.passed += elements
    if Tuning.passed >= LOOKED_AFTER:
        Tuning.passed = 0
        heap = Tuning.heap
        if heap is not None and Tuning.is_on:
            try:
                heap.look()
            except OSError:  # no file can be opened any more: training goes on without
                Tuning.heap = None


def tune_heap() -> bool:
    """Set both sizes, once in a process, unless that is turned off; return whether they are set."""
    return Tuning.is_on and _tune()


@functools.cache
def _tune() -> bool:
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
        with contextlib.suppress(AttributeError, OSError):
            Tuning.heap = _Heap(libc)
        _log.info(
            "glibc keeps up to %d MiB of the heap, maps tensors from %d MiB on, and returns what more is free "
            "(brevact.set_heap_tuning(False) leaves it alone); with mimalloc the process grows half as much: "
            "python -m brevact run SCRIPT",
            *(MOST_KEPT >> 20, SMALLEST_MAPPED >> 20),
        )
    return done


def _address(function: object) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
