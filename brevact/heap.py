"""glibc's heap: free memory must not stay resident while activations are packed on the CPU.

The first use of a CPU kernel sets two thresholds: up to 128 MiB of free memory, which each step would fault in again,
stay at the heap's end, and tensors from 32 MiB on are mapped separately.

PyTorch allocates aligned blocks, and glibc gives the rest of a free block to others: the block that an activation frees
is too small for the next one, and the heap grows. So kernels check the process every 4 million elements, or as many as
the last check found room for. If 96 MiB more are resident than were ever in use, free blocks go back to the system: the
largest ones in place (`madvise`), those above 8 MiB as whole large pages; `malloc_trim` returns the rest.

PyTorch reads `THP_MEM_ALLOC_ENABLE` at its first tensor, before anything is packed, so importing `brevact` sets it
unless the program has: with small pages a step faults in many times as many, and takes longer.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

SMALLEST_MAPPED, MOST_KEPT, LARGE_PAGE = 32 << 20, 128 << 20, 2 << 20
LOOKED_AFTER, MOST_UNSEEN = 4 << 20, 16 << 20  # elements packed or decoded between two checks
MOST_FREE, FEW_FREE = 96 << 20, 16 << 20  # free and resident above the highest use so far; left to the next check
MORE_RETURNED = 32 << 20  # on top of the excess, or the next check would find excess again
MADV_DONTNEED, MADV_HUGEPAGE, _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = 4, 14, -1, -3  # of <sys/mman.h> and <malloc.h>
_log = logging.getLogger("brevact")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


class _Mallinfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


class Heap:
    """This process's heap; raises an AttributeError or an OSError if its state is unknown."""

    def __init__(self, libc: ctypes.CDLL) -> None:
        self.libc, size, address = libc, ctypes.c_size_t, ctypes.c_void_p
        libc.mallinfo2.restype = _Mallinfo
        for name, result, *arguments in (
            *(("malloc", address, size), ("free", None, address), ("malloc_usable_size", size, address)),
            *(("malloc_trim", ctypes.c_int, size), ("sbrk", address, ctypes.c_ssize_t)),
            ("madvise", ctypes.c_int, address, size, ctypes.c_int),
        ):
            function = getattr(libc, name)
            function.restype, function.argtypes = result, arguments
        maps = Path("/proc/self/maps").read_text()
        self.start = int(re.search(r"^(\w+)-.*\[heap\]$", maps, re.M)[1], 16)  # type: ignore[index]
        self.beside = self.resident() - self.in_use()  # resident memory outside malloc, such as Python's objects
        self.most = self.highest = 0  # bytes that may be resident, and that were

    def resident(self) -> int:
        with open("/proc/self/statm", "rb", buffering=0) as statm:  # reopened: threads and forks must not share a file
            _, resident, of_files, *_ = statm.read().split()
        return (int(resident) - int(of_files)) * mmap.PAGESIZE

    def in_use(self) -> int:
        return (info := self.libc.mallinfo2()).uordblks + info.hblkhd

    def look(self) -> int:
        """Return excess memory to the system; return the bytes by which the process may grow until the next check."""
        resident = self.resident()
        if resident > min(self.most, self.highest):  # in_use walks all free blocks
            self.highest = max(self.highest, resident)
            self.most = max(self.most, self.beside + self.in_use() + MOST_FREE)
        if resident > self.most:
            self.return_gaps(self.most - MORE_RETURNED)
            if self.resident() > self.most - FEW_FREE:  # large blocks held too little
                self.libc.malloc_trim(0)
                grown = max(0, self.resident() - self.in_use() - FEW_FREE - self.beside)
                self.beside, self.most = self.beside + grown, self.most + grown
        return self.most - resident

    def return_gaps(self, enough: int) -> None:
        """Return free blocks to the system, largest first, until at most `enough` bytes are resident."""
        libc, taken, size, end = self.libc, [], min(1 << 30, self.libc.mallinfo2().fordblks), self.libc.sbrk(0)
        try:  # malloc would move this thread to another arena for good if nothing can be mapped
            mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except OSError:
            return
        try:
            libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)  # or the heap would grow by a missing block
            while size >= 1 << 20:
                block = libc.malloc(size)
                if block and self.start <= block <= end - size:
                    taken.append(block)
                else:
                    libc.free(block)  # mapped separately, or heap grown: no free block is this large
                    size -= size // 8
            for block in taken:
                if self.resident() <= enough:
                    break
                stop = block + libc.malloc_usable_size(block)
                unit = mmap.PAGESIZE if stop - block <= 4 * LARGE_PAGE else LARGE_PAGE
                start = -(-block // unit) * unit
                if start < stop // unit * unit:
                    for advice in (MADV_DONTNEED, MADV_HUGEPAGE)[: 1 + (unit == LARGE_PAGE)]:
                        libc.madvise(start, stop // unit * unit - start, advice)
        finally:
            libc.mallopt(_M_MMAP_THRESHOLD, SMALLEST_MAPPED)
            for block in taken:
                libc.free(block)


class Tuning:
    """Heap state of this process: elements since the last check, and until the next one."""

    is_on, passed, next_look = True, 0, LOOKED_AFTER
    heap: Heap | None = None


def look() -> None:
    """Check the process, now that `Tuning.next_look` elements were packed, decoded or recomputed."""
    Tuning.passed = 0
    if Tuning.heap is not None and Tuning.is_on:
        try:
            Tuning.next_look = min(max(Tuning.heap.look() // 4, LOOKED_AFTER), MOST_UNSEEN)
        except OSError:  # no more files can be opened: train on without
            Tuning.heap = None


@functools.cache
def tune_heap() -> None:
    """Set both thresholds, once per process, if PyTorch allocates by glibc's `posix_memalign`."""
    if is_left_alone(os.environ) or platform.libc_ver()[0] != "glibc":
        return
    with contextlib.suppress(AttributeError, OSError, TypeError):  # glibc before 2.33, no /proc, no heap
        libc = ctypes.CDLL("libc.so.6")
        own = {ctypes.cast(each.posix_memalign, ctypes.c_void_p).value for each in (ctypes.CDLL(None), libc)}
        if len(own) == 1 and libc.mallopt(_M_MMAP_THRESHOLD, SMALLEST_MAPPED) == 1:
            libc.mallopt(_M_TRIM_THRESHOLD, MOST_KEPT)
            _log.info("glibc's heap is tuned (brevact.set_heap_tuning); mimalloc takes less: python -m brevact doctor")
            Tuning.heap = Heap(libc)


def is_left_alone(environment: Mapping[str, str]) -> bool:
    """Whether the environment configures glibc's heap itself."""
    names = {f"MALLOC_{name}_" for name in ("TRIM_THRESHOLD", "TOP_PAD", "MMAP_THRESHOLD", "MMAP_MAX", "PERTURB")}
    return "glibc.malloc" in environment.get("GLIBC_TUNABLES", "") or not names.isdisjoint(environment)
