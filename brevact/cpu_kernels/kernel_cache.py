"""Compiled kernels on disk, so that they are compiled once on a machine and not once a process.

Files lie beside the kernels' sources, or, where the package is read-only, in the user's cache folder (Numba's choice;
the variable NUMBA_CACHE_DIR names another one). Each kernel, processor and version of the sources has files of its own,
which appear whole: any number of processes may compile at the same time.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numba

from brevact.private_names.of_numba import FunctionCache, IndexDataCacheFile

logger = logging.getLogger("brevact")

PATIENCE = 3.0
"""Seconds of compilation after which a process says what it is doing."""


@functools.cache
def _digest() -> str:
    """Hash of this package's sources."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


class Progress:
    """Says once that kernels are being compiled, when that has taken a process `PATIENCE` seconds in all."""

    def __init__(self) -> None:
        self._depth = 0  # a kernel is compiled while a function that calls it is
        self._seconds = 0.0
        self._start = 0.0
        self._timer: threading.Timer | None = None
        self._said = False

    def begin(self, folder: str | None) -> None:
        """A kernel is not in the cache: it is compiled now.

        Args:
            folder: where it will be kept; None for nowhere.
        """
        self._depth += 1
        if self._depth == 1 and not self._said:
            self._start = time.monotonic()
            self._timer = threading.Timer(max(0.0, PATIENCE - self._seconds), self._say, (folder,))
            self._timer.daemon = True
            self._timer.start()

    def end(self) -> None:
        """It is compiled."""
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._seconds += time.monotonic() - self._start

    def _say(self, folder: str | None) -> None:
        self._said = True
        kept = f"once, kept in {folder}" if folder else "in each process, as no folder is writable to keep them in"
        logger.warning("brevact is compiling its CPU kernels (%s)", kept)


_progress = Progress()


class PackageCache(FunctionCache):
    """Numba's cache on disk, which looks at a kernel's own file only, made to notice changes to what it inlines."""

    def __init__(self, function: Callable, name: str = "") -> None:
        self._function_name = name
        try:
            super().__init__(function)
        except RuntimeError:  # no folder to cache in
            self._cache_path = None

    def load_overload(self, sig, target_context):
        found = None
        if self.cache_path is not None:
            target_context.refresh()
            self._choose_file(sig, target_context.codegen())
            try:
                found = super().load_overload(sig, target_context)
            except Exception:  # of another user, or damaged (unpickling raises anything): it is compiled
                with contextlib.suppress(OSError):
                    self._cache_file.flush()
        if found is None:
            _progress.begin(self.cache_path)
        return found

    def save_overload(self, sig, data):
        _progress.end()
        if self.cache_path is not None:
            self._choose_file(sig, data.codegen)
            with contextlib.suppress(OSError):  # a full disk: the kernel is compiled again in the next process
                super().save_overload(sig, data)

    def _choose_file(self, sig, codegen) -> None:
        """Read and write files of this key alone: processes that share an index overwrite each other's entries."""
        key = repr((numba.__version__, self._index_key(sig, codegen)))
        name = f"{self._impl.filename_base}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        self._cache_file = IndexDataCacheFile(self.cache_path, name, self._impl.locator.get_source_stamp())

    def _index_key(self, sig, codegen):
        return (sig, codegen.magic_tuple(), self._function_name, _digest())

    @classmethod
    def attach(cls, compiled: object, function: Callable, name: str = "") -> None:
        """Let a compiled function use the cache, where some folder is writable.

        Args:
            compiled: Numba's dispatcher or C function.
            function: What it compiles.
            name: Tells functions of one definition apart.
        """
        compiled._cache = cls(function, name)
