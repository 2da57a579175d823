"""Kernels: functions that Numba compiles once on a machine, in another process; this one loads their machine code.

LLVM loads it; Numba, which takes 60 MiB of a process, and 300 while it compiles, is not imported. The name of the file
has the hash of all that the code depends on: the sources, the processor, the versions and the settings of the compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import pickle
import platform
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import torch

try:
    import fcntl
except ImportError:  # Windows: processes may compile the same kernels
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("brevact")

PACKAGE = Path(__file__).parent

_MOST_PROCESSES = 4
_WITHOUT_EFFECT = {"NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS", "NUMBA_OPT"}


class Kernel:
    """A module's function on a run of blocks, `function(*arguments, start, stop)`, all integers; see :func:`load`.

    Its C function takes the address of int64 words: the arguments, the number of blocks, the blocks of a piece, and the
    first block that nobody has taken. It takes pieces until none is left, so that any number of threads may call it.
    """

    address: int
    """Address of the C function."""

    function: Callable[[ctypes.Array], None]
    """The C function, which takes :meth:`words`, and runs without the GIL."""

    __name__: str

    def __init__(self, function: Callable[..., None]) -> None:
        functools.update_wrapper(self, function)
        self._count = function.__code__.co_argcount + 1
        self._array = ctypes.c_int64 * self._count
        _kernels.append(self)

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
_engines: list[object] = []  # own the machine code


def package_of(module: str) -> str:
    return module.rpartition(".")[0]


def load(root: str) -> None:
    """Load the kernels of a module's package, which the module imports; an ImportError says why that is not possible.

    This process compiles them if none has done so. In the process that compiles, there are none to load.
    """
    if not (own := [kernel for kernel in _kernels if package_of(kernel.__module__) == package_of(root)]):
        return
    from llvmlite import binding

    name, folder = _file_of(root), writable_folder()
    objects = _read(name)
    if objects is None:
        with _held(folder):
            objects = _read(name) or _compile(root, folder, name)
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple().create_target_machine(reloc="pic", jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), target)
    for code in objects:
        engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    for kernel in own:
        kernel.address = engine.get_function_address(kernel.__name__)
        kernel.function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.address)


def _file_of(root: str) -> str:
    """Name of the file of a package's kernels; an ImportError says that Numba is missing."""
    if not (sources := sorted(PACKAGE.glob("*.py"))):
        raise ImportError(f"{PACKAGE}: no sources of kernels are there to compile; install brevact as files")
    content = [path.read_bytes() for path in (*sources, Path(str(sys.modules[root].__file__)))]
    names = sorted({name for name in os.environ if name.startswith("NUMBA_")} - _WITHOUT_EFFECT)
    key = content, _compiler(), platform.machine(), [(name, os.environ[name]) for name in names]
    return f"{package_of(root)}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.kernels"


def _compiler() -> tuple[str, ...]:
    from llvmlite import binding

    features = binding.get_host_cpu_features().flatten()
    return version("numba"), version("llvmlite"), binding.get_host_cpu_name(), features


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


def _read(name: str) -> list[bytes] | None:
    """The object files of kernels, if a file has all of them: zlib finds damage."""
    for folder in folders():
        with contextlib.suppress(OSError, zlib.error):
            return pickle.loads(zlib.decompress((folder / name).read_bytes()))
    return None


@contextlib.contextmanager
def _held(folder: Path | None) -> Iterator[None]:
    """Let one process compile into a folder at a time, where the system can lock a file there."""
    with contextlib.ExitStack() as stack:
        if fcntl is not None and folder is not None:
            with contextlib.suppress(OSError):
                lock = stack.enter_context(open(folder / "brevact.lock", "a"))
                fcntl.flock(lock, fcntl.LOCK_EX)
                stack.callback(fcntl.flock, lock, fcntl.LOCK_UN)  # forks may have the file open, too
        yield


_START = """
import sys
_, module, workers, folder, *sys.path[:] = sys.argv  # first: the current folder may have a file of a module's name
import types
class Names(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, Names(name))
        return vars(self)[name]
sys.modules["brevact"] = types.ModuleType("brevact")  # without what its __init__ imports
sys.modules["brevact"].__path__ = [folder]
sys.modules["torch"] = sys.modules["brevact.private_names.of_torch"] = Names("torch")  # kernels do not use it
from brevact.cpu_kernels.compiler import main
main(module, int(workers))
"""


def _compile(root: str, folder: Path | None, name: str) -> list[bytes]:
    """Compile kernels in a process of its own, and write them to a file, which appears whole, if that is possible."""
    if not sys.executable or getattr(sys, "frozen", False):
        raise ImportError("kernels are compiled by processes of Python, and sys.executable is none")
    where = f"once, kept in {folder}" if folder else "in each process, as no folder is writable to keep them in"
    logger.warning("brevact is compiling its CPU kernels (%s)", where)
    paths = [path or os.getcwd() for path in sys.path if isinstance(path, str)]
    workers = str(min(_MOST_PROCESSES, torch.get_num_threads()))
    done = subprocess.run(
        [sys.executable, "-c", _START, root, workers, str(PACKAGE.parent), *paths],
        env={**os.environ, "NUMBA_OPT": "0"},  # LLVM optimizes the whole of a kernel, once
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"the compiler ended with status {done.returncode}"
        raise ImportError(f"kernels of {package_of(root)} are not compiled: {reason}")
    if folder is not None:
        with contextlib.suppress(OSError):
            path = folder / f"{name}.{os.getpid()}"
            path.write_bytes(zlib.compress(done.stdout))
            os.replace(path, folder / name)
    return pickle.loads(done.stdout)
