"""The benchmark of layers that are computed again, on a model of a second."""

import csv

from benchmarks import recompute


def test_it_measures_checkpoints_and_policies(tmp_path):
    path = tmp_path / "rows.csv"
    recompute.main(["--models", "GPT nano", "--rounds", "2", "--draws", "2", "--csv", str(path)])
    with open(path, encoding="utf-8", newline="") as file:
        rows = {row["policy"]: row for row in csv.DictReader(file)}
    assert list(rows) == [recompute.CHECKPOINT, *recompute.POLICIES]
    stored = {name: int(row["saved_bytes"]) for name, row in rows.items()}
    assert stored["RECOMPUTE"] < stored["DEFAULT"] < int(rows["DEFAULT"]["plain_bytes"])
    assert float(rows["RECOMPUTE"]["error"]) < float(rows["DEFAULT"]["error"])
    assert all(0 < int(row["peak"]) and float(row["step"]) > 0 for row in rows.values())
