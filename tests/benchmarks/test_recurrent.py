"""Bytes of recurrent layers: the rows are those of today's code."""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks import recurrent

RESULTS = Path(recurrent.__file__).parent / "results" / "recurrent.csv"


def test_rows_have_all_layers_and_the_bytes_of_one():
    with open(RESULTS, encoding="utf-8", newline="") as file:
        rows = {row["layer"]: row for row in csv.DictReader(file)}
    assert list(rows) == list(recurrent.LAYERS)
    (found,) = recurrent.measure(["RNN, tanh"])
    assert {name: str(value) for name, value in found.items()}.items() <= rows["RNN, tanh"].items()
