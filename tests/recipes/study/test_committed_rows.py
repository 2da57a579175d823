"""Rows of runs that are under version control: they must be of the policies that the package has now."""

from pathlib import Path

import pytest
import torch

from recipes.data import ImageDataset, Normalization, Split
from recipes.study import records, training
from recipes.study.definitions import STUDIES
from recipes.study.run import Run
from recipes.study.training import Training

ROWS = records.read(Path(__file__).parents[3] / "benchmarks" / "results" / "study.csv")
RUNS = {run.key: run for study in STUDIES.values() for run in study.runs(study.size, range(study.seeds))}
OF_FIRST_SEED = {key: run for key, run in RUNS.items() if run.seed == 0 and key in ROWS and "fit" not in run.policy}


def test_rows_are_runs_of_studies():
    assert ROWS.keys() <= RUNS.keys()


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, id=run.words, marks=() if run.policy == "DEFAULT" else pytest.mark.exhaustive)
        for run in OF_FIRST_SEED.values()
        if "Mix" not in run.policy  # their sizes are drawn, from the seeds of the version that was trained
    ],
)
def test_rows_have_the_bytes_of_the_policies_of_now(run: Run, monkeypatch: pytest.MonkeyPatch):
    """Where a policy has changed, its rows have to be removed, and trained anew."""
    noise = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    split = Split(noise, torch.arange(64) % 10)
    data = ImageDataset("noise", split, split, 10, Normalization((0.5,) * 3, (0.25,) * 3), augment=True)
    monkeypatch.setattr(training, "data_of", lambda run, data_dir: data)
    report, row = Training(run, "data", "cpu").report, ROWS[run.key]
    assert str(report.plain_bytes) == row["plain_bytes"]
    assert run.policy == "None" or str(report.saved_bytes) == row["saved_bytes"]
