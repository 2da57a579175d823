"""The heap while activations are packed: memory that holds nothing must not stay resident.

glibc takes tensors from its heap up to a size that it learns from those it has freed, 32 MiB at most; larger ones it
maps by themselves. When more is free at the end of the heap than it has learned to keep, 64 MiB at most, it returns all
of it, and each step of a training run faults it in again, page by page. So both sizes are set when the first activation
on the CPU is about to be packed by kernels: up to 128 MiB that are free at the end of the heap stay, and tensors from
32 MiB on are mapped, and returned as soon as they are freed, unless free memory of the heap holds them.

In between, freed activations do not always serve the next ones. PyTorch asks for aligned blocks; glibc looks for a
free block that is larger than what was asked, and hands the rest back as small pieces, which other requests take. A
block that an activation leaves is then too small for the next one, and the heap grows. So the process is looked at
whenever kernels have passed over 4 million elements, or as many as the last look found room for, up to 16 million:
where 96 MiB more are resident than were ever in use, free blocks inside of the heap are returned to the system, until
no more than 64 are.

`malloc_trim` returns every free page, and each of them costs a page fault when it is used again, also where a large
page (2 MiB) was before. So free blocks are first taken by `malloc`, the largest ones first, and returned in place
(`madvise`): of those of more than 8 MiB only whole large pages, which one fault brings back. What is too much beyond
that is left to `malloc_trim`.

Near the limit of the container, or of the machine, no more may be free than what is left to it (`brevact.room`).

`brevact.set_heap_tuning(False)` turns all of that off, and so do settings of glibc's own in the environment that
concern these sizes (`MALLOC_TRIM_THRESHOLD_`, `GLIBC_TUNABLES`, ...). What a program has set by `mallopt` is
overridden. Other allocators and other systems are left alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import platform
from collections.abc import Mapping
from typing import NamedTuple

from brevact.room import memory_left

SMALLEST_MAPPED = 32 << 20
"""Bytes from which a tensor is mapped by itself, if free memory of the heap does not hold it."""

MOST_KEPT = 128 << 20
"""Bytes that may be free at the end of the heap."""

LOOKED_AFTER = 4 << 20
"""Elements of activations that kernels pack or decode between two looks at the process."""

MOST_UNSEEN = 16 << 20
"""Such elements where the last look found room for as many, in float32, before there is memory to return."""

MOST_FREE = 96 << 20
"""Bytes of the heap that may be free and resident where it is larger than its use has ever been."""

FEW_FREE = 16 << 20
"""Bytes that may be free, however near the process is to its limit."""

MORE_RETURNED = 32 << 20
"""Bytes that are returned beyond those that are too many, or the next look would find too many again."""

LARGE_PAGE = 2 << 20
"""Bytes of a large page of x86-64 and of most other processors."""

MADV_DONTNEED, MADV_HUGEPAGE = 4, 14  # of <sys/mman.h>

_SMALLEST_GAP = 1 << 20  # free blocks of fewer bytes are left to malloc_trim
_SMALLEST_GAP_OF_LARGE_PAGES = 8 << 20
_LARGEST_GAP = 1 << 30

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_SETTINGS = (
    *("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_"),
    "MALLOC_PERTURB_",  # glibc writes to all of a block that it hands out: looking for gaps would fill 1 GiB
)
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
        self._libc = libc
        libc.mallinfo2.restype = _Mallinfo
        libc.malloc_trim.argtypes, libc.malloc_trim.restype = (ctypes.c_size_t,), ctypes.c_int
        libc.malloc.argtypes, libc.malloc.restype = (ctypes.c_size_t,), ctypes.c_void_p
        libc.free.argtypes, libc.free.restype = (ctypes.c_void_p,), None
        libc.sbrk.argtypes, libc.sbrk.restype = (ctypes.c_ssize_t,), ctypes.c_void_p
        libc.malloc_usable_size.argtypes, libc.malloc_usable_size.restype = (ctypes.c_void_p,), ctypes.c_size_t
        libc.madvise.argtypes, libc.madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._start = libc.sbrk(0) - libc.mallinfo2().arena  # other threads' heaps lie above sbrk(0)
        self._beside = self._resident() - self._in_use()
        self._most_in_use = 0

    def _resident(self) -> int:
        """Return the bytes of this process that are resident, without those of files: data may be mapped."""
        with open("/proc/self/statm", "rb", buffering=0) as statm:  # anew: threads and forks share no file
            _, resident, of_files, *_ = statm.read().split()
        return (int(resident) - int(of_files)) * self._page

    def _in_use(self) -> int:
        info = self._libc.mallinfo2()
        return info.uordblks + info.hblkhd

    def look(self) -> int:
        """Return free memory to the system, if the process is larger than it was ever used for, or nearly full.

        Returns:
            Bytes by which the process may have grown before there is something to return; 0 where that is not known.
        """
        in_use, resident = self._in_use(), self._resident()
        self._most_in_use = max(self._most_in_use, in_use)
        free = resident - self._beside - in_use
        if free <= FEW_FREE:
            return 0
        left = memory_left()
        if free > left:
            self._trim()
            return 0
        most = self._beside + self._most_in_use + MOST_FREE
        if resident > most:
            self._return_gaps(most - MORE_RETURNED)
            if self._resident() > most - FEW_FREE:  # too little was in large blocks
                self._trim()
        return min(most - resident, (left - free) // 2)  # memory that is taken is no longer left

    def _trim(self) -> None:
        self._libc.malloc_trim(0)
        # What stays is of others, such as Python's objects: it is no reason to return memory again and again.
        self._beside = max(self._beside, self._resident() - self._in_use() - FEW_FREE)

    def _return_gaps(self, enough: int) -> None:
        """Return free blocks of the heap to the system, the largest first, as whole large pages where they are large.

        Args:
            enough: resident bytes of the process at which no more is returned.
        """
        libc, taken = self._libc, []
        size = min(_LARGEST_GAP, libc.mallinfo2().fordblks)
        if not _can_map(size):  # nor could malloc, which then moves this thread to another arena for good
            return
        end = libc.sbrk(0)
        try:
            libc.mallopt(_M_MMAP_THRESHOLD, _SMALLEST_GAP)  # or the heap would grow by a block that it does not have
            while size >= _SMALLEST_GAP:
                if block := libc.malloc(size):
                    if self._start <= block <= end - size:  # up to its former end: it grows where no mapping is left
                        taken.append(block)
                        continue
                    libc.free(block)  # mapped by itself, or grown: no free block is as large
                size -= size // 8
            for block in taken:
                if self._resident() <= enough:
                    break
                usable = libc.malloc_usable_size(block)
                unit = self._page if usable <= _SMALLEST_GAP_OF_LARGE_PAGES else LARGE_PAGE
                start, stop = -(-block // unit) * unit, (block + usable) // unit * unit
                if start < stop:
                    libc.madvise(start, stop - start, MADV_DONTNEED)
                    if unit == LARGE_PAGE:
                        libc.madvise(start, stop - start, MADV_HUGEPAGE)
        finally:
            libc.mallopt(_M_MMAP_THRESHOLD, SMALLEST_MAPPED)
            for block in taken:
                libc.free(block)


class Tuning:
    """What this process does to its heap."""

    is_on = True
    passed = 0
    """Elements that kernels have packed or decoded since the last look."""
    next_look = LOOKED_AFTER
    """Such elements after which the process is looked at again."""
    heap: _Heap | None = None


def is_left_alone(environment: Mapping[str, str]) -> bool:
    """Whether an environment says how the heap is to be.

    Args:
        environment: variables by name.
    """
    return any(name in environment for name in _SETTINGS) or "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")


def count(numel: int) -> None:
    """Count elements of activations that are computed beside those which kernels pass over: layers are run again."""
    Tuning.passed += numel
    if Tuning.passed >= Tuning.next_look:
        look()


def look() -> None:
    """Look at the process, now that kernels have packed or decoded enough elements (`Tuning.next_look`)."""
    Tuning.passed = 0
    heap = Tuning.heap
    if heap is not None and Tuning.is_on:
        try:
            Tuning.next_look = min(max(heap.look() // 4, LOOKED_AFTER), MOST_UNSEEN)
        except OSError:  # no file can be opened any more: training goes on without
            Tuning.heap = None


def tune_heap() -> bool:
    """Set both sizes, once in a process, unless that is turned off; return whether they are set."""
    return Tuning.is_on and _tune()


@functools.cache
def _tune() -> bool:
    if is_left_alone(os.environ) or (libc := _glibc()) is None:
        return False
    done = libc.mallopt(_M_MMAP_THRESHOLD, SMALLEST_MAPPED) == 1 and libc.mallopt(_M_TRIM_THRESHOLD, MOST_KEPT) == 1
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


def _glibc() -> ctypes.CDLL | None:
    """Return glibc if this process allocates by it; None for another C library or a preloaded allocator.

    PyTorch asks posix_memalign. The address of malloc is that of a stub in executables at fixed addresses, such as
    Debian's and Ubuntu's Python, whichever allocator there is.
    """
    if platform.libc_ver()[0] != "glibc":
        return None
    try:
        process, libc = ctypes.CDLL(None), ctypes.CDLL("libc.so.6")
        return libc if _address(process.posix_memalign) == _address(libc.posix_memalign) else None
    except (AttributeError, OSError):
        return None


class HeapSize(NamedTuple):
    """Bytes that glibc's malloc has in all of its heaps and mappings: in use, and free, resident or not."""

    in_use: int
    free: int


class HeapProbe:
    """Reads the sizes of glibc's heap, whether or not the package tunes it."""

    def __init__(self, libc: ctypes.CDLL) -> None:
        libc.mallinfo2.restype = _Mallinfo
        libc.malloc_trim.argtypes, libc.malloc_trim.restype = (ctypes.c_size_t,), ctypes.c_int
        self._libc = libc

    @classmethod
    def of_process(cls) -> HeapProbe | None:
        """Return a probe; None for another allocator, and glibc before 2.33."""
        libc = _glibc()
        return None if libc is None or not hasattr(libc, "mallinfo2") else cls(libc)

    def size(self) -> HeapSize:
        """Return the present sizes."""
        info = self._libc.mallinfo2()
        return HeapSize(info.uordblks + info.hblkhd, info.fordblks)

    def trim(self) -> None:
        """Return the pages of free blocks to the system."""
        self._libc.malloc_trim(0)


def _can_map(size: int) -> bool:
    """Whether this process may map so many bytes: limits, a full table of mappings or strict overcommit forbid it."""
    try:
        mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return False
    return True


def _address(function: object) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
