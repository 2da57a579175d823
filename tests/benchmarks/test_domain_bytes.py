"""Bytes of models of other fields: the rows are those of today's code."""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks import domain_bytes
from benchmarks.domain_models import DOMAINS

RESULTS = Path(domain_bytes.__file__).parent / "results" / "domain_bytes.csv"


def test_rows_have_all_models_and_the_bytes_of_one_that_needs_no_library():
    with open(RESULTS, encoding="utf-8", newline="") as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    assert list(rows) == list(DOMAINS)
    (found,) = domain_bytes.measure(["Brevitas U-Net"])
    assert {name: str(value) for name, value in found.items()}.items() <= rows["Brevitas U-Net"].items()
