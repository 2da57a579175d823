"""The tests that need a GPU, in several calls: those that passed are left out of the next one.

This module is also the pytest plugin that does so: it writes the names of the tests that pass, and deselects them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

FILE = "gpu_tests_passed.txt"
_ENVIRONMENT = "BREVACT_GPU_TESTS_PASSED"
_LEAST = 30.0
"""Seconds in which tests are begun at all."""
ROOT = Path(__file__).parent.parent.parent


def run(folder: Path, seconds: float, paths: tuple[str, ...] = ("tests",), marks: str = "gpu") -> tuple[int, int, int]:
    """Run tests that have not passed yet.

    Args:
        folder: where their names are written.
        seconds: after which they are interrupted.
        paths: of the tests, from the root of the repository.
        marks: expression of pytest that selects them.

    Returns:
        How many have passed in this call, how many failed, and how many are left, at least 1 if not all were run.
    """
    if seconds < _LEAST:
        return 0, 0, 1
    passed = folder / FILE
    passed.touch()
    before = set(passed.read_text().splitlines())
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "benchmarks.gpu.tests"]
    if workers := _workers():
        command += ["-n", str(workers)]
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # a worker's, say
    environment = {**outer, _ENVIRONMENT: str(passed.resolve()), "PYTHONPATH": str(ROOT)}
    log = folder / "gpu_tests.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "-m", marks, "--tb=short", *paths], cwd=ROOT, env=environment, stdout=file, stderr=file
        )
        deadline = time.monotonic() + seconds - 10
        interrupted = False
        while process.poll() is None:
            time.sleep(0.5)
            if time.monotonic() > deadline:
                process.terminate() if interrupted else process.send_signal(2)
                interrupted, deadline = True, deadline + 8
    print(log.read_text()[-3000:], flush=True)
    counted = re.findall(r"(\d+) failed", log.read_text())
    new = len(set(passed.read_text().splitlines()) - before)
    return new, int(counted[-1]) if counted else 0, int(interrupted)


def _workers() -> int:
    """Processes of pytest-xdist; 0 where it is not installed or does not pay."""
    try:
        import xdist  # noqa: F401
    except ImportError:
        return 0
    cores = os.cpu_count() or 1
    return min(12, cores * 3 // 4) if cores > 2 else 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what passed in an earlier call."""
    passed = set(Path(os.environ[_ENVIRONMENT]).read_text().splitlines())
    done = [item for item in items if item.nodeid in passed]
    config.hook.pytest_deselected(items=done)
    items[:] = [item for item in items if item.nodeid not in passed]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the name of a test that passed; of several processes of pytest the one that reports does so."""
    if report.when == "call" and report.passed and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ[_ENVIRONMENT]).open("a") as file:
            file.write(report.nodeid + "\n")
