"""`python -m recipes.study`: trainings in pairs, resumed run by run, and the table of differences."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from recipes import study


def test_main_trains_pairs_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "rows.csv"
    options = ["--epochs", "2", "--train-size", "64", "--test-size", "32", "--seeds", "0", "--csv", str(path)]
    assert study.main([*options, "--policies", "None", "StochBackward2bit"]) == 0
    written = path.read_text()
    assert study.main([*options, "--policies", "None", "StochBackward2bit"]) == 0
    assert path.read_text() == written and len(written.splitlines()) == 3
    assert "StochBackward2bit  1 pairs" in capsys.readouterr().out
    assert study.main([*options, "--policies", "fit:bytes=DEFAULT"]) == 1
    assert "name that policy before it" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_fit_is_compared_at_the_bytes_of_its_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "rows.csv"
    options = ["--epochs", "2", "--train-size", "128", "--test-size", "32", "--seeds", "0", "--csv", str(path)]
    assert study.main([*options, "--policies", "StochBackward2bit", "fit:bytes=StochBackward2bit"]) == 0
    uniform, fitted = (int(row["saved_bytes"]) for row in study.read(path))
    assert 0.8 * uniform < fitted <= uniform
    assert "fit:bytes=StochBackward2bit against StochBackward2bit  1 pairs" in capsys.readouterr().out


@pytest.mark.exhaustive
def test_compiled_runs_pack_what_their_graphs_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    path, options = tmp_path / "rows.csv", ["--epochs", "2", "--train-size", "64", "--test-size", "32", "--seeds", "0"]
    assert study.main([*options, "--compile", "--csv", str(path), "--policies", "None", "StochBackward2bit"]) == 0
    plain, packed = study.read(path)
    assert plain["settings"] == packed["settings"] == "compiled" and plain["train_loss"] != packed["train_loss"]
    assert 8 * int(packed["saved_bytes"]) < int(plain["saved_bytes"])


def test_comparisons_pair_runs_of_a_seed():
    kind = {"dataset": "digits", "recipe": "qat", "epochs": "4", "train_size": "", "settings": ""}
    rows = [
        {**kind, "policy": policy, "seed": seed, "train_loss": loss, "test_accuracy": "0.5"}
        | {"plain_bytes": "80", "saved_bytes": "8" if policy == "DEFAULT" else "80"}
        for policy, seed, loss in (
            *(("None", "0", "1.0"), ("None", "1", "2.0"), ("DEFAULT", "0", "1.1")),
            *(("DEFAULT", "1", "2.2"), ("DEFAULT", "2", "9.0")),
        )
    ]
    (found,) = study.comparisons(rows)
    assert (found.pairs, found.less, found.accuracy.mean) == (2, 10, 0)
    assert found.loss.mean == pytest.approx(0.15)


def test_a_file_of_other_columns_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "rows.csv").write_text("name,ms\na,1\n")
    assert study.main(["--csv", str(tmp_path / "rows.csv")]) == 1
    assert "has the columns name, ms" in capsys.readouterr().err
