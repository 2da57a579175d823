import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.command_line import default_folder
from recipes.efficientnetv2 import RECIPE, EfficientNetV2Settings, main
from recipes.files import read_checkpoint, read_rows, write_checkpoint
from recipes.metrics import ACCURACY
from recipes.models import EfficientNetV2
from recipes.runs import columns
from tests.recipes.running import PNG, interrupted_at_forward, results_without_time, same_weights

#: Command line of the smallest run: two steps an epoch.
TINY = "--train-size 16 --test-size 8 --batch-size 8 --epochs 2 --warmup-epochs 0.5".split()
ONE_EPOCH = [*TINY, "--epochs", "1"]


def test_main_writes_history_summary_and_pictures(tmp_path, capsys):
    arguments = [*TINY, "--act-quant", "StochBackward2bit", "--act-override", "bucket_size=256"]
    assert main([*arguments, "--out-dir", str(tmp_path)]) == 0
    names = {"checkpoint.pt", "history.csv", "summary.json", "history.png", "memory.csv", "memory.png"}
    assert {path.name for path in tmp_path.iterdir()} == names
    rows = read_rows(tmp_path / "history.csv")
    assert [row["epoch"] for row in rows] == ["1", "2"] and tuple(rows[0]) == columns(ACCURACY)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["finished"] is True and summary["epochs"] == 2
    assert summary["test_accuracy"] == pytest.approx(float(rows[-1]["test_accuracy"]))
    assert summary["best_test_accuracy"] == pytest.approx(max(float(row["test_accuracy"]) for row in rows))
    assert summary["settings"]["act_override"] == ["bucket_size=256"]
    assert set(summary["versions"]) == {"python", "torch", "brevitas"}
    stored = [
        sum(int(row[key]) for row in read_rows(tmp_path / "memory.csv")) for key in ("saved_bytes", "plain_bytes")
    ]
    assert stored == [summary["saved_bytes"], summary["plain_bytes"]]
    assert summary["saved_bytes"] < summary["plain_bytes"] / 4
    assert float(rows[0]["saved_mib"]) == pytest.approx(summary["saved_bytes"] / 2**20)
    assert all((tmp_path / name).read_bytes().startswith(PNG) for name in ("history.png", "memory.png"))
    assert f"test accuracy {summary['test_accuracy']:.2%}" in capsys.readouterr().out


def check_fitted(summary, folder):
    report = summary["policy"]["report"]
    assert summary["policy"] == json.loads((folder / "policy.json").read_text())
    assert (report["saved_bytes"], report["plain_bytes"]) == (summary["saved_bytes"], summary["plain_bytes"])
    assert report["note"] == "" and len({rule["quantizer"] for rule in summary["policy"]["rules"]}) > 2
    return report


@pytest.mark.exhaustive
def test_main_fits_a_policy_to_a_budget_and_goes_on_with_it(tmp_path, capsys):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*ONE_EPOCH, "--budget", "20x", "--out-dir", str(whole)]) == 0
    summary = json.loads((whole / "summary.json").read_text())
    report = check_fitted(summary, whole)
    assert 0.9 * report["plain_bytes"] / 20 <= report["saved_bytes"] <= report["plain_bytes"] / 20
    parts.mkdir()
    write_checkpoint(parts / "checkpoint.pt", read_checkpoint(whole / "checkpoint.pt"))
    capsys.readouterr()
    assert main(["--resume", str(parts)]) == 2
    assert "fit 20x: " in capsys.readouterr().err  # there is no policy.json
    shutil.copy(whole / "policy.json", parts)
    assert main(["--resume", str(parts)]) == 0
    assert json.loads((parts / "summary.json").read_text())["policy"] == summary["policy"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("words", [("--budget", "0.5MiB", "--adapt-every", "2"), ("--noise", "0.1")])
def test_main_fits_a_policy_to_bytes_and_to_noise(words, tmp_path):
    assert main([*ONE_EPOCH, *words, "--out-dir", str(tmp_path)]) == 0
    report = check_fitted(json.loads((tmp_path / "summary.json").read_text()), tmp_path)
    if words[0] == "--noise":
        assert report["noise"] + max(0, report["bias"]) <= 0.1
    else:
        assert 0.9 * 2**19 <= report["saved_bytes"] <= 2**19


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "20"], "--budget 20 is not possible: 20: a budget is written 24x"),
        (["--budget", "0x"], "--budget 0x is not possible"),
        (["--budget", "900x"], "fit 900x: ratio=900.0 is not possible"),
        (["--noise", "-1"], "--noise -1.0 is not possible"),
        (["--budget", "20x", "--noise", "0.1"], "--budget and --noise each say what is stored"),
        (["--budget", "20x", "--act-quant", "DEFAULT"], "--act-quant and --budget each say what is stored"),
        (["--budget", "20x", "--act-override", "bucket_size=256"], "add --act-quant NAME"),
    ],
)
def test_main_refuses_a_budget(words, message, tmp_path, capsys):
    assert main([*ONE_EPOCH, *words, "--out-dir", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.exhaustive
def test_main_adapts_widths_and_goes_on_with_them(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    arguments = [*ONE_EPOCH, "--act-quant", "DEFAULT", "--adapt-every", "2", "--out-dir", str(whole)]
    assert main(arguments) == 0
    summary = json.loads((whole / "summary.json").read_text())
    assert len(set(summary["bit_widths"].values())) > 1
    assert summary["saved_bytes"] < summary["plain_bytes"] / 10
    state = read_checkpoint(whole / "checkpoint.pt")
    adaptive = state["trainer"]["adaptive"]
    assert adaptive["steps"] == 2
    adaptive["bit_widths"] = [4] * len(adaptive["bit_widths"])
    parts.mkdir()
    write_checkpoint(parts / "checkpoint.pt", state)
    assert main(["--resume", str(parts)]) == 0
    assert set(json.loads((parts / "summary.json").read_text())["bit_widths"].values()) == {4}


def test_main_refuses_to_adapt_what_has_no_width(tmp_path, capsys):
    for words, message in (
        ([], "add --act-quant NAME"),
        (["--act-quant", "NearestBackward4bit"], "no layer has a width that may change"),
    ):
        assert main([*ONE_EPOCH, *words, "--adapt-every", "5", "--out-dir", str(tmp_path)]) == 2
        assert message in capsys.readouterr().err


def test_main_compares_with_full_precision(tmp_path, capsys):
    arguments = [*ONE_EPOCH, "--compare", "StochBackward2bit", "NearestBackward4bit", "--out-dir", str(tmp_path)]
    assert main(arguments) == 0
    rows = {row["run"]: row for row in read_rows(tmp_path / "comparison.csv")}
    assert list(rows) == ["full precision", "StochBackward2bit", "NearestBackward4bit"]
    ratios = [float(row["times_less"]) for row in rows.values()]
    assert ratios[0] == 1.0 < ratios[1] < ratios[2]  # 4 bits once are less than 2 bits for each of three
    plain = float(rows["full precision"]["saved_mib"])
    assert ratios[1] == pytest.approx(plain / float(rows["StochBackward2bit"]["saved_mib"]))
    assert (tmp_path / "comparison.png").read_bytes().startswith(PNG)
    for name in ("full-precision", "StochBackward2bit", "NearestBackward4bit"):
        assert len(read_rows(tmp_path / name / "history.csv")) == 1
    table = capsys.readouterr().out
    assert f"{plain:.2f} MiB " in table and f"({ratios[1]:.1f}x less)" in table


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """A run that tests read, or copy."""
    folder = tmp_path_factory.mktemp("finished")
    assert main([*ONE_EPOCH, "--out-dir", str(folder)]) == 0
    return folder


RESUMABLE = ["--act-quant", "StochBackward2bit", "--epochs", "3", "--stochastic-depth", "0.2"]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert main([*TINY, *RESUMABLE, "--out-dir", str(folder)]) == 0
    return folder


# The memory report takes forward passes 1 and 2, an epoch two for training and one for testing.
@pytest.mark.parametrize(
    "forward",
    [pytest.param(7, id="training"), pytest.param(8, id="testing", marks=pytest.mark.exhaustive)],
)
def test_main_resumes_an_interrupted_run_to_the_same_result(whole_run, tmp_path, capsys, forward):
    with interrupted_at_forward(EfficientNetV2, forward):
        assert main([*TINY, *RESUMABLE, "--out-dir", str(tmp_path)]) == 130
    assert "--resume DIR goes on" in capsys.readouterr().err
    finished = results_without_time(tmp_path)
    assert len(finished) == 1
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())
    (tmp_path / "history.csv").unlink()  # as if the interruption had come before it was written
    assert main(["--resume", str(tmp_path)]) == 0
    resumed = results_without_time(tmp_path)
    assert resumed == results_without_time(whole_run)
    assert resumed[:1] == finished
    assert same_weights(whole_run, tmp_path)


def test_main_says_when_an_interrupted_run_has_no_epoch_to_resume(tmp_path, capsys):
    with interrupted_at_forward(EfficientNetV2, 4):
        assert main([*TINY, "--out-dir", str(tmp_path)]) == 130
    assert main(["--resume", str(tmp_path)]) == 2
    assert "no run to resume" in capsys.readouterr().err


# Each of the two runs takes five forward passes.
@pytest.mark.exhaustive
def test_main_resumes_a_comparison_in_the_run_that_was_interrupted(tmp_path):
    compare = ["--compare", "StochBackward2bit"]
    with interrupted_at_forward(EfficientNetV2, 8):
        assert main([*ONE_EPOCH, *compare, "--out-dir", str(tmp_path)]) == 130
    finished = (tmp_path / "full-precision/checkpoint.pt").read_bytes()
    assert not (tmp_path / "StochBackward2bit/checkpoint.pt").exists()
    assert main(["--resume", str(tmp_path)]) == 0
    assert (tmp_path / "full-precision/checkpoint.pt").read_bytes() == finished
    assert [row["run"] for row in read_rows(tmp_path / "comparison.csv")] == ["full precision", "StochBackward2bit"]


OVERRIDDEN = ["--compare", "StochBackward2bit", "--act-override", "bit_width=4"]


@pytest.fixture(scope="module")
def stopped_comparison(tmp_path_factory):
    """A comparison of a changed quantizer, interrupted after the first epoch of its second case."""
    folder = tmp_path_factory.mktemp("stopped")
    with interrupted_at_forward(EfficientNetV2, 15):  # 2 + 2 * 3 for the first case, 2 + 3 for an epoch of the second
        assert main([*TINY, *OVERRIDDEN, "--out-dir", str(folder)]) == 130
    assert len(read_rows(folder / "StochBackward2bit/history.csv")) == 1
    return folder


@pytest.mark.exhaustive
def test_main_resumes_a_comparison_with_the_quantizer_it_was_started_with(stopped_comparison, tmp_path):
    folder = shutil.copytree(stopped_comparison, tmp_path / "copy")
    assert main(["--compare", "StochBackward2bit", "--resume", str(folder)]) == 0
    summary = json.loads((folder / "StochBackward2bit/summary.json").read_text())
    assert summary["finished"] is True and summary["settings"]["act_override"] == ["bit_width=4"]
    rows = read_rows(folder / "comparison.csv")
    assert [row["run"] for row in rows] == ["full precision", "StochBackward2bit bit_width=4"]
    assert 8 < float(rows[1]["times_less"]) < 24  # 4 bits of 32 and the buckets' scales, for up to three tensors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--act-override", "bit_width=3"], "was started with --act-override"),
        (
            ["--compare", "NearestBackward2bit"],
            "was started with --compare StochBackward2bit (now NearestBackward2bit)",
        ),
    ],
)
def test_main_refuses_to_resume_a_comparison_as_another(stopped_comparison, capsys, words, message):
    assert main([*words, "--resume", str(stopped_comparison)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{}", '{"quantizers": 3}'])
def test_main_refuses_a_damaged_plan_of_a_comparison(tmp_path, capsys, content):
    (tmp_path / "comparison.json").write_text(content)
    assert main(["--resume", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "comparison.json" in error and error.count("\n") == 1


def test_default_folder_tells_the_changed_quantizer():
    changed = EfficientNetV2Settings(act_quant="StochBackward2bit", act_override=("bit_width=4", "name=../x"))
    assert default_folder(RECIPE, changed, None) == Path("runs/digits-nano-StochBackward2bit-bit_width=4-name=.._x")
    cases = replace(changed, act_quant=None, save_mode="quantize_on_backward", act_override=("bit_width=4",))
    expected = Path("runs/digits-nano-comparison-bit_width=4-quantize_on_backward")
    assert default_folder(RECIPE, cases, ("StochBackward2bit",)) == expected
    assert default_folder(RECIPE, EfficientNetV2Settings(), None) == Path("runs/digits-nano-full-precision")


def test_main_resumes_a_finished_run_without_training(finished_run, tmp_path):
    folder = shutil.copytree(finished_run, tmp_path / "copy")
    before = (folder / "checkpoint.pt").read_bytes()
    assert main(["--resume", str(folder)]) == 0
    assert (folder / "checkpoint.pt").read_bytes() == before


def test_main_keeps_a_run_unless_told_to_overwrite(finished_run, tmp_path, capsys):
    folder = shutil.copytree(finished_run, tmp_path / "copy")
    arguments = [*ONE_EPOCH, "--out-dir", str(folder)]
    before = (folder / "checkpoint.pt").read_bytes()
    assert main([*arguments, "--seed", "1"]) == 2
    assert "already holds a run; continue it with --resume, or replace it" in capsys.readouterr().err
    assert main([*arguments, "--overwrite", "--act-quant", "StochBackward2bt"]) == 2
    assert (folder / "checkpoint.pt").read_bytes() == before
    assert main([*arguments, "--overwrite", "--seed", "1"]) == 0
    assert (folder / "checkpoint.pt").read_bytes() != before
    assert not same_weights(folder, finished_run)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--act-quant", "StochBackward2bt"], "nearest: StochBackward2bit"),
        (["--compare", "StochBackward2bit", "Stoch"], "--act-quant Stoch is not a backward quantizer"),
        (["--act-quant", "StochBackward2bit", "--act-override", "buket_size=9"], "did you mean bucket_size?"),
        (["--weight-quant", "Int8"], "--weight-quant Int8 is not"),
        (["--dataset", "cifar10", "--data-dir", "nowhere"], "CIFAR-10 was not found in nowhere"),
        (["--dataset", "tiny-imagenet", "--data-dir", "nowhere"], "expected nowhere/tiny-imagenet-200"),
        (["--train-size", "5000"], "--train-size 5000 is not possible"),
        (["--device", "cuda:99"], "--device cuda:99 cannot be used here"),
        (["--warmup-epochs", "99"], "--warmup-epochs 99 leaves nothing"),
        (["--resume", "nowhere"], "there is no nowhere/checkpoint.pt"),
        (["--resume", "nowhere", "--compare", "StochBackward2bit"], "nowhere holds no comparison"),
        (["--device", "meta"], "--device meta cannot be used here"),
        (["--out-dir", "/dev/null/run", "--dataset", "cifar10"], "cannot write to /dev/null/run"),
        (["--weight-quant", "FpOCPWeight"], "--weight-quant FpOCPWeight does not work in the layers of this model"),
    ],
)
def test_main_says_what_to_do_and_exits_with_2(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_main_refuses_to_resume_with_other_settings(finished_run, capsys):
    assert main(["--resume", str(finished_run), "--lr", "0.5"]) == 2
    assert "was started with --lr 0.003 (now 0.5); leave the option out" in capsys.readouterr().err


def test_main_leaves_nothing_of_the_old_run_when_its_replacement_is_interrupted(finished_run, tmp_path, capsys):
    folder = shutil.copytree(finished_run, tmp_path / "copy")
    with interrupted_at_forward(EfficientNetV2, 4):
        assert main([*ONE_EPOCH, "--out-dir", str(folder), "--overwrite"]) == 130
    assert {path.name for path in folder.iterdir()} == {"memory.csv", "memory.png"}


def lacking(*keys):
    """A change of a checkpoint: the entry at the end of the keys goes missing."""

    def change(content):
        inner = content
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.clear(),
        lambda content: content["settings"].update(colour="red"),
        lambda content: content.update(history=[{"epoch": 1}]),
        lacking("settings"),
        lacking("trainer", "optimizer"),
        lacking("trainer", "model", "classifier.weight"),
    ],
)
def test_main_refuses_a_checkpoint_that_lacks_something(whole_run, tmp_path, capsys, change):
    content = read_checkpoint(whole_run / "checkpoint.pt")
    change(content)
    write_checkpoint(tmp_path / "checkpoint.pt", content)
    assert main(["--resume", str(tmp_path)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and "checkpoint.pt" in error and "start a new run" in error


@pytest.mark.exhaustive
def test_main_compares_backward_quantizers_beside_forward_ones(tmp_path):
    forward = ["--weight-quant", "Int8WeightPerTensorFloat", "--input-quant", "Int8ActPerTensorFloat"]
    compare = ["--compare", "StochBackward2bit", "StochBackward4bit"]
    assert main([*ONE_EPOCH, *forward, *compare, "--out-dir", str(tmp_path)]) == 0
    rows = read_rows(tmp_path / "comparison.csv")
    stored = {row["run"]: float(row["saved_mib"]) for row in rows}
    assert stored["full precision"] > stored["StochBackward4bit"] > stored["StochBackward2bit"]
