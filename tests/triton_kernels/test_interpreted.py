"""Runs the tests of interpreted kernels: Triton reads TRITON_INTERPRET when it is imported, so in another process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libraries import run_interpreted

HERE = Path(__file__).parent
LAWS, FAKE_QUANTIZATION = "interpreted_laws.py", "interpreted_fake_quantization.py"


def run(*arguments: str) -> None:
    """Run pytest where kernels are interpreted."""
    printed = run_interpreted("pytest", "-q", "--no-header", "-p", "no:cacheprovider", *arguments, timeout=1800)
    assert " passed" in printed and "failed" not in printed, printed


@pytest.mark.first
def test_interpreted_kernels_pass():
    run(str(HERE / LAWS))


@pytest.mark.first
@pytest.mark.exhaustive
@pytest.mark.parametrize("module", [LAWS, FAKE_QUANTIZATION])
def test_interpreted_kernels_pass_in_the_full_crosses(module: str):
    """Fake quantization's ops are among the kernel ops of the laws."""
    run(str(HERE / module), "-m", "exhaustive or not exhaustive")
