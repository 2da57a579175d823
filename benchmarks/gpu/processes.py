"""Cases measured in processes of their own: several get ready at the same time, then each measures alone.

Getting ready (imports, compilation, first steps) takes most of the time and may be done side by side; while one process
measures, the others of its wave wait. A process that raises, crashes or takes too long gives a message, and the rest go
on.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

Row = dict[str, Any]


class Case(Protocol):
    """What is measured in a process of its own; it travels there by pickle."""

    def prepare(self) -> Callable[[], list[Row]]:
        """Get everything ready and return what measures."""


C = TypeVar("C", bound=Case)


def measure_each(
    cases: Sequence[C], jobs: int, timeout: float, start: str = "spawn"
) -> Iterator[tuple[C, list[Row] | str]]:
    """Measure every case alone, each in a new process.

    Args:
        cases: what to measure.
        jobs: cases that get ready at the same time.
        timeout: seconds that a case may take to get ready, and again to measure.
        start: how the processes begin, see `start_method`.

    Yields:
        Each case with its rows, or with a message of what went wrong.
    """
    for first in range(0, len(cases), jobs):
        workers = [_Worker(case, start) for case in cases[first : first + jobs]]
        try:
            deadline = time.monotonic() + timeout
            for worker in workers:
                worker.wait(deadline, "getting ready")
            for worker in workers:
                if worker.error is None:
                    worker.connection.send("measure")
                    worker.wait(time.monotonic() + timeout, "measuring")
                yield worker.case, worker.rows if worker.error is None else worker.error
        finally:
            for worker in workers:
                worker.stop()


def start_method(device: str, modules: Sequence[str]) -> str:
    """How processes begin: afresh on a GPU, whose driver does not survive a fork; else with modules imported.

    Args:
        device: "cuda" or "cpu".
        modules: names of what all the processes import.

    Returns:
        A start method of `multiprocessing`.
    """
    if device == "cuda" or "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
    return "forkserver"


class _Worker:
    """A process for one case, and what it has answered."""

    def __init__(self, case: Any, start: str) -> None:
        context: Any = multiprocessing.get_context(start)
        self.case = case
        self.rows: list[Row] = []
        self.error: str | None = None
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(case, theirs))
        self._process.start()
        theirs.close()

    def wait(self, deadline: float, activity: str) -> None:
        """Take the next answer; after the rows or an error the process ends, before another one measures."""
        try:
            if not self.connection.poll(max(0.0, deadline - time.monotonic())):
                self.error = f"took too long {activity}"
            else:
                kind, value = self.connection.recv()
                if kind == "ready":
                    return
                if kind == "rows":
                    self.rows = value
                else:
                    self.error = value
        except (EOFError, OSError):
            self._process.join(10)
            self.error = f"the process ended {activity}, with exit code {self._process.exitcode}"
        self.stop()

    def stop(self) -> None:
        """End the process: by itself if it has answered, else by force."""
        self.connection.close()
        if self.error is None and self.rows:
            self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _work(case: Case, connection: Connection) -> None:
    """Run in the new process."""
    try:
        measure = case.prepare()
        connection.send(("ready", None))
        try:
            connection.recv()
        except EOFError:  # nobody waits for the rows any more
            return
        connection.send(("rows", measure()))
    except Exception as error:
        traceback.print_exc()
        connection.send(("error", message_of(error)))


def message_of(error: Exception) -> str:
    """Type and first line of an error, short enough for a table.

    Args:
        error: any.

    Returns:
        The message.
    """
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:160]
