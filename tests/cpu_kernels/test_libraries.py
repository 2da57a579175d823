"""Kernels are compiled to files by other processes, once on a machine, and loaded from there."""

from __future__ import annotations

import ast
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from llvmlite import binding

from brevact.cpu_kernels import compiler, intrinsics, kernels, libraries, processes
from brevact.cpu_kernels.kernels import Kernel, prepare
from tests.cpu_kernels import example_kernels


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for libraries, and a process that has asked for none."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels, "_kernels", [])
    monkeypatch.setattr(processes, "_compilers", processes.Compilers())
    monkeypatch.setattr(libraries, "_temporary", [])
    libraries.folder_of_process.cache_clear()
    return tmp_path


def _as_in_another_process(kernel: Kernel) -> Kernel:
    return Kernel(kernel.__wrapped__)


def _counts(kernel: Kernel) -> bool:
    counts = torch.zeros(5, dtype=torch.int64)
    kernel(counts.data_ptr(), 3, 1, 4)
    return counts.tolist() == [0, 3, 3, 3, 0]


def _compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)


def test_kernel_is_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    assert _counts(_as_in_another_process(example_kernels.count))
    found = {path.suffix for path in folder.iterdir()}  # and perhaps a file of a kernel that is compiled beside it
    assert {".so", ".lock"} <= found and ".o" not in found
    _compile_nothing(monkeypatch)
    prepare()
    assert _counts(_as_in_another_process(example_kernels.count))


def test_kernel_runs_where_no_linker_is(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "")
    assert _counts(_as_in_another_process(example_kernels.count))
    assert {path.suffix for path in folder.iterdir()} == {".o", ".lock"}
    _compile_nothing(monkeypatch)
    assert _counts(_as_in_another_process(example_kernels.count))


@pytest.mark.exhaustive
def test_kernel_is_compiled_again_where_its_file_is_damaged(folder: Path):
    assert _counts(_as_in_another_process(example_kernels.count))
    (path,) = folder.glob("*.so")
    content = path.read_bytes()
    path.unlink()  # not in place: this process has loaded it
    path.write_bytes(content[:-7])
    assert _counts(_as_in_another_process(example_kernels.count))
    (path,) = folder.glob("*.so")
    assert path.stem.endswith(libraries.hash_of(path.read_bytes()))


@pytest.mark.exhaustive
def test_kernel_runs_where_no_folder_is_writable(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "file").write_text("no folder")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder / "file"))
    script = (
        "from brevact.cpu_kernels import libraries\n"
        "from tests.cpu_kernels.test_libraries import _counts, example_kernels\n"
        "assert _counts(example_kernels.count)\n"
        "print(libraries.folder_of_process())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert not Path(done.stdout.strip()).exists()


def test_kernel_runs_where_the_folder_takes_no_file(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "writable_folder", lambda: folder / "gone")
    assert _counts(_as_in_another_process(example_kernels.count))
    assert list(folder.iterdir()) == []


def test_the_current_folder_hides_no_module(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("types", "fcntl", "numba"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    root = str(Path(__file__).parents[2])
    monkeypatch.setattr(sys, "path", [root, *filter(os.path.isabs, sys.path)])  # as of a script
    assert _counts(_as_in_another_process(example_kernels.count))


def test_libraries_of_a_package_that_is_read_only_lie_in_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__pycache__").write_text("a file: no folder can be made here, by no user")
    monkeypatch.setattr(libraries, "PACKAGE", package)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    assert libraries.writable_folder() == tmp_path / "user" / "brevact"


def test_kernel_of_other_sources_processors_or_settings_is_not_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def stem() -> str:
        return _as_in_another_process(example_kernels.count).task.stem

    stems = [stem()]
    for name, value in (("_processor", lambda: "another"), ("_digest", lambda: "another"), ("_versions", lambda: "0")):
        with monkeypatch.context() as changed:
            changed.setattr(libraries, name, value)
            stems.append(stem())
    with monkeypatch.context() as changed:
        changed.setenv("NUMBA_CPU_NAME", "generic")
        stems.append(stem())
    assert len(set(stems)) == len(stems) and stem() == stems[0]


def _run_kernels(start) -> None:
    start.wait()
    right = all(_counts(_as_in_another_process(example_kernels.count)) for _ in range(2))
    os._exit(0 if right else 1)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
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
    assert len(list(folder.glob("*.so"))) == 1 and len(list(folder.iterdir())) == 2  # nothing half written


@pytest.mark.exhaustive
def test_kernel_that_may_raise_is_refused_and_others_are_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch):
    bad, good = map(_as_in_another_process, (example_kernels.divide, example_kernels.count))
    with pytest.raises(RuntimeError, match="divide could not be compiled: TypeError: divide: kernels raise nothing"):
        processes.compilers().wait_for(bad.task, [good.task])
    _compile_nothing(monkeypatch)
    assert _counts(good)


def test_preparing_says_why_nothing_is_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch):
    _as_in_another_process(example_kernels.count)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(ImportError, match="by processes of Python"):
        prepare()
    monkeypatch.setattr(sys, "frozen", False)
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    _as_in_another_process(example_kernels.count)
    with pytest.raises(ImportError, match="NUMBA_DISABLE_JIT"):
        prepare()


@pytest.mark.exhaustive
def test_waiting_is_said_once(folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "PATIENCE", 0.0)
    with caplog.at_level(logging.WARNING, "brevact"):
        _as_in_another_process(example_kernels.count).address  # noqa: B018
        _as_in_another_process(example_kernels.draw_words).address  # noqa: B018
    assert caplog.messages == [f"brevact is compiling its CPU kernels (once, kept in {folder})"]


@pytest.mark.parametrize(("called", "loads"), [("memset_that_is_nowhere", False), ("abort", True)])
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a linker")
def test_a_library_that_does_not_load_is_not_kept(tmp_path: Path, called: str, loads: bool):
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    code = f"declare void @{called}()\ndefine void @f() {{\n  call void @{called}()\n  ret void\n}}"
    target = binding.Target.from_default_triple().create_target_machine(reloc="pic", codemodel="default")
    (tmp_path / "f.o").write_bytes(target.emit_object(binding.parse_assembly(code)))
    assert compiler._link("cc", tmp_path / "f.o", tmp_path / "f.so") == loads


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
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


@pytest.mark.exhaustive
def test_file_that_cannot_be_replaced_is_passed_over(folder: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(path: Path, **_: bool) -> None:
        raise PermissionError(path)

    (folder / f"{_as_in_another_process(example_kernels.count).task.stem}-0123456789abcdef.so").write_bytes(b"")
    monkeypatch.setattr(Path, "unlink", refused)
    assert _counts(_as_in_another_process(example_kernels.count))


@pytest.mark.exhaustive
def test_folder_that_is_relative(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("NUMBA_CACHE_DIR", ".")
    for _ in range(2):
        assert _counts(_as_in_another_process(example_kernels.count))


def test_user_without_a_home_gets_no_folder_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    assert libraries.folders() == [libraries.PACKAGE / "__pycache__"]


@pytest.mark.exhaustive
def test_paths_that_are_no_text_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path, Path("/nowhere")])
    assert _counts(_as_in_another_process(example_kernels.count))


def test_names_that_kernels_are_written_in_have_a_meaning():
    for path in libraries.PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "brevact.cpu_kernels.memory":
                assert [name.name for name in node.names if not hasattr(intrinsics, name.name)] == [], path


def test_names_that_stand_for_a_module_are_keys_and_do_nothing():
    torch_ = compiler.Names("torch")
    assert torch_.int16 is torch_.int16 and torch_.int16 != torch_.int32 and {torch_.nn.Parameter: 1}
    with pytest.raises(TypeError, match="not callable"):
        torch_.zeros(3)
    with pytest.raises(AttributeError, match=r"module 'torch' has no attribute '__version__'"):
        torch_.__version__  # noqa: B018
