"""`python -m recipes.study`."""

import argparse

import pytest

from recipes.files import read_rows, write_rows
from recipes.fitted_policies import policy_or_fit
from recipes.study.__main__ import by_seed, main
from recipes.study.definitions import STUDIES
from recipes.study.records import read
from recipes.study.run import Size
from tests.recipes.running import PNG


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda study: study.name)
def test_studies_can_be_run(study):
    """Policies and settings exist, and no two cases are the same runs or have the same name."""
    runs = list(study.runs(study.size, range(study.seeds)))
    assert len({run.key for run in runs}) == len(runs) == study.seeds * len({case.label for case in study.cases})
    for run in runs[: len(study.cases)]:
        policy_or_fit(run.policy.partition("@")[0])
        run.settings("data", "cpu")
    for one, other in study.contrasts:
        assert study.case(one) != study.case(other)


def test_main_lists_what_there_is_to_run(tmp_path, capsys):
    assert main(["list", "--csv", str(tmp_path / "runs.csv")]) == 0
    text = capsys.readouterr().out
    assert all(study.question in text and study.source in text for study in STUDIES.values())
    assert "24 runs: 24 to run, " in text and "6 of studies above" in text


@pytest.mark.exhaustive
def test_main_trains_then_tells_from_the_rows_alone(tmp_path, capsys):
    common = ["dual-precision", "--dataset", "digits", "--epochs", "2", "--train-size", "16"]
    common += ["--csv", str(tmp_path / "runs.csv"), "--out-dir", str(tmp_path)]
    assert main([*common, "--seeds", "0", "--device", "cpu"]) == 0
    table = capsys.readouterr().out
    assert len(read(tmp_path / "runs.csv")) == 4 and "missing" not in table
    picture = tmp_path / "dual-precision.png"
    assert picture.read_bytes().startswith(PNG)
    picture.unlink()
    assert main([*common, "--seeds", "0", "--summary"]) == 0
    assert capsys.readouterr().out == table and picture.exists()
    assert main([*common, "--summary"]) == 0
    assert "8 of 12 runs are missing" in capsys.readouterr().out


def test_main_says_what_to_do_and_exits_with_2(tmp_path, capsys):
    assert main(["main", "--csv", str(tmp_path / "runs.csv"), "--epochs", "0", "--dataset", "digits"]) == 2
    assert capsys.readouterr().err.startswith("error: --epochs 0 is not possible: use at least 1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--epochs", "1"], "--epochs 1 is not possible: the first epoch is the warm-up; use at least 2"),
        (["--jobs", "0"], "--jobs 0 is not possible: use at least 1"),
        (["--page", "none.md"], "--page none.md is not there"),
        (["--csv", "{file}/runs.csv"], "cannot write to {file} ("),
        (["--out-dir", "{file}"], "cannot write to {file} ("),
        (["--device", "gpu"], "--device gpu cannot be used here: "),
        (["--csv", "{folder}"], "--csv {folder} is not readable"),
    ],
)
def test_main_refuses_before_it_trains(tmp_path, capsys, arguments, said):
    names = {"file": tmp_path / "file", "folder": tmp_path}
    names["file"].touch()
    common = ["main", "--dataset", "digits", "--csv", str(tmp_path / "runs.csv"), "--out-dir", str(tmp_path)]
    assert main([*common, *(word.format(**names) for word in arguments)]) == 2
    assert said.format(**names) in capsys.readouterr().err


def test_by_seed_keeps_rows_of_other_sizes_and_of_other_commands(tmp_path):
    columns = ("dataset", "train_size", "epochs", "seed", "value")
    options = argparse.Namespace(csv=tmp_path / "runs.csv", summary=False)
    path, size = tmp_path / "runs-x.csv", Size("digits", 2, None)

    def row(seed, value, epochs="2"):
        return dict(zip(columns, ("digits", "all", epochs, str(seed), value), strict=True))

    def measured(seed):
        write_rows(path, columns, [row(0, "other size", "9"), row(1, "other command")])  # meanwhile
        return [row(seed, "mine")]

    write_rows(path, columns, [row(0, "other size", "9")])
    found = by_seed(options, "x", columns, size, [0], measured)
    assert [each["value"] for each in found] == ["other command", "mine"]
    assert [each["value"] for each in read_rows(path)] == ["other size", "other command", "mine"]


def test_main_stops_where_there_are_no_images(tmp_path, capsys):
    assert main(["main", "--csv", str(tmp_path / "runs.csv"), "--data-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("CIFAR-10 was not found") == 1


def test_main_ends_when_time_is_up(tmp_path, capsys):
    arguments = ["qat", "--dataset", "digits", "--epochs", "2", "--train-size", "16", "--seeds", "0", "--device", "cpu"]
    arguments += ["--csv", str(tmp_path / "runs.csv"), "--out-dir", str(tmp_path), "--stop-after", "0"]
    assert main(arguments) == 1
    assert "3 of 3 runs are missing" in capsys.readouterr().out and read(tmp_path / "runs.csv") == {}
