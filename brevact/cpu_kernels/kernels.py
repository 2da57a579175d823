"""Kernels: functions that Numba compiles once on a machine, in another process; this one loads their machine code.

LLVM loads it; Numba, which takes 100 MiB of a process, is not imported. The file of a kernel is named after the hash of
all that its code depends on: the sources, the processor, the versions and the settings of the compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import inspect
import logging
import os
import pickle
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

try:
    import fcntl
except ImportError:  # Windows: processes may compile the same kernel
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("brevact")

ENTRY = "brevact_kernel"
"""Name of the C function in an object file: `void (int64_t *words)`, see :class:`Kernel`."""

PACKAGE = Path(__file__).parent

_USUAL = "uniform", "batch_norm", "segments", "packing"
"""Modules of the kernels of a training step, which are compiled together."""
_MOST_PROCESSES = 4
_WITHOUT_EFFECT = {"NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS", "NUMBA_OPT"}


class Kernel:
    """A module's function on a run of blocks, `function(*arguments, start, stop)`, all integers; see :mod:`memory`.

    Its C function takes the address of int64 words: the arguments, the number of blocks, the blocks of a piece, and the
    first block that nobody has taken. It takes pieces until none is left, so that any number of threads may call it.
    """

    address: int
    """Address of the C function, compiled at its first use; a RuntimeError says why that is not possible."""

    function: Callable[[ctypes.Array], None]
    """The C function, which takes :meth:`words`, and runs without the GIL."""

    def __init__(self, function: Callable[..., None]) -> None:
        functools.update_wrapper(self, function)
        self._count = function.__code__.co_argcount + 1
        self._array = ctypes.c_int64 * self._count
        _kernels.append(self)

    def __getattr__(self, name: str) -> Any:
        """Not `functools.cached_property`: that of Python 3.11 holds a lock, which a fork would copy."""
        if name == "address":
            self.address = _load(_machine_code(self))
            return self.address
        if name == "function":
            self.function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)
            return self.function
        if name == "file":
            self.file = _file_of(self.__wrapped__)
            return self.file
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def words(self, *values: int) -> ctypes.Array:
        """Arguments as 64-bit words, a TypeError for more or fewer: ctypes would silently leave missing ones 0."""
        if len(values) != self._count:
            raise TypeError(f"{self.__name__} takes {self._count - 1} arguments, and got {len(values) - 1}")
        return self._array(*values)

    def __call__(self, *arguments: int) -> None:
        """Run the blocks from the last but one argument to the last one, in this thread, without the GIL."""
        *others, start, stop = arguments
        self.function(self.words(*others, stop, stop - start, start))


_kernels: list[Kernel] = []


def prepare() -> None:
    """Compile the kernels of a training step if no kernel is there; an ImportError says why that is not possible."""
    if not any(map(_read, _kernels)):
        try:
            _machine_code(next(kernel for kernel in _kernels if _is_usual(kernel)))
        except RuntimeError as error:
            raise ImportError(str(error)) from error


def _is_usual(kernel: Kernel) -> bool:
    return kernel.__module__.rpartition(".")[2] in _USUAL


def _file_of(function: Callable[..., None]) -> str:
    """Name of the file of a kernel; an ImportError says that Numba is missing."""
    path = Path(inspect.getfile(function))
    own = b"" if path.parent == PACKAGE else path.read_bytes()
    names = {name for name in os.environ if name.startswith("NUMBA_")} - _WITHOUT_EFFECT
    chosen = [(name, os.environ[name]) for name in sorted(names)]
    key = (function.__module__, own, _digest(), _versions(), platform.machine(), _processor(), chosen)
    return f"{function.__name__}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.o"


@functools.cache
def _digest() -> str:
    """Hash of this package's sources."""
    if not (sources := sorted(PACKAGE.glob("*.py"))):
        raise ImportError(f"{PACKAGE}: no sources of kernels are there to compile; install brevact as files")
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


@functools.cache
def _versions() -> tuple[str, str]:
    return version("numba"), version("llvmlite")


@functools.cache
def _processor() -> tuple[str, str]:
    from llvmlite import binding

    return binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()


def folders() -> list[Path]:
    """Folders that may keep kernels, the best one first: NUMBA_CACHE_DIR, or beside the sources, or the user's."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(chosen).absolute()]
    of_user = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return [PACKAGE / "__pycache__", *([Path(of_user, "brevact")] if os.path.isabs(of_user) else [])]


def writable_folder() -> Path | None:
    for folder in folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
    return None


def _machine_code(kernel: Kernel) -> bytes:
    """The object file of a kernel, which this process compiles with others if no process has done so."""
    if (code := _read(kernel)) is not None:
        return code
    folder = writable_folder()
    with _held(folder):
        if (code := _read(kernel)) is not None:
            return code
        wanted = filter(_is_usual, _kernels) if _is_usual(kernel) else [kernel]
        compiled = _compile([each for each in wanted if _read(each) is None], folder)
    return compiled[kernel.file]


_unsaved: dict[str, bytes] = {}


def _read(kernel: Kernel) -> bytes | None:
    """The object file of a kernel, if a file has all of it: it begins with its hash."""
    for folder in folders():
        with contextlib.suppress(OSError):
            content = (folder / kernel.file).read_bytes()
            if content[:32] == hashlib.sha256(content[32:]).digest():
                return content[32:]
    return _unsaved.get(kernel.file)


def _save(folder: Path | None, name: str, code: bytes) -> None:
    """Write a file, which appears whole; where none can be written, this process keeps the code."""
    if folder is not None:
        path = folder / f"{name}.{os.getpid()}.{threading.get_ident()}"
        try:
            path.write_bytes(hashlib.sha256(code).digest() + code)
            os.replace(path, folder / name)
            return
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
    _unsaved[name] = code


@contextlib.contextmanager
def _held(folder: Path | None) -> Iterator[None]:
    """Let one thread of one process compile into a folder at a time, where the system can lock a file there."""
    with contextlib.ExitStack() as stack:
        if fcntl is not None and folder is not None:
            with contextlib.suppress(OSError):
                lock = stack.enter_context(open(folder / "brevact.lock", "a"))
                fcntl.flock(lock, fcntl.LOCK_EX)
                stack.callback(fcntl.flock, lock, fcntl.LOCK_UN)  # forks may have the file open, too
        yield


_START = """
import sys
sys.path[:] = sys.argv[1].splitlines()  # first of all: the current folder may have a file of a module's name
import types
class Names(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, Names(name))
        return vars(self)[name]
sys.modules["brevact"] = types.ModuleType("brevact")  # without what its __init__ imports
sys.modules["brevact"].__path__ = [sys.argv[2]]
sys.modules["torch"] = sys.modules["brevact.private_names.of_torch"] = Names("torch")  # kernels do not use it
from brevact.cpu_kernels.compiler import main
main(*sys.argv[3:])
"""


def _compile(kernels: Sequence[Kernel], folder: Path | None) -> dict[str, bytes]:
    """Compile kernels in a process of its own, and save them; return them by their files."""
    if not sys.executable or getattr(sys, "frozen", False):
        raise RuntimeError("kernels are compiled by processes of Python, and sys.executable is none")
    where = f"once, kept in {folder}" if folder else "in each process, as no folder is writable to keep them in"
    logger.warning("brevact is compiling its CPU kernels (%s)", where)
    tasks = [f"{kernel.__module__}:{kernel.__name__}" for kernel in kernels]
    workers = min(_MOST_PROCESSES, torch.get_num_threads(), len(tasks))
    paths = "\n".join(path or os.getcwd() for path in sys.path if isinstance(path, str))
    done = subprocess.run(
        [sys.executable, "-c", _START, paths, str(PACKAGE.parent), str(workers), *tasks],
        # LLVM optimizes the whole of a kernel, once
        env={**os.environ, "NUMBA_OPT": "0", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"the compiler ended with status {done.returncode}"
        raise RuntimeError(f"kernels ({', '.join(kernel.__name__ for kernel in kernels)}) are not compiled: {reason}")
    compiled = dict(zip((kernel.file for kernel in kernels), pickle.loads(done.stdout), strict=True))
    for name, code in compiled.items():
        _save(folder, name, code)
    return compiled


def _load(code: bytes) -> int:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple().create_target_machine(reloc="pic", jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return engine.get_function_address(ENTRY)


_engines: list[object] = []  # own the machine code
