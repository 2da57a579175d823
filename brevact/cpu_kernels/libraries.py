"""Kernels in shared libraries: compiled once on a machine, by processes of their own, and loaded without a compiler.

The file of a kernel is named after the hash of all that its code depends on (the sources, the processor, the versions
of the compiler, its settings) and after the hash of its content. It appears whole, and serves any number of processes.
Files lie in the folder that the variable NUMBA_CACHE_DIR names, else beside the sources, else, where the package is
read-only, in the user's cache folder, else in a folder that goes with the process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import inspect
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import IO

import torch

logger = logging.getLogger("brevact")

PATIENCE = 3.0
"""Seconds that a process waits for kernels before it says what it waits for."""

ENTRY = "brevact_kernel"
"""Name of the C function in a library: `void (int64_t *words)`, see :class:`Kernel`."""

LINKERS = "cc", "gcc", "clang", "ld"
"""Commands that make a shared library of an object file, in the order in which they are tried."""

_PACKAGE = Path(__file__).parent
_MOST_PROCESSES = 4
_POLL = 0.01
_FIRST = ("batch_norm", "quantize", "dequantize", "masks", "segments")
"""Modules of the kernels that a training step needs."""


class Kernel:
    """A function that works on a run of blocks, `function(*arguments, start, stop)`, all integers.

    Its C function takes the address of int64 words: the arguments, the number of blocks, the blocks of a piece, and the
    first block that nobody has taken. It takes pieces until none is left, so that any number of threads may call it.

    Args:
        function: Function of a module, to be compiled; its source is in the names of :mod:`memory`.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        functools.update_wrapper(self, function)
        self.words = ctypes.c_int64 * (function.__code__.co_argcount + 1)
        _kernels.append(self)

    @functools.cached_property
    def address(self) -> int:
        """Address of the C function, compiled when it is first asked for.

        Raises:
            RuntimeError: It cannot be compiled.
        """
        while True:
            path = _find(self.stem) or _compilers.wait_for(self)
            try:
                return _load(path)
            except (OSError, ValueError):  # damaged: compiled anew
                path.unlink()

    @functools.cached_property
    def stem(self) -> str:
        """Start of the name of its file."""
        path = Path(inspect.getfile(self.__wrapped__))
        own = b"" if path.parent == _PACKAGE else path.read_bytes()
        key = (self.__module__, hash_of(own), _digest(), *_machine())
        return f"{self.__name__}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"

    @functools.cached_property
    def _function(self) -> Callable[[int], None]:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)

    def __call__(self, *arguments: int) -> None:
        """Run the blocks from the last but one argument to the last one, in this thread, without the GIL."""
        *others, start, stop = arguments
        words = self.words(*others, stop, stop - start, start)
        self._function(ctypes.addressof(words))


_kernels: list[Kernel] = []


def prepare() -> None:
    """Compile the kernels that are not there yet, of the modules that are imported; returns when one of them is.

    Raises:
        ImportError: They cannot be compiled here.
    """
    missing = [kernel for kernel in _kernels if _find(kernel.stem) is None]
    if missing:
        try:
            _compilers.wait_for(min(missing, key=_rank))
        except RuntimeError as error:
            raise ImportError(str(error)) from error


def _rank(kernel: Kernel) -> int:
    """Place in the order of compilation."""
    name = kernel.__module__.rpartition(".")[2]
    return _FIRST.index(name) if name in _FIRST else len(_FIRST)


@functools.cache
def _digest() -> str:
    """Hash of this package's sources."""
    return hashlib.sha256(b"".join(source.read_bytes() for source in sorted(_PACKAGE.glob("*.py")))).hexdigest()


def _machine() -> tuple[object, ...]:
    """What machine code depends on besides its source."""
    settings = ((name, value) for name, value in os.environ.items() if name.startswith("NUMBA_"))
    chosen = sorted(setting for setting in settings if setting[0] != "NUMBA_CACHE_DIR")
    return version("numba"), version("llvmlite"), platform.machine(), _processor(), tuple(chosen)


@functools.cache
def _processor() -> str:
    """The model and the features of the processor."""
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read(1 << 13).partition("\n\n")[0]
    except OSError:
        return platform.processor()
    varying = "processor", "cpu MHz", "core id", "apicid", "initial apicid", "bogomips", "BogoMIPS", "physical id"
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() not in varying)


def folders() -> list[Path]:
    """Folders that may keep libraries, the best one first."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(chosen)]
    of_user = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return [_PACKAGE / "__pycache__", Path(of_user, "brevact")]


def writable_folder() -> Path | None:
    """The first of the folders that can be written."""
    for folder in folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
    return None


@functools.cache
def _folder_of_process() -> Path:
    """A folder that is removed when this process ends."""
    folder, process = Path(tempfile.mkdtemp(prefix="brevact-")), os.getpid()
    atexit.register(lambda: os.getpid() == process and shutil.rmtree(folder, ignore_errors=True))
    _temporary.append(folder)
    return folder


_temporary: list[Path] = []


def _find(stem: str) -> Path | None:
    """The file of a kernel: a shared library, or an object file where none could be made."""
    for folder in (*folders(), *_temporary):
        with contextlib.suppress(OSError):
            names = [name for name in os.listdir(folder) if name.startswith(f"{stem}-")]
            if names:
                return folder / max(names, key=lambda name: (name.endswith(".so"), name))
    return None


def hash_of(content: bytes) -> str:
    """The end of the name of a file with this content."""
    return hashlib.sha256(content).hexdigest()[:16]


def _load(path: Path) -> int:
    """Address of the C function in a file.

    Raises:
        OSError: It cannot be read, or loaded.
        ValueError: It is not what was written.
    """
    content = path.read_bytes()
    if not path.stem.endswith(hash_of(content)):
        raise ValueError(f"{path} is damaged")
    if path.suffix == ".so":
        library = ctypes.CDLL(str(path))  # ctypes never unloads it
        address = ctypes.cast(getattr(library, ENTRY), ctypes.c_void_p).value
        assert address is not None
        return address
    return _load_object(content)


def _load_object(content: bytes) -> int:
    """Address of the C function in an object file, which LLVM loads: no linker was there to make a library."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple().create_target_machine(reloc="pic", jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target)
    engine.add_object_file(binding.ObjectFileRef.from_data(content))
    engine.finalize_object()
    _engines.append(engine)
    return engine.get_function_address(ENTRY)


_engines: list[object] = []  # own the machine code

_START = """
import sys, types, unittest.mock
del sys.path[0]
sys.modules["brevact"] = types.ModuleType("brevact")  # without what its __init__ imports
sys.modules["brevact"].__path__ = [sys.argv[1]]
for name in ("torch", "brevact.private_names.of_torch"):  # launchers need them, kernels do not: a second each
    sys.modules[name] = unittest.mock.MagicMock()
from brevact.cpu_kernels.compiler import main
main(*sys.argv[2:])
"""


class _Compilers:
    """The processes that compile kernels for this one, and for all others that use the folder."""

    def __init__(self) -> None:
        self._processes: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []
        self._asked: set[str] = set()
        self._lock = threading.Lock()
        self._seconds = 0.0
        self._said = False

    def wait_for(self, kernel: Kernel) -> Path:
        """Return the file of a kernel when it is there.

        Raises:
            RuntimeError: It cannot be compiled.
        """
        started, begin = False, time.monotonic()
        while True:
            with self._lock:
                ended = all(process.poll() is not None for process, _ in self._processes)
                if path := _find(kernel.stem):
                    self._seconds += time.monotonic() - begin
                    return path
                if ended or kernel.stem not in self._asked:
                    if started:
                        raise RuntimeError(f"the kernel {kernel.__name__} could not be compiled: {self._errors()}")
                    self._start({kernel, *(other for other in _kernels if _find(other.stem) is None)})
                    started = True
            if not self._said and self._seconds + time.monotonic() - begin > PATIENCE:
                self._said = True
                kept = writable_folder()
                where = f"once, kept in {kept}" if kept else "in each process, as no folder is writable to keep them in"
                logger.warning("brevact is compiling its CPU kernels (%s)", where)
            time.sleep(_POLL)

    def _start(self, kernels: Iterable[Kernel]) -> None:
        """Start processes that compile these kernels, a kernel at a time each, and none twice."""
        if not sys.executable or getattr(sys, "frozen", False):
            raise RuntimeError("kernels are compiled by processes of Python, and sys.executable is none")
        folder = writable_folder() or _folder_of_process()
        ordered = sorted(kernels, key=_rank)
        tasks = [f"{kernel.__module__}:{kernel.__name__}:{kernel.stem}" for kernel in ordered]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        environment["NUMBA_OPT"] = "0"  # LLVM optimizes the whole of a kernel, once
        self.stop()
        self._asked = {kernel.stem for kernel in ordered}
        for _ in range(min(_MOST_PROCESSES, torch.get_num_threads(), len(tasks))):
            errors = tempfile.TemporaryFile()
            command = [sys.executable, "-c", _START, str(_PACKAGE.parent), str(folder), *tasks]
            quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": errors}
            self._processes.append((subprocess.Popen(command, env=environment, **quiet), errors))

    def _errors(self) -> str:
        """The last lines of what the processes said."""
        said = []
        for _, errors in self._processes:
            errors.seek(0)
            said += errors.read().decode(errors="replace").strip().splitlines()[-1:]
        return "; ".join(dict.fromkeys(said)) or "its compiler ended without a word"

    def stop(self) -> None:
        """End the processes; what is not compiled yet is compiled when it is next asked for."""
        for process, errors in self._processes:
            process.terminate()
            process.wait()
            errors.close()
        self._processes = []


_compilers = _Compilers()
atexit.register(lambda: _compilers.stop())


def _start_afresh() -> None:
    """Forget processes that belong to the parent of a fork."""
    global _compilers
    _compilers = _Compilers()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_afresh)
