"""Kernels are compiled by another process, once on a machine, and loaded from files."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import platform
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from brevact.cpu_kernels import kernels
from tests.cpu_kernels import example_kernels
from tests.crosses import some_of

EXAMPLES = example_kernels.__name__
forks = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for kernels."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    return tmp_path


def _counts() -> bool:
    """Whether the kernel of a process that starts counts."""
    kernels.load(EXAMPLES)
    counts = torch.zeros(5, dtype=torch.int64)
    example_kernels.count(counts.data_ptr(), 3, 1, 4)
    return counts.tolist() == [0, 3, 3, 3, 0]


def test_kernel_is_compiled_once_and_again_where_its_file_is_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("NUMBA_CACHE_DIR", ".")
    assert _counts()
    (path,) = folder.glob("*.kernels")
    assert len(list(folder.iterdir())) == 2  # and the lock
    content = path.read_bytes()
    with monkeypatch.context() as changed:
        changed.setattr(subprocess, "run", None)
        assert _counts()
    path.write_bytes(content[:-7])
    assert _counts() and path.read_bytes() == content


@pytest.mark.parametrize("name", some_of(["gone", None], quick=2))
def test_kernel_runs_where_no_folder_is_writable(folder: Path, name: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "writable_folder", lambda: name and folder / name)
    assert _counts() and list(folder.iterdir()) == []


def test_the_current_folder_hides_no_module(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("types", "fcntl", "numba"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    root = str(Path(__file__).parents[2])
    monkeypatch.setattr(sys, "path", [root, *filter(os.path.isabs, sys.path), Path("/nowhere")])  # as of a script
    assert _counts()


def test_kernels_of_a_package_that_is_read_only_lie_in_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__pycache__").write_text("a file: no folder can be made here, by no user")
    monkeypatch.setattr(kernels, "PACKAGE", package)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert kernels.writable_folder() == tmp_path / "user" / "brevact"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert kernels.writable_folder() is None


def test_kernel_of_other_sources_processors_or_settings_is_not_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch):
    files = [kernels._file_of(EXAMPLES)]
    with monkeypatch.context() as changed:
        changed.setattr(kernels, "_compiler", lambda: ("another",))
        files.append(kernels._file_of(EXAMPLES))
    with monkeypatch.context() as changed:
        changed.setattr(Path, "read_bytes", lambda path: b"another")
        files.append(kernels._file_of(EXAMPLES))
    with monkeypatch.context() as changed:
        changed.setenv("NUMBA_CPU_NAME", "generic")
        files.append(kernels._file_of(EXAMPLES))
    assert len(set(files)) == len(files) and kernels._file_of(EXAMPLES) == files[0]


def _run_kernels(start) -> None:
    start.wait()
    os._exit(0 if _counts() and _counts() else 1)


@forks
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_kernel_that_many_processes_want_at_once_is_compiled_once(folder: Path):
    context = multiprocessing.get_context("fork")
    start = context.Barrier(4)
    workers = [context.Process(target=_run_kernels, args=(start,)) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert len(list(folder.glob("*.kernels"))) == 1 and len(list(folder.iterdir())) == 2  # nothing half written


@forks
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fork_while_another_thread_waits(folder: Path):
    waits = threading.Thread(target=_counts)
    waits.start()
    time.sleep(0.2)
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(0 if _counts() else 1))
    child.start()
    child.join(120)
    waits.join()
    assert child.exitcode == 0


def _relocations(elf: bytes) -> set[int]:
    """Kinds of the addresses that a loader writes into an object file of ELF's 64 bits."""
    (sections,), (size, count) = struct.unpack_from("<Q", elf, 40), struct.unpack_from("<HH", elf, 58)
    found = set()
    for at in range(sections, sections + size * count, size):
        (kind,), (start, length) = struct.unpack_from("<I", elf, at + 4), struct.unpack_from("<QQ", elf, at + 24)
        if kind == 4:  # SHT_RELA
            found |= {struct.unpack_from("<I", elf, place + 8)[0] for place in range(start, start + length, 24)}
    return found


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.machine() != "x86_64" or sys.platform != "linux", reason="of ELF on x86_64")
def test_sections_of_a_kernel_may_lie_anywhere(folder: Path):
    """LLVM ends the process where an address of 32 bits is further away: where a process has mapped much memory."""
    _counts()
    for code in kernels._read(kernels._file_of(EXAMPLES)):
        assert _relocations(code) <= {1}  # R_X86_64_64


@pytest.mark.exhaustive
def test_kernel_that_may_raise_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    text = "from brevact.cpu_kernels.intrinsics import *\n@kernel\n"
    text += "def divide(target, amount, start, stop):\n    store(i64_at(target), 0, range(start, stop, amount)[0])\n"
    (folder / "raising.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    importlib.import_module("raising")
    with pytest.raises(ImportError, match=r"are not compiled: TypeError: divide: kernels raise nothing"):
        kernels.load("raising")


def test_loading_says_why_nothing_is_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(ImportError, match="by processes of Python"):
        kernels.load(EXAMPLES)
    monkeypatch.setattr(sys, "frozen", False)
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    with pytest.raises(ImportError, match="NUMBA_DISABLE_JIT"):
        kernels.load(EXAMPLES)
