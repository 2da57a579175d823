"""Runs the tests of interpreted kernels: Triton reads TRITON_INTERPRET when it is imported, so in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LAWS, FAKE_QUANTIZATION = "interpreted_laws.py", "interpreted_fake_quantization.py"


def run(*arguments: str) -> None:
    """Run pytest where kernels are interpreted."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *arguments],
        cwd=HERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "failed" not in done.stdout, done.stdout


@pytest.mark.parametrize("some", ["quantize_bytes", "not quantize_bytes"])
def test_interpreted_kernels_pass(some: str):
    run(str(HERE / LAWS), "-k", some)


@pytest.mark.exhaustive
@pytest.mark.parametrize("module", [LAWS, FAKE_QUANTIZATION])
def test_interpreted_kernels_pass_in_the_full_crosses(module: str):
    """Fake quantization's ops are among the kernel ops of the laws."""
    run(str(HERE / module), "-m", "exhaustive or not exhaustive")
