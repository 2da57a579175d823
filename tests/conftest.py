"""Fixtures and options of the whole suite."""

import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

if "PYTEST_XDIST_WORKER" in os.environ:  # one of as many workers as there are cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else another process imports torch, to compile

import pytest

gc.disable()  # until all is collected: nearly all allocations of imports and collecting stay

KERNELS = Path(__file__).parents[1] / "brevact" / "cpu_kernels"


def pytest_configure(config: pytest.Config) -> None:
    """In a process that runs tests, prepares torch; in one that starts such processes, compiles kernels meanwhile."""
    if config.getoption("tx", None) and not hasattr(config, "workerinput"):
        if not [*KERNELS.glob("__pycache__/*.kernels")] and "NUMBA_CACHE_DIR" not in os.environ:
            command = [sys.executable, "-c", "import brevact.cpu_kernels.launch"]
            config.compiling = subprocess.Popen(command, cwd=KERNELS.parents[1], stderr=subprocess.DEVNULL)
        return
    import torch

    from recipes.torchvision_ops import declare_missing_ops

    declare_missing_ops()  # before the first import of a library that imports torchvision if it is there
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    for device in (torch.cuda, torch.xpu, torch.mtia):
        # Where there is no such device, `torch.manual_seed` formats the stack of its call three times, for the case
        # that the seed cannot be set later on; behind pytest's functions, that takes longer than most tests do.
        device.traceback = SimpleNamespace(format_stack=list)


def pytest_unconfigure(config: pytest.Config) -> None:
    if compiling := getattr(config, "compiling", None):
        compiling.wait()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts long tests first, and leaves out those marked `gpu` where there is no CUDA device, as deselected."""
    import torch

    items.sort(key=lambda item: item.get_closest_marker("first") is None)
    if torch.cuda.is_available():
        return
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu:
        config.hook.pytest_deselected(items=needs_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Excludes imported and collected objects from the garbage collector's passes."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.callbacks.append(_Passes.note)


class _Passes:
    """Full passes of the garbage collector: when one has begun, and whether one since the last freeze was long."""

    SECONDS = 0.1
    start = 0.0
    are_long = False

    @classmethod
    def note(cls, phase: str, info: dict[str, int]) -> None:
        """Takes note of the start or the end of a pass."""
        if info["generation"] < 2:
            return
        if phase == "start":
            cls.start = time.process_time()
        else:
            cls.are_long |= time.process_time() - cls.start > cls.SECONDS


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Excludes objects that a module's tests have left, mostly imported libraries, once passes take long."""
    if _Passes.are_long and nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
        _Passes.are_long = False
