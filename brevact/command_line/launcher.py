"""``python -m brevact run SCRIPT ...``: a program in a process whose freed memory is reused.

PyTorch's tensors leave gaps in glibc's heap that the next ones do not fit into (`brevact.heap`); other allocators have
none, but must be loaded when a process starts. Like `torch.backends.xeon.run_cpu`, this sets the environment and
becomes the program: arguments, signals and exit status are the program's own.
"""

from __future__ import annotations

import ctypes.util
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from brevact.heap import is_left_alone

#: Libraries by their command-line names, best first.
ALLOCATORS = {"mimalloc": "mimalloc", "jemalloc": "jemalloc", "tcmalloc": "tcmalloc_minimal"}
_FIX = (
    "pip install cmeel-mimalloc, which has mimalloc for Linux, or the system's package, such as libmimalloc2.0; "
    "or --allocator PATH, a shared library; or --allocator none"
)


def run(program: Sequence[str], *, is_module: bool, allocator: str) -> None:
    """Become a Python program."""
    program = program[1:] if program[:1] == ["--"] else program
    if not program:
        raise ValueError("PROGRAM: got none; accepted is a script and its arguments: python -m brevact run train.py")
    if not is_module and not Path(program[0]).is_file():
        raise FileNotFoundError(f"PROGRAM {program[0]}: no such file; a module is run by -m: run -m {program[0]}")
    environment = environment_of(allocator, os.environ)
    arguments = [sys.executable, *_options_of_python(), *(["-m"] if is_module else []), *program]
    sys.stdout.flush()
    os.execve(sys.executable, arguments, environment)


def restart_with_mimalloc() -> None:
    """Restart this process's program with mimalloc, if that is installed; otherwise return."""
    is_decided = "LD_PRELOAD" in os.environ or is_left_alone(os.environ) or bool(allocator_in_use())
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc" or is_decided:
        return
    library = library_of("mimalloc")
    if library is None or any(each in library for each in " :"):
        return
    environment = environment_of(library, os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _options_of_python() -> list[str]:
    """Return the interpreter options of ``python -O -X dev -m brevact``, which also apply to the program."""
    place = next((i for i, each in enumerate(sys.orig_argv) if each == "-m"), 0)
    return sys.orig_argv[1:place] if sys.orig_argv[place + 1 : place + 2] == ["brevact"] else []


def environment_of(allocator: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that preloads an allocator first; a ValueError if it is missing, or its path unusable."""
    found = {**environment, "THP_MEM_ALLOC_ENABLE": environment.get("THP_MEM_ALLOC_ENABLE", "1")}
    if allocator == "none":
        return {"LD_PRELOAD": "", **found}  # keeps self-restarting programs from restarting
    if sys.platform != "linux":
        raise ValueError(f"--allocator {allocator}: known on Linux only, not on {sys.platform}; accepted is none")
    names = ALLOCATORS if allocator == "auto" else (allocator,)
    library = next(filter(None, map(library_of, names)), None)
    if library is None:
        raise ValueError(
            f"--allocator {allocator}: found no shared library (looked for {', '.join(ALLOCATORS)}); {_FIX}"
        )
    if any(each in library for each in " :"):
        raise ValueError(
            f"--allocator {allocator}: found {library}, whose path has a space or a colon, which LD_PRELOAD does not "
            "take; copy the file to another path, and pass that: --allocator PATH"
        )
    return {**found, "LD_PRELOAD": " ".join(filter(None, (library, environment.get("LD_PRELOAD"))))}


def library_of(allocator: str) -> str | None:
    """Return an allocator's shared library for LD_PRELOAD; None if there is none here."""
    if allocator not in ALLOCATORS:
        return str(Path(allocator).resolve()) if Path(allocator).is_file() else None
    if allocator == "mimalloc":
        try:
            files = metadata.files("cmeel-mimalloc") or []
        except metadata.PackageNotFoundError:
            files = []
        for file in files:
            if file.name == "libmimalloc.so":
                return str(Path(str(file.locate())).resolve())
    return ctypes.util.find_library(ALLOCATORS[allocator])


def allocator_in_use() -> str:
    """Return the name of this process's preloaded allocator; "" for the C library's own."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return next((name for name, library in ALLOCATORS.items() if f"lib{library}" in maps), "")
