"""The core of the recipes of fields, on a recipe without a library of its own."""

import argparse
import dataclasses
import statistics

import pytest
import torch

import brevact
from recipes.domains import Domain, library, run_command_line
from recipes.domains.command_line import variant_of
from recipes.domains.variants import prepare
from recipes.errors import RecipeError
from recipes.files import read_rows
from tests.recipes.domains.tiny import DOMAIN, Net, TinySettings, TinyTask, main
from tests.recipes.running import PNG, interrupted_at_forward

#: A step of the tiny model is too small for the default's smallest packed tensor.
POLICY = "StochBackward4bit:min_numel=0"
VARIANTS = ["plain", "checkpoint", POLICY, "LosslessBackward"]
COMMAND = ["--variants", *VARIANTS, "--seeds", "0", "1"]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    assert main([*COMMAND, "--out-dir", str(folder)]) == 0
    return folder


def without_time(path):
    times = {"seconds", "time"}
    return [{key: value for key, value in row.items() if key not in times} for row in read_rows(path)]


def values_of(folder):
    return {(row["variant"], int(row["seed"])): float(row["value"]) for row in read_rows(folder / "runs.csv")}


def test_main_trains_each_variant(whole_run):
    names = {path.name for path in whole_run.iterdir()}
    assert {"tiny-plain.png", "tiny-checkpoint.png", "runs.csv", "epochs.csv", "table.csv", "settings.json"} < names
    assert "checkpoint.pt" not in names and (whole_run / "tiny-plain.png").read_text() == "4 steps"
    assert (whole_run / "curves.png").read_bytes().startswith(PNG)
    table = read_rows(whole_run / "table.csv")
    assert [row["variant"] for row in table] == VARIANTS
    plain, checkpoint, packed, lossless = (float(row["kept_mib"]) for row in table)
    assert checkpoint < plain and lossless < plain and packed < 0.5 * plain


def test_trainings_of_a_seed_are_paired(whole_run):
    values = values_of(whole_run)
    for seed in (0, 1):
        plain, checkpoint, packed, lossless = (values[variant, seed] for variant in VARIANTS)
        assert plain == checkpoint == lossless != packed
    row = read_rows(whole_run / "table.csv")[2]
    differences = [values[POLICY, seed] - values["plain", seed] for seed in (0, 1)]
    rounding = 1e-9  # of values below 1 in files, to nine digits
    assert float(row["difference"]) == pytest.approx(statistics.mean(differences), abs=rounding)
    assert float(row["difference_se"]) == pytest.approx(statistics.stdev(differences) / 2**0.5, abs=rounding)


def test_main_prints_the_table_of_what_was_asked_for(whole_run, capsys):
    assert main(["--variants", POLICY, "--seeds", "0", "1", "--out-dir", str(whole_run), "--resume"]) == 0
    output = capsys.readouterr().out
    assert "x less)" in output and " ± " in output and "LosslessBackward" not in output
    header, plain, packed = output.splitlines()[:3]
    assert header.rstrip().endswith(" error - plain") and plain.startswith("plain ") and packed.startswith(POLICY)


@pytest.mark.parametrize("number", [2, 9, 20])
def test_main_resumes_an_interrupted_training_to_the_same_result(whole_run, tmp_path, number):
    command = [*COMMAND, "--out-dir", str(tmp_path)]
    with interrupted_at_forward(Net, number):
        assert main(command) == 130
    assert main([*command, "--resume"]) == 0
    for name in ("runs.csv", "epochs.csv"):
        assert without_time(tmp_path / name) == without_time(whole_run / name)
    assert (tmp_path / "tiny-plain.png").read_text() == "4 steps"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "1"], "--width 1 is not possible: use at least 8"),
        (["--lr", "0"], "--lr 0.0 is not possible: use a value above 0"),
        (["--device", "nowhere"], "--device nowhere cannot be used here"),
        (["--resume"], "no runs to resume: there is no"),
        (["--lr", "1e30", "--variants", "plain"], "the training loss became"),
    ],
)
def test_main_says_what_to_do_and_exits_with_2(tmp_path, capsys, arguments, message):
    assert main([*arguments, "--out-dir", str(tmp_path / "runs")]) == 2
    error = capsys.readouterr().err
    assert message in error and error.splitlines()[-1].startswith("error: ")


def test_a_variant_may_be_checkpoints_and_a_policy():
    task = TinyTask(TinySettings(), 0, torch.device("cpu"))
    region = prepare(task, variant_of(f"checkpoint+{POLICY}"))
    assert task.model.checkpointed and "StochBackward4bit" in str(brevact.backward_policy(task.model))
    task.step(next(task.batches(1)), region)
    with pytest.raises(argparse.ArgumentTypeError, match=r"^nothing is not a backward quantizer or policy"):
        variant_of("checkpoint+nothing")


def test_main_refuses_an_unknown_variant(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--variants", "checkpoints"])
    assert "None is full precision" in capsys.readouterr().err


def test_main_keeps_runs_with_other_settings_apart(whole_run, capsys):
    folder = whole_run
    assert main(["--out-dir", str(folder)]) == 2
    assert "already holds runs; go on with --resume" in capsys.readouterr().err
    assert main(["--out-dir", str(folder), "--resume", "--epochs", "3"]) == 2
    assert "have other settings (--epochs)" in capsys.readouterr().err


def test_main_says_what_to_install(tmp_path, capsys):
    lacking = dataclasses.replace(DOMAIN, libraries=("torch", "no_such_library"))
    assert run_command_line(lacking, ["--out-dir", str(tmp_path / "runs")]) == 2
    assert capsys.readouterr().err == (
        "error: no_such_library cannot be imported; install by pip install '.[domains]'\n"
    )
    assert not (tmp_path / "runs").exists()
    with pytest.raises(RecipeError, match="no_such_library cannot be imported"):
        library("no_such_library.losses")


def test_domains_are_found_by_the_name_of_their_module():
    assert isinstance(DOMAIN, Domain) and DOMAIN.name == "tiny"
