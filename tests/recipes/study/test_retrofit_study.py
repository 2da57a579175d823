"""Retrofitted networks, seed by seed."""

import pytest

from recipes import files
from recipes.study.__main__ import main
from recipes.study.retrofit_study import COLUMNS, measure, table
from recipes.study.run import Size


def rows_of(accuracies):
    """Rows of full precision and of a format: (exact, at once, fine-tuned) by seed."""
    rows = []
    for seed, (exact, once, tuned) in accuracies.items():
        shared = dict.fromkeys(COLUMNS, "1") | {"seed": str(seed)}
        rows.append(shared | {"norms": "full precision", "scope": "", "accuracy": exact, "fine_tuned_accuracy": ""})
        rows.append(shared | {"norms": "L4", "scope": "all", "accuracy": once, "fine_tuned_accuracy": tuned})
    return rows


def test_table_pairs_seeds():
    lines = table(rows_of({0: (0.9, 0.8, 0.9), 1: (0.7, 0.6, 0.7)})).splitlines()
    assert lines[2] == "| full precision |  | 2 | 80.00 |  |  |  | 1.00 |"
    assert lines[3].startswith("| L4 | all | 2 | 70.00 | -10.00 [-10.00, -10.00] | 80.00 | +0.00 [0.00, 0.00] |")


@pytest.mark.exhaustive
def test_main_retrofits_seeds_that_have_no_rows(tmp_path, capsys):
    size = Size("digits", 1, 64)
    rows = measure(size, 0, "data", "cpu", ("L4",))
    assert [(row["norms"], row["scope"]) for row in rows][1:] == [("L4", "all"), ("L4", "all-but-first")]
    files.write_rows(tmp_path / "a-retrofit.csv", COLUMNS, rows)
    size_of_rows = ["--dataset", "digits", "--epochs", "1", "--train-size", "64"]
    common = ["retrofit", "--csv", str(tmp_path / "a.csv"), "--seeds", "0", *size_of_rows]
    assert main(common) == 0 and "| L4 | all | 1 |" in capsys.readouterr().out
