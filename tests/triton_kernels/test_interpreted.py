"""Runs the tests of interpreted kernels: Triton reads TRITON_INTERPRET when it is imported, so in other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODULES = (
    "interpreted_packing.py",
    "interpreted_groups.py",
    "interpreted_bit_widths.py",
    "interpreted_pooling.py",
    "interpreted_grids.py",
    "interpreted_normalize.py",
    "interpreted_passes.py",
)


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, subprocess.Popen]]:
    """One pytest a module, side by side."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider")
    started = {
        name: subprocess.Popen(
            [*command, str(HERE / name)],
            cwd=HERE.parents[1],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for name in MODULES
    }
    yield started
    for process in started.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("module", MODULES)
def test_interpreted_kernels_pass(module: str, runs: dict[str, subprocess.Popen]):
    output, _ = runs[module].communicate(timeout=600)
    assert runs[module].returncode == 0, output
    assert " passed" in output and "failed" not in output, output
