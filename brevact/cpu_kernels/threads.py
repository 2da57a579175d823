"""A small pool of threads that share the blocks of one kernel call.

The caller works too, and every thread takes the next piece as soon as it has finished one, so a thread that wakes late
costs nothing. Calls from several threads at once share the pool. A forked child starts its own.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

SMALLEST_SHARE = 1 << 18
"""Elements below which waking another thread costs more than it brings."""

_PIECES_PER_THREAD = 4  # so that uneven threads finish together


class _Job:
    """The pieces of one call: whoever takes a number from the counter runs that piece.

    `helpers` counts the workers that are in `help`; each lowers it before it puts its mark into `left`, so that the
    caller may lose a mark (to Ctrl-C) without waiting for it for ever.
    """

    __slots__ = ("blocks", "counter", "errors", "function", "helpers", "is_open", "left", "lock", "step")

    def __init__(self, function: Callable[[int, int], None], blocks: int, step: int) -> None:
        self.function = function
        self.blocks = blocks
        self.step = step
        self.counter = itertools.count()
        self.errors: list[BaseException] = []
        self.lock = threading.Lock()
        self.is_open = True
        self.helpers = 0
        self.left: SimpleQueue[None] = SimpleQueue()

    def work(self) -> None:
        """Run pieces until none is left, or one has failed."""
        while not self.errors and (start := next(self.counter) * self.step) < self.blocks:
            self.function(start, min(start + self.step, self.blocks))

    def help(self) -> None:
        """Work as a thread of the pool, unless the caller has left."""
        with self.lock:
            if not self.is_open:
                return
            self.helpers += 1
        try:
            self.work()
        except BaseException as error:
            self.errors.append(error)
        with self.lock:
            self.helpers -= 1
        self.left.put(None)

    def run(self, pool: _Pool, helpers: int) -> None:
        """Work as the caller, and return when nobody works any more; to be called again if it raises."""
        if not self.errors:
            pool.offer(self, helpers)
        self.work()
        with self.lock:
            self.is_open = False
        while self.helpers:
            self.left.get()


class _Pool:
    """Worker threads, started when first needed."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[_Job] = SimpleQueue()
        self.lock = threading.Lock()
        self.size = 0

    def offer(self, job: _Job, helpers: int) -> None:
        """Let up to `helpers` workers join a job."""
        if self.size < helpers:
            with self.lock:
                while self.size < helpers:
                    threading.Thread(target=self._serve, name=f"brevact-{self.size}", daemon=True).start()
                    self.size += 1
        for _ in range(helpers):
            self.jobs.put(job)

    def _serve(self) -> None:
        while True:
            self.jobs.get().help()


_pool = _Pool()


def _start_afresh() -> None:
    """Forget threads that a fork did not copy, and locks that they may have held."""
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)


def share(function: Callable[[int, int], None], blocks: int, block_size: int, threads: int) -> None:
    """Call `function(start, stop)`, which releases the GIL, over pieces that cover all blocks, on several threads.

    A block has `block_size` elements; the caller is one of the threads. What a piece raised, or an interrupt of the
    caller, is raised when no thread is in `function` any more.
    """
    threads = min(threads, blocks * block_size // SMALLEST_SHARE)
    if threads <= 1:
        if blocks:
            function(0, blocks)
        return
    step = max(-(-blocks // (threads * _PIECES_PER_THREAD)), SMALLEST_SHARE // (2 * block_size), 1)
    job = _Job(function, blocks, step)
    done = False
    while not done:
        try:
            job.run(_pool, threads - 1)
            done = True
        except BaseException as error:  # Ctrl-C as well: the others still read and write memory that the caller owns
            job.errors.append(error)
    try:
        if job.errors:
            raise job.errors[0]
    finally:
        job.errors.clear()  # a traceback holds this frame, and the frame the job
