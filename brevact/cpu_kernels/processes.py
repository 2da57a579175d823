"""Processes that compile kernels, for this process and for all others that use the folder."""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

import torch

from brevact.cpu_kernels.libraries import PACKAGE, find, folder_of_process, writable_folder

logger = logging.getLogger("brevact")

PATIENCE = 3.0
"""Seconds that a process waits for kernels before it says what it waits for."""

_MOST_PROCESSES = 4
_POLL = 0.01
_FIRST = ("batch_norm", "quantize", "dequantize", "batch_norm_backward", "masks", "segments")
"""Modules of the kernels that a training step needs."""


class Task(NamedTuple):
    """A kernel to compile: the module and the name of its function, and the start of the name of its file."""

    module: str
    name: str
    stem: str

    def rank(self) -> int:
        """Place in the order of compilation."""
        name = self.module.rpartition(".")[2]
        return _FIRST.index(name) if name in _FIRST else len(_FIRST)

    def is_usual(self) -> bool:
        """Whether a training step needs it."""
        return self.rank() < len(_FIRST)


_START = """
import sys
sys.path[:] = sys.argv[1].splitlines()  # first of all: the current folder may have a file of a module's name
import types
sys.modules["brevact"] = types.ModuleType("brevact")  # without what its __init__ imports
sys.modules["brevact"].__path__ = [sys.argv[2]]
from brevact.cpu_kernels.compiler import main
main(*sys.argv[3:])
"""


class Compilers:
    """The processes that this one has started."""

    def __init__(self) -> None:
        self._processes: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        self._asked: set[str] = set()
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._said = False

    def wait_for(self, wanted: Task, others: Sequence[Task]) -> Path:
        """Return the file of a kernel when it is there; made in a folder of this process if it cannot be elsewhere.

        Others are compiled as well, afterwards too. A RuntimeError says that it cannot be compiled.
        """
        places, begin = iter((writable_folder, folder_of_process)), time.monotonic()
        while True:
            with self._lock:
                ended = all(process.poll() is not None for process, _ in self._processes)
                if path := find(wanted.stem):
                    self._seconds += time.monotonic() - begin
                    return path
                if ended or wanted.stem not in self._asked:
                    place = next(places, None)
                    if place is None:
                        raise RuntimeError(f"the kernel {wanted.name} could not be compiled: {self._errors()}")
                    tasks = {task for task in (wanted, *others) if ended or task.stem not in self._asked}
                    self._start(tasks, place() or folder_of_process())
            if not self._said and self._seconds + time.monotonic() - begin > PATIENCE:
                self._said = True
                kept = writable_folder()
                where = f"once, kept in {kept}" if kept else "in each process, as no folder is writable to keep them in"
                logger.warning("brevact is compiling its CPU kernels (%s)", where)
            time.sleep(_POLL)

    def _start(self, tasks: set[Task], folder: Path) -> None:
        """Start processes that compile these kernels into a folder, a kernel at a time each, and none twice."""
        if not sys.executable or getattr(sys, "frozen", False):
            raise RuntimeError("kernels are compiled by processes of Python, and sys.executable is none")
        for process, errors in self._processes:
            if process.poll() is not None:
                errors.close()
        self._processes = [started for started in self._processes if not started[1].closed]
        self._asked |= {task.stem for task in tasks}
        arguments = [":".join(task) for task in sorted(tasks, key=Task.rank)]
        paths = "\n".join(path or os.getcwd() for path in sys.path if isinstance(path, str))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        environment["NUMBA_OPT"] = "0"  # LLVM optimizes the whole of a kernel, once
        for _ in range(min(_MOST_PROCESSES, torch.get_num_threads(), len(tasks))):
            errors = tempfile.TemporaryFile()
            command = [sys.executable, "-c", _START, paths, str(PACKAGE.parent), str(folder), *arguments]
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
            )
            threading.Thread(target=process.wait, daemon=True).start()  # leaves no zombie
            self._processes.append((process, errors))

    def _errors(self) -> str:
        """The last lines of the processes' output."""
        said = []
        for process, errors in self._processes:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()[-1:]
            said += lines or ([f"its compiler ended with status {process.poll()}"] if process.poll() else [])
        return "; ".join(dict.fromkeys(said)) or "what was made of it does not load"

    def stop(self) -> None:
        """End the processes; kernels that are not compiled yet are compiled at their first call."""
        for process, errors in self._processes:
            process.terminate()
            process.wait()
            errors.close()
        self._processes = []


_compilers = Compilers()
atexit.register(lambda: _compilers.stop())


def compilers() -> Compilers:
    """Those of this process."""
    return _compilers


def _start_afresh() -> None:
    """Forget processes that belong to the parent of a fork."""
    global _compilers
    _compilers = Compilers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)
