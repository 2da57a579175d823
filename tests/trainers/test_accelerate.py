"""A policy over a run of two processes that Accelerate launches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_launched_processes_agree_on_policy_widths_and_weights(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "tests.trainers.launched", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=400,
        check=True,
    )
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == {**second, "figures": first["figures"]}  # bytes are each process's own
    assert first["processes"] == 2 and first["is_restored"] and first["left"] == 0
    assert first["state"]["steps"] == 2
    assert first["keys"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert first["figures"]["brevact/plain_mib"] >= 3.5 * first["figures"]["brevact/saved_mib"]
