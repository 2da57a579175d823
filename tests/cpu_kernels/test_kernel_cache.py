"""The cache of compiled kernels on disk."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
from pathlib import Path

import numba
import pytest
from numba import types

from brevact.cpu_kernels import kernel_cache
from brevact.cpu_kernels.kernel_cache import PackageCache, Progress
from brevact.cpu_kernels.memory import kernel
from brevact.private_names.of_numba import CFunc, normalize_signature


def _double(x):
    return 2 * x


def _compile_for(name: str):
    function = CFunc(_double, normalize_signature(types.int64(types.int64)), {}, {"error_model": "numpy"})
    PackageCache.attach(function, _double, name)
    function.compile()
    return function


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_kernel_is_cached_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert kernel(_double)(21) == 42
    assert {path.suffix for path in _files(tmp_path)} == {".nbi", ".nbc"}
    again = kernel(_double)
    assert again(21) == 42 and sum(again.stats.cache_hits.values()) == 1


def test_kernel_runs_where_the_cache_can_be_neither_read_nor_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    compiled = kernel(_double)
    (folder,) = tmp_path.iterdir()
    folder.rmdir()
    folder.write_text("no folder any more")
    assert compiled(21) == 42


def test_kernel_is_compiled_again_where_its_file_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert kernel(_double)(21) == 42
    for path in _files(tmp_path):
        path.write_bytes(path.read_bytes()[:-7])
    again = kernel(_double)
    assert again(21) == 42 and not again.stats.cache_hits
    after = kernel(_double)
    assert after(21) == 42 and after.stats.cache_hits


def test_kernel_of_a_package_that_is_read_only_is_cached_in_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source = tmp_path / "package" / "source.py"
    source.parent.mkdir()
    source.write_text("def triple(x):\n    return 3 * x\n")
    (source.parent / "__pycache__").write_text("a file: no folder can be made here, by no user")
    names: dict[str, object] = {}
    exec(compile(source.read_text(), str(source), "exec"), names)
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert kernel(names["triple"])(2) == 6
    assert len(_files(tmp_path / "user")) == 2
    again = kernel(names["triple"])
    assert again(2) == 6 and again.stats.cache_hits


def test_kernel_runs_where_no_folder_is_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(numba.config, "CACHE_LOCATOR_CLASSES", "UserProvidedCacheLocator")
    compiled = kernel(_double)
    assert compiled(21) == 42 and compiled.stats.cache_path is None


def test_kernel_of_another_processor_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert kernel(_double)(21) == 42
    monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    moved = kernel(_double)
    assert moved(21) == 42 and not moved.stats.cache_hits
    monkeypatch.undo()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    back = kernel(_double)
    assert back(21) == 42 and back.stats.cache_hits


def test_functions_of_one_definition_share_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Else one of two processes could read the other's code under its own name."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    _compile_for("one")
    first = {path: path.read_bytes() for path in _files(tmp_path)}
    _compile_for("two")
    assert len(_files(tmp_path)) == 2 * len(first) == 4
    assert {path: path.read_bytes() for path in first} == first


def _compile_and_call(folder: str, start, name: str) -> None:
    numba.config.CACHE_DIR = folder
    start.wait()
    right = kernel(_double)(21) == 42 and _compile_for(name).ctypes(21) == 42
    os._exit(0 if right else 1)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_kernels_compiled_by_many_processes_at_once_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    context = multiprocessing.get_context("fork")
    start = context.Barrier(4)
    names = ("one", "two", "one", "three")
    workers = [context.Process(target=_compile_and_call, args=(str(tmp_path), start, name)) for name in names]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert {path.suffix for path in _files(tmp_path)} == {".nbi", ".nbc"}  # nothing half written
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    again = kernel(_double)
    assert again(21) == 42 and again.stats.cache_hits
    assert len(_files(tmp_path)) == 8  # the kernel and three functions
    assert all(_compile_for(name).cache_hits for name in set(names))


def test_progress_says_once_that_compilation_takes_long(caplog: pytest.LogCaptureFixture, monkeypatch):
    monkeypatch.setattr(kernel_cache, "PATIENCE", 0.02)
    progress = Progress()
    with caplog.at_level(logging.WARNING, "brevact"):
        progress.begin("folder")
        progress.begin("folder")  # of a kernel that the first one calls
        progress.end()
        deadline = time.monotonic() + 10
        while not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.01)
        progress.end()
        progress.begin("folder")
        time.sleep(0.05)
        progress.end()
    assert caplog.messages == ["brevact is compiling its CPU kernels (once, kept in folder)"]


def test_progress_says_nothing_of_what_is_quick(caplog: pytest.LogCaptureFixture):
    progress = Progress()
    with caplog.at_level(logging.WARNING, "brevact"):
        progress.begin(None)
        progress.end()
    assert not caplog.messages
