"""The benchmark of layers that are recomputed, on a model of a second."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks import recompute


def rows_of(path: Path, ways: list[str]) -> dict[str, dict[str, str]]:
    """Rows of a tiny model, by the way to keep less."""
    recompute.main(["--models", "GPT nano", "--rounds", "2", "--draws", "2", "--csv", str(path), "--policies", *ways])
    with open(path, encoding="utf-8", newline="") as file:
        return {row["policy"]: row for row in csv.DictReader(file)}


@pytest.mark.exhaustive
def test_it_measures_checkpoints_and_policies(tmp_path):
    ways = [recompute.CHECKPOINT, *recompute.POLICIES]
    rows = rows_of(tmp_path / "rows.csv", ways)
    assert list(rows) == ways
    stored = {name: int(row["saved_bytes"]) for name, row in rows.items()}
    assert stored["RECOMPUTE"] < stored["DEFAULT"] < int(rows["DEFAULT"]["plain_bytes"])
    assert float(rows["RECOMPUTE"]["error"]) < float(rows["DEFAULT"]["error"])
    assert 0 < float(rows["RECOMPUTE"]["noise"]) < float(rows["DEFAULT"]["noise"]) < 1
    assert float(rows["LosslessBackward:recompute=1024"]["noise"]) == 0
    assert rows[recompute.CHECKPOINT]["noise"] == rows[recompute.CHECKPOINT]["bias2"] == ""
    assert all(0 < int(row["peak"]) and float(row["step"]) > 0 for row in rows.values())


@pytest.mark.exhaustive
def test_it_measures_compiled_steps_and_fitted_policies(tmp_path, capsys):
    rows = rows_of(tmp_path / "rows.csv", [recompute.COMPILED, "fit 15x", "fit 1000000x"])
    compiled, fitted = rows[recompute.COMPILED], rows["fit 15x"]
    assert int(compiled["saved_bytes"]) < int(compiled["plain_bytes"]) and float(compiled["error"]) < 1e-5
    assert float(fitted["ratio"]) >= 15 and "fit 1000000x" not in rows
    assert "fit 1000000x: " in capsys.readouterr().out
