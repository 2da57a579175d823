"""What holds for the whole suite."""

import gc
import os

if "PYTEST_XDIST_WORKER" in os.environ:  # one of as many workers as there are cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from recipes.torchvision_ops import declare_missing_ops

declare_missing_ops()  # before the first import of a library that imports torchvision if it is there

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

gc.disable()  # until all is collected: nearly all of what imports and collecting allocate stays


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the tests marked `gpu` where there is no CUDA device, and reports them as deselected."""
    if torch.cuda.is_available():
        return
    needs_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if needs_gpu:
        config.hook.pytest_deselected(items=needs_gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Takes what is imported and collected out of the passes of the garbage collector, which would visit all of it."""
    gc.enable()
    gc.collect()
    gc.freeze()
