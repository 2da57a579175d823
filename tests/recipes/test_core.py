"""Command line, training, resumption and results, on a recipe without a library of its own."""

import dataclasses
import statistics

import pytest
import torch

import brevact
from recipes import command_line
from recipes.files import read_rows
from recipes.policies import prepare
from recipes.recipe import RecipeError, Settings, cosine, library
from tests.crosses import some_of
from tests.recipes.running import PNG, POLICY, interrupted_at_forward, refused, values, without_time
from tests.recipes.tiny import RECIPE, Net, TinySettings, TinyTask, main

VARIANTS = ["plain", "checkpoint", POLICY, "LosslessBackward", "4x"]
COMMAND = ["--variants", *VARIANTS, "--seeds", "0", "1"]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    assert main([*COMMAND, "--out-dir", str(folder)]) == 0
    return folder


def test_main_trains_each_variant(whole_run):
    names = {path.name for path in whole_run.iterdir()}
    assert {"tiny-plain.png", "tiny-checkpoint.png", "runs.csv", "epochs.csv", "table.csv", "settings.json"} < names
    assert "checkpoint.pt" not in names and (whole_run / "tiny-plain.png").read_text() == "4 steps"
    for picture in ("comparison.png", "memory-LosslessBackward.png"):
        assert (whole_run / picture).read_bytes().startswith(PNG)
    table = read_rows(whole_run / "table.csv")
    assert [row["variant"] for row in table] == VARIANTS
    plain, checkpoint, packed, lossless, fitted = (float(row["kept_mib"]) for row in table)
    assert checkpoint < plain and lossless < plain and packed < 0.5 * plain and fitted <= plain / 4


def test_trainings_of_a_seed_are_paired(whole_run):
    found = {key: float(value) for key, value in values(whole_run).items()}
    for seed in (0, 1):
        plain, checkpoint, packed, lossless, _ = (found[variant, seed] for variant in VARIANTS)
        assert plain == checkpoint == lossless != packed
    row = read_rows(whole_run / "table.csv")[2]
    differences = [found[POLICY, seed] - found["plain", seed] for seed in (0, 1)]
    rounding = 1e-9  # of values below 1 in files, to nine digits
    assert float(row["difference"]) == pytest.approx(statistics.mean(differences), abs=rounding)
    assert float(row["difference_se"]) == pytest.approx(statistics.stdev(differences) / 2**0.5, abs=rounding)


def test_main_prints_the_table_of_what_was_asked_for(whole_run, capsys):
    rest = ["--seeds", "0", "1", "--out-dir", str(whole_run), "--resume"]
    assert main(["--compare", POLICY, *rest]) == main(["--variants", POLICY, *rest]) == 0
    header, plain, packed, _, _, alone, _ = capsys.readouterr().out.splitlines()
    assert " error - plain " in header and plain.startswith("plain ") and packed.startswith(POLICY)
    assert "x less)" in packed and packed.count(" ± ") == 2 and alone.count(" ± ") == 1


@pytest.mark.parametrize("number", some_of([9, 2, 20, 50], quick=4))
def test_main_resumes_an_interrupted_training_to_the_same_result(whole_run, tmp_path, number):
    command = [*COMMAND, "--out-dir", str(tmp_path)]
    with interrupted_at_forward(Net, number):
        assert main(command) == 130
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())
    assert main([*command, "--resume"]) == 0
    for name in ("runs.csv", "epochs.csv"):
        assert without_time(tmp_path, name) == without_time(whole_run, name)
    assert (tmp_path / "tiny-plain.png").read_text() == "4 steps"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--width", "1"], "--width 1 is not possible: use at least 8"),
        (["--lr", "0"], "--lr 0.0 is not possible: use a value above 0"),
        (["--device", "nowhere"], "--device nowhere cannot be used here"),
        (["--device", "meta"], "--device meta cannot be used here"),
        (["--resume"], "no runs to resume: there is no"),
        (["--lr", "1e30", "--variants", "plain"], "the training loss became"),
        (["--variants", "900x"], "900x: ratio=900.0 is not possible"),
        (["--out-dir", "/dev/null/run"], "cannot write to /dev/null/run"),
    ],
)
def test_main_says_what_to_do_and_exits_with_2(tmp_path, capsys, arguments, message):
    assert main(["--out-dir", str(tmp_path / "runs"), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.splitlines()[-1].startswith("error: ")


def test_main_keeps_runs_with_other_settings_apart(tmp_path, capsys):
    command = ["--variants", "plain", "--seeds", "0", "--out-dir", str(tmp_path)]
    assert main(command) == 0
    before = without_time(tmp_path)
    refused(main, command, "already holds runs; go on with --resume, replace them with --overwrite", capsys)
    refused(main, [*command, "--resume", "--epochs", "3"], "have other settings (--epochs)", capsys)
    assert main([*command, "--overwrite", "--epochs", "3"]) == 0
    assert len(before) == 2 and len(without_time(tmp_path)) == 3


def test_a_mended_command_starts_in_the_folder_of_one_that_failed(tmp_path, capsys):
    command = ["--variants", "plain", "--seeds", "0", "--epochs", "1", "--out-dir", str(tmp_path)]
    assert main([*command, "--lr", "1e30"]) == 2
    capsys.readouterr()
    refused(main, [*command, "--resume"], "no runs to resume", capsys)
    assert main(command) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "checkpoints"], "checkpoints: policy 'checkpoints': checkpoints is not a backward quantizer"),
        (["--compare", "DEFAULT", "--variants", "plain"], "not allowed with argument"),
        (["--resume", "--overwrite"], "not allowed with argument"),
        (["--epoch", "3"], "unrecognized arguments: --epoch 3"),
    ],
)
def test_main_refuses_a_command_line(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_main_says_what_to_install(tmp_path, capsys):
    lacking = dataclasses.replace(RECIPE, libraries=("torch", "no_such_library"))
    message = "no_such_library cannot be imported; install by pip install '.[domains]'\n"
    refused(lambda words: command_line.main(lacking, words), ["--out-dir", str(tmp_path / "runs")], message, capsys)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(RecipeError, match="no_such_library cannot be imported"):
        library("no_such_library.losses")


def test_help_states_every_default(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "features of a row (default: 64)" in " ".join(capsys.readouterr().out.split())


def test_settings_refuse_what_is_out_of_range():
    with pytest.raises(RecipeError, match=r"--epochs 0 is not possible: use at least 1"):
        Settings(epochs=0)


def test_a_variant_may_be_checkpoints_and_a_policy():
    task = TinyTask(TinySettings(), 0, torch.device("cpu"))
    prepare(task, f"checkpoint+{POLICY}")
    assert task.model.checkpointed and "StochBackward4bit" in str(brevact.backward_policy(task.model))
    task.step(next(task.batches(1)))


def test_cosine_rises_then_falls_to_zero():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, rates = cosine(optimizer, 24, 4), []
    for _ in range(25):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0]) and rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[14] == pytest.approx(0.5) and rates[24] == pytest.approx(0.0, abs=1e-12)
