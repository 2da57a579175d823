"""Looks at the resident memory of the process and at the heap while a step runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from brevact.heap import HeapProbe, HeapSize
from brevact.loaded import loaded_bytes, resident_bytes
from brevact.reports.peak import ProcessMemory

#: Seconds between two looks at the process.
_INTERVAL = 0.001
#: Part of the growth of the process by which less than most may be resident at the moment that is reported.
_NEAR = 0.01
#: Looks of which the first one counts during which the heap does not change, or the last one.
_TRIES = 4


class _Look(NamedTuple):
    """The process at a moment.

    Attributes:
        moment: nanoseconds since the epoch.
        resident: resident bytes.
        heap: bytes of the heap; None where nothing tells of it.
        steady: the heap did not change during the look, so that `resident` and `heap` belong together.
    """

    moment: int
    resident: int
    heap: HeapSize | None
    steady: bool


class ProcessProbe:
    """Looks at the process until it is told to stop."""

    def __init__(self) -> None:
        self._heap = HeapProbe.of_process()
        if self._heap is not None:
            self._heap.trim()
        self.start = self._look()
        self.looks = [self.start]

    @classmethod
    def of_process(cls) -> ProcessProbe | None:
        """Return free memory of the heap to the system, and look for the first time; return None off Linux."""
        try:
            return cls()
        except OSError:
            return None

    def _look(self) -> _Look:
        heap = self._heap
        for _ in range(_TRIES):
            size = None if heap is None else heap.size()
            moment, resident = time.time_ns(), resident_bytes()
            steady = heap is None or size is None or heap.size().in_use == size.in_use
            if steady:
                break
        return _Look(moment, resident, size, steady)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look at the process, all the time that a block runs."""
        stop = threading.Event()

        def watch() -> None:
            with contextlib.suppress(OSError):  # no file can be opened any more
                while not stop.wait(_INTERVAL):
                    self.looks.append(self._look())

        thread = threading.Thread(target=watch, name="brevact report", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def memory(self, tensors_at: Callable[[int], int]) -> ProcessMemory:
        """Return the parts of the process when most was resident.

        Freed memory stays resident, so that hardly less is at other moments: of those the one counts at which most was
        in use, and written to. Looks during which the heap changed count where there are no others.

        Args:
            tensors_at: returns the bytes that PyTorch had allocated at a moment, above those at the start.
        """
        start = self.start

        def in_use(look: _Look) -> int:
            if look.heap is None or start.heap is None:
                return tensors_at(look.moment)
            return look.heap.in_use - start.heap.in_use

        most = max(look.resident for look in self.looks) - start.resident
        near = [look for look in self.looks if look.resident - start.resident >= (1 - _NEAR) * most]
        steady = [look for look in near if look.steady]
        chosen = max(steady or near, key=lambda look: min(in_use(look), look.resident - start.resident))
        tensors, growth = tensors_at(chosen.moment), chosen.resident - start.resident
        workspaces = gaps = None
        if chosen.heap is not None:
            workspaces = in_use(chosen) - tensors
            gaps = min(max(growth - in_use(chosen), 0), chosen.heap.free)
        rest = growth - tensors - (workspaces or 0) - (gaps or 0)
        return ProcessMemory(start.resident, loaded_bytes() or 0, tensors, workspaces, gaps, rest)
