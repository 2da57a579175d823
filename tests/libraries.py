"""Optional libraries, which `make test-all` installs, and Triton's interpreter."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest


def marks_of(libraries: Sequence[str]) -> list[pytest.MarkDecorator]:
    """Return the marks of a test that needs libraries, skipped where one is missing; none without libraries."""
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    reason = f"not installed: {', '.join(missing)} (make test-all installs them)"
    return [pytest.mark.exhaustive, pytest.mark.skipif(bool(missing), reason=reason)] if libraries else []


def run_interpreted(*arguments: str, timeout: int = 600) -> str:
    """Return what `python -m` prints where Triton, which reads TRITON_INTERPRET when it is imported, interprets."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
