"""Runs the tests of interpreted kernels: Triton reads TRITON_INTERPRET when it is imported, so in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODULES = (
    "interpreted_packing.py",
    "interpreted_groups.py",
    "interpreted_bit_widths.py",
    "interpreted_grids.py",
    "interpreted_normalize.py",
    "interpreted_kernel_ops.py",
    "interpreted_fake_quantization.py",  # whose ops are among those of `interpreted_kernel_ops`
)


def run(*arguments: str) -> None:
    """Run pytest where kernels are interpreted."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *arguments],
        cwd=HERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "failed" not in done.stdout, done.stdout


@pytest.mark.parametrize("modules", [MODULES[:3], MODULES[3:-1]], ids=["uniform", "other"])
def test_interpreted_kernels_pass(modules: tuple[str, ...]):
    run(*(str(HERE / module) for module in modules))


@pytest.mark.exhaustive
def test_interpreted_fake_quantization_passes():
    run(str(HERE / MODULES[-1]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("module", MODULES[:-1])
def test_interpreted_kernels_pass_in_the_full_crosses(module: str):
    run(str(HERE / module), "-m", "exhaustive")
