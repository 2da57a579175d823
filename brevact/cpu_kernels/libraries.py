"""Files of compiled kernels: shared libraries, which load without a compiler.

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
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

ENTRY = "brevact_kernel"
"""Name of the C function in a library: `void (int64_t *words)`, see :class:`brevact.cpu_kernels.kernels.Kernel`."""

LINKERS = "cc", "gcc", "clang", "ld"
"""Commands that make a shared library of an object file, in the order in which they are tried."""

PACKAGE = Path(__file__).parent

_WITHOUT_EFFECT = {"NUMBA_CACHE_DIR", "NUMBA_NUM_THREADS", "NUMBA_OPT"}
_OF_PROCESSOR = {
    *("vendor_id", "cpu family", "model", "model name", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features"),
    *("cpu", "isa", "features"),
}
"""Fields of /proc/cpuinfo that tell which instructions a processor has: of x86, of Arm, of others."""


def stem_of(function: Callable[..., None]) -> str:
    """Start of the name of the file of a kernel, a Python function; an ImportError says that Numba is missing."""
    path = Path(inspect.getfile(function))
    own = b"" if path.parent == PACKAGE else path.read_bytes()
    names = {name for name in os.environ if name.startswith("NUMBA_")} - _WITHOUT_EFFECT
    chosen = [(name, os.environ[name]) for name in sorted(names)]
    key = (function.__module__, hash_of(own), _digest(), _versions(), platform.machine(), _processor(), chosen)
    return f"{function.__name__}-{hash_of(repr(key).encode())}"


def hash_of(content: bytes) -> str:
    """The hash by which files are named."""
    return hashlib.sha256(content).hexdigest()[:16]


@functools.cache
def _digest() -> str:
    """Hash of this package's sources."""
    if not (sources := sorted(PACKAGE.glob("*.py"))):
        raise ImportError(f"{PACKAGE}: no sources of kernels are there to compile; install brevact as files")
    return hash_of(b"".join(source.read_bytes() for source in sources))


@functools.cache
def _versions() -> tuple[str, str]:
    """What compiles."""
    return version("numba"), version("llvmlite")


@functools.cache
def _processor() -> str:
    """The model and the features of the processor."""
    try:
        with open("/proc/cpuinfo") as file:
            first = file.read(1 << 13).partition("\n\n")[0]
    except OSError:
        return platform.processor()
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() in _OF_PROCESSOR)


def folders() -> list[Path]:
    """Folders that may keep libraries, the best one first."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return [Path(chosen).absolute()]
    of_user = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    has_home = os.path.isabs(of_user)
    return [PACKAGE / "__pycache__", *([Path(of_user, "brevact")] if has_home else [])]


def writable_folder() -> Path | None:
    """The first of the folders that can be written."""
    for folder in folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
    return None


@functools.cache
def folder_of_process() -> Path:
    """A folder that is removed when this process ends."""
    folder, process = Path(tempfile.mkdtemp(prefix="brevact-")), os.getpid()

    def remove() -> None:
        if os.getpid() == process:  # no fork of it
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    _temporary.append(folder)
    return folder


_temporary: list[Path] = []


def _leave_folder() -> None:
    """Forget the folder of the parent of a fork."""
    _temporary.clear()
    folder_of_process.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_folder)


def find(stem: str) -> Path | None:
    """The file of a kernel: a shared library, or an object file where none could be made."""
    for folder in (*folders(), *_temporary):
        with contextlib.suppress(OSError):
            paths = {folder / name for name in os.listdir(folder) if name.startswith(f"{stem}-")} - _refused
            if paths:
                return max(paths, key=lambda path: (path.suffix == ".so", path))
    return None


_refused: set[Path] = set()


def load(path: Path) -> int | None:
    """Address of the C function in a file; None if it is damaged or does not load: `find` does not return it again."""
    try:
        content = path.read_bytes()
        if path.stem.endswith(hash_of(content)):
            return _load(path, content)
        path.unlink()  # no process wants it
    except FileNotFoundError:  # another process has removed it
        pass
    except OSError:
        _refused.add(path)
    return None


def _load(path: Path, content: bytes) -> int:
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
