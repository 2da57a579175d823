"""glibc's heap: memory that holds nothing must not stay resident while activations are packed on the CPU.

When CPU kernels are first needed, two sizes are set: up to 128 MiB that are free at the end of the heap stay there,
which glibc would return and fault in again at each step, and tensors from 32 MiB on are mapped by themselves.

PyTorch asks for aligned blocks, and glibc hands the rest of a free block to others: the block that an activation leaves
is too small for the next one, and the heap grows. So kernels look at the process after every 4 million elements, or as
many as the last look found room for. Where 96 MiB more are resident than were ever in use, or more is free than the
container has left, free blocks go back to the system. The largest ones are taken by `malloc` and returned in place
(`madvise`), those above 8 MiB as whole large pages, which one fault brings back; `malloc_trim` returns what is left.

PyTorch reads `THP_MEM_ALLOC_ENABLE` at its first tensor of 2 MiB, before anything is packed. So the import of `brevact`
sets it: with small pages the heap keeps more gaps, and a step faults in four to twenty times as many pages.
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

SMALLEST_MAPPED, MOST_KEPT = 32 << 20, 128 << 20
LOOKED_AFTER, MOST_UNSEEN = 4 << 20, 16 << 20  # elements that kernels pack or decode between two looks
MOST_FREE = 96 << 20  # bytes that may be free and resident where the heap is larger than its use has ever been
FEW_FREE = 16 << 20  # bytes that may be free however near the limit is
MORE_RETURNED = 32 << 20  # beyond those that are too many, or the next look would find too many again
LARGE_PAGE = 2 << 20
MADV_DONTNEED, MADV_HUGEPAGE = 4, 14  # of <sys/mman.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of <malloc.h>
_SETTINGS = ("TRIM_THRESHOLD_", "TOP_PAD_", "MMAP_THRESHOLD_", "MMAP_MAX_", "PERTURB_")
PROC, GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_log = logging.getLogger("brevact")


VARIABLE = "THP_MEM_ALLOC_ENABLE"
_is_ours = VARIABLE not in os.environ


def ask_for_large_pages(enabled: bool) -> None:
    """Set the variable, or take it back; a value that the program has chosen stays."""
    if _is_ours and enabled:
        os.environ.setdefault(VARIABLE, "1")
    elif _is_ours and os.environ.get(VARIABLE) == "1":
        del os.environ[VARIABLE]


ask_for_large_pages(True)


class _Mallinfo(ctypes.Structure):
    _names = "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


class Heap:
    """The heap of this process; an AttributeError or an OSError says that it cannot be known."""

    def __init__(self, libc: ctypes.CDLL) -> None:
        size, address = ctypes.c_size_t, ctypes.c_void_p
        libc.mallinfo2.restype = _Mallinfo
        for name, result, *arguments in (
            *(("malloc", address, size), ("free", None, address), ("malloc_usable_size", size, address)),
            *(("malloc_trim", ctypes.c_int, size), ("sbrk", address, ctypes.c_ssize_t)),
            ("madvise", ctypes.c_int, address, size, ctypes.c_int),
        ):
            function = getattr(libc, name)
            function.restype, function.argtypes = result, arguments
        self.libc = libc
        maps = (PROC / "self" / "maps").read_text()
        self.start = int(re.search(r"^(\w+)-.*\[heap\]$", maps, re.M)[1], 16)  # type: ignore[index]
        self.beside = self.resident() - self.in_use()  # resident memory of others, such as Python's objects
        self.most_in_use = 0

    def resident(self) -> int:
        with open("/proc/self/statm", "rb", buffering=0) as statm:  # anew: threads and forks share no file
            _, resident, of_files, *_ = statm.read().split()
        return (int(resident) - int(of_files)) * mmap.PAGESIZE

    def in_use(self) -> int:
        info = self.libc.mallinfo2()
        return info.uordblks + info.hblkhd

    def look(self) -> int:
        """Return what is too much to the system; return the bytes by which the process may grow until the next look."""
        in_use, resident = self.in_use(), self.resident()
        self.most_in_use = max(self.most_in_use, in_use)
        free, most = resident - self.beside - in_use, self.beside + self.most_in_use + MOST_FREE
        if free <= FEW_FREE:
            return 0
        left = memory_left()
        if free <= left and resident > most:
            self.return_gaps(most - MORE_RETURNED)
        if free > left or (resident > most and self.resident() > most - FEW_FREE):  # too little was in large blocks
            self.libc.malloc_trim(0)
            self.beside = max(self.beside, self.resident() - self.in_use() - FEW_FREE)
        return 0 if free > left else min(most - resident, (left - free) // 2)

    def return_gaps(self, enough: int) -> None:
        """Return free blocks to the system, the largest first, until so many bytes are resident."""
        libc, taken, size = self.libc, [], min(1 << 30, self.libc.mallinfo2().fordblks)
        try:  # malloc would move this thread to another arena for good where nothing can be mapped
            mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
        except OSError:
            return
        end = libc.sbrk(0)
        try:
            libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)  # or the heap would grow by a block that it does not have
            while size >= 1 << 20:
                block = libc.malloc(size)
                if block and self.start <= block <= end - size:
                    taken.append(block)
                    continue
                libc.free(block)  # mapped by itself, or grown: no free block is as large
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
    """What this process does to its heap: elements since the last look, and until the next one."""

    is_on, passed, next_look = True, 0, LOOKED_AFTER
    heap: Heap | None = None


def count(numel: int) -> None:
    """Count elements of activations that are computed beside those which kernels pass over: layers are run again."""
    Tuning.passed += numel
    if Tuning.passed >= Tuning.next_look:
        look()


def look() -> None:
    """Look at the process, now that kernels have packed or decoded enough elements (`Tuning.next_look`)."""
    Tuning.passed = 0
    if Tuning.heap is not None and Tuning.is_on:
        try:
            Tuning.next_look = min(max(Tuning.heap.look() // 4, LOOKED_AFTER), MOST_UNSEEN)
        except OSError:  # no file can be opened any more: training goes on without
            Tuning.heap = None


def tune_heap() -> bool:
    """Set both sizes, once in a process, unless that is turned off; return whether they are set."""
    return Tuning.is_on and _tune()


@functools.cache
def _tune() -> bool:
    libc = None if is_left_alone(os.environ) else _glibc()
    if libc is None or libc.mallopt(_M_MMAP_THRESHOLD, SMALLEST_MAPPED) != 1:
        return False
    libc.mallopt(_M_TRIM_THRESHOLD, MOST_KEPT)
    with contextlib.suppress(AttributeError, OSError, TypeError):  # glibc before 2.33, no /proc, no heap
        Tuning.heap = Heap(libc)
    _log.info("glibc's heap is tuned (brevact.set_heap_tuning); mimalloc takes less: python -m brevact run SCRIPT")
    return True


def is_left_alone(environment: Mapping[str, str]) -> bool:
    """Whether an environment says how the heap is to be."""
    of_tunables = "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
    return of_tunables or any(f"MALLOC_{name}" in environment for name in _SETTINGS)


def _glibc() -> ctypes.CDLL | None:
    """Return glibc if it has the `posix_memalign` of this process, by which PyTorch allocates."""
    if platform.libc_ver()[0] != "glibc":
        return None
    try:
        process, libc = ctypes.CDLL(None), ctypes.CDLL("libc.so.6")
        first, second = (ctypes.cast(each.posix_memalign, ctypes.c_void_p).value for each in (process, libc))
        return libc if first == second else None
    except (AttributeError, OSError):
        return None


def memory_left() -> int:
    """Return the bytes that the machine, or a control group of this process, has left; an OSError if none says so."""
    lines = (PROC / "meminfo").read_text("ascii").splitlines()
    left = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    for group in _groups():
        with contextlib.suppress(OSError, ValueError, KeyError):  # no such group, or no limit
            of = {name: int(count) for name, count in map(str.split, (group / "memory.stat").read_text().splitlines())}
            if "hierarchical_memory_limit" in of:  # version 1
                left.append(of["hierarchical_memory_limit"] - of["total_rss"] - of["total_shmem"])
            else:
                left.append(int((group / "memory.max").read_text()) - of["anon"] - of["shmem"])
    if not left:
        raise OSError("/proc/meminfo has no line MemAvailable:")
    return min(left)


@functools.cache
def _groups() -> list[Path]:
    """Return the folders of the control groups of this process that may limit its memory, with those around them."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for line in (PROC / "self" / "cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if not kinds or "memory" in kinds.split(","):
                top = GROUPS / ("memory" if kinds else "")
                folder = top / path.lstrip("/")
                found += [each for each in (folder, *folder.parents) if each.is_relative_to(top)]
    return found
