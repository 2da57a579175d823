"""Steps of models of other fields, measured."""

from __future__ import annotations

import csv

from benchmarks import domain_steps
from benchmarks.domain_models import DOMAINS
from scripts.figures import RESULTS


def test_rows_of_a_model_go_to_a_file(tmp_path):
    path = tmp_path / "rows.csv"
    domain_steps.main(["--models", "Brevitas U-Net", "--rounds", "1", "--csv", str(path)])
    (row,) = csv.DictReader(path.open())
    assert row["model"] == "Brevitas U-Net" and float(row["plain_ms"]) > 0
    assert float(row["step"]) > 0 and row["threads"] == "1"


def test_a_model_without_its_libraries_is_left_out(monkeypatch, capsys):
    monkeypatch.setitem(DOMAINS, "PyG GCN", DOMAINS["PyG GCN"]._replace(libraries=("no_such_library",)))
    assert list(domain_steps.rows_of(["PyG GCN"], 1)) == []
    assert "PyG GCN: left out, needs no_such_library" in capsys.readouterr().out


def test_committed_rows_are_of_all_models():
    assert {row["model"] for row in csv.DictReader((RESULTS / "domain_steps.csv").open())} == DOMAINS.keys()
