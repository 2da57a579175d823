"""Kernels are compiled by another process, once on a machine, and loaded from files."""

from __future__ import annotations

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
from brevact.cpu_kernels.kernels import Kernel, prepare
from brevact.cpu_kernels.packing import pack_mask_blocks
from tests.cpu_kernels import example_kernels
from tests.crosses import some_of

forks = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for kernels, and a process that knows of none."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels, "_kernels", [])
    monkeypatch.setattr(kernels, "_unsaved", {})
    return tmp_path


def _as_in_another_process(kernel: Kernel) -> Kernel:
    return Kernel(kernel.__wrapped__)


def _counts(kernel: Kernel) -> bool:
    counts = torch.zeros(5, dtype=torch.int64)
    kernel(counts.data_ptr(), 3, 1, 4)
    return counts.tolist() == [0, 3, 3, 3, 0]


def test_kernel_is_compiled_once_and_again_where_its_file_is_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("NUMBA_CACHE_DIR", ".")
    kernel = _as_in_another_process(example_kernels.count)
    assert _counts(kernel)
    assert {path.name for path in folder.iterdir()} == {kernel.file, "brevact.lock"}
    content = (folder / kernel.file).read_bytes()
    with monkeypatch.context() as changed:
        changed.setattr(subprocess, "run", None)
        prepare()
        assert _counts(_as_in_another_process(example_kernels.count))
    (folder / kernel.file).write_bytes(content[:-7])
    kernels._kernels.clear()
    assert _counts(_as_in_another_process(example_kernels.count))
    assert (folder / kernel.file).read_bytes() == content


@pytest.mark.parametrize("name", some_of(["gone", None], quick=2))
def test_kernel_runs_where_no_folder_is_writable(folder: Path, name: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "writable_folder", lambda: name and folder / name)
    assert _counts(_as_in_another_process(example_kernels.count))
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(subprocess, "run", None)
    assert _counts(_as_in_another_process(example_kernels.count))


def test_the_current_folder_hides_no_module(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("types", "fcntl", "numba"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    root = str(Path(__file__).parents[2])
    monkeypatch.setattr(sys, "path", [root, *filter(os.path.isabs, sys.path), Path("/nowhere")])  # as of a script
    assert _counts(_as_in_another_process(example_kernels.count))


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
    def file() -> str:
        return _as_in_another_process(example_kernels.count).file

    files = [file()]
    for name, value in (("_processor", lambda: "another"), ("_digest", lambda: "another"), ("_versions", lambda: "0")):
        with monkeypatch.context() as changed:
            changed.setattr(kernels, name, value)
            files.append(file())
    with monkeypatch.context() as changed:
        changed.setenv("NUMBA_CPU_NAME", "generic")
        files.append(file())
    assert len(set(files)) == len(files) and file() == files[0]


def _run_kernels(start) -> None:
    start.wait()
    right = all(_counts(_as_in_another_process(example_kernels.count)) for _ in range(2))
    os._exit(0 if right else 1)


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
    assert len(list(folder.glob("*.o"))) == 1 and len(list(folder.iterdir())) == 2  # nothing half written


@forks
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fork_while_another_thread_waits(folder: Path):
    kernel = _as_in_another_process(example_kernels.count)
    waits = threading.Thread(target=_counts, args=(kernel,))
    waits.start()
    time.sleep(0.2)
    child = multiprocessing.get_context("fork").Process(target=lambda: os._exit(0 if _counts(kernel) else 1))
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
    code = kernels._machine_code(_as_in_another_process(pack_mask_blocks))
    assert _relocations(code) == {1}  # R_X86_64_64


@pytest.mark.exhaustive
def test_kernel_that_may_raise_is_refused(folder: Path):
    with pytest.raises(RuntimeError, match=r"\(divide\) are not compiled: TypeError: divide: kernels raise nothing"):
        _as_in_another_process(example_kernels.divide)(0, 1, 0, 1)


def test_preparing_says_why_nothing_is_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "_is_usual", lambda kernel: True)
    _as_in_another_process(example_kernels.count)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(ImportError, match="by processes of Python"):
        prepare()
    monkeypatch.setattr(sys, "frozen", False)
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    with pytest.raises(ImportError, match="NUMBA_DISABLE_JIT"):
        prepare()
