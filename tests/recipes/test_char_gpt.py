"""`python -m recipes.char_gpt`: text, bits per character, the loss's saved tensors, and samples."""

import io
import json
import math
import shutil
from contextlib import redirect_stdout
from dataclasses import replace

import pytest
import torch

from recipes.char_gpt import RECIPE, CharGptSettings, load_data, main, make_batches
from recipes.files import read_rows
from recipes.metrics import BITS_PER_CHARACTER
from recipes.models import GPT
from recipes.runs import build_objective, columns
from recipes.training import Trainer
from tests.recipes.running import PNG, interrupted_at_forward, results_without_time, same_weights

CPU = torch.device("cpu")
#: Command line of the smallest run: two steps an epoch.
TINY = "--train-size 160 --test-size 70 --context 16 --batch-size 4 --epochs 2 --warmup-epochs 0.5 --generate 9".split()


OPTIONS = ["--act-quant", "StochBackward2bit", "--dropout", "0.1"]


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder, output = tmp_path_factory.mktemp("whole"), io.StringIO()
    with redirect_stdout(output):
        assert main([*TINY, *OPTIONS, "--out-dir", str(folder)]) == 0
    return folder, output.getvalue()


def test_main_writes_losses_in_bits_and_a_sample(whole_run):
    folder, output = whole_run
    names = {"checkpoint.pt", "history.csv", "summary.json", "history.png", "memory.csv", "memory.png", "sample.txt"}
    assert {path.name for path in folder.iterdir()} == names
    rows = read_rows(folder / "history.csv")
    assert len(rows) == 2 and tuple(rows[0]) == columns(BITS_PER_CHARACTER)
    for row in rows:
        for split in ("train", "test"):
            nats, bits = (float(row[f"{split}_{name}"]) for name in ("loss", "bits_per_character"))
            assert bits == pytest.approx(nats / math.log(2))
    summary = json.loads((folder / "summary.json").read_text())
    best = min(float(row["test_bits_per_character"]) for row in rows)
    assert summary["best_test_bits_per_character"] == pytest.approx(best)
    sample = (folder / "sample.txt").read_text(encoding="utf-8")
    assert len(sample) == 9 + 1
    assert f"StochBackward2bit writes:\n{sample}---" in output
    assert f"test bits per character {summary['test_bits_per_character']:.3f}" in output
    assert (folder / "history.png").read_bytes().startswith(PNG)


def test_main_counts_what_the_loss_stores(whole_run):
    folder, _ = whole_run
    rows = read_rows(folder / "memory.csv")
    stored = {row["layer"]: int(row["plain_bytes"]) for row in rows}
    data = load_data(CharGptSettings(train_size=160, test_size=70))
    assert stored["loss"] >= 4 * 16 * len(data.characters) * 4  # float32 log-probabilities
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["plain_bytes"] == sum(stored.values()) > summary["saved_bytes"]


@pytest.mark.exhaustive
def test_main_compares_with_full_precision(tmp_path, capsys):
    arguments = [*TINY, "--norm", "rms", "--mlp", "swiglu", "--head", "separate"]
    compare = ["--epochs", "1", "--compare", "StochBackward2bit"]
    assert main([*arguments, *compare, "--out-dir", str(tmp_path)]) == 0
    rows = read_rows(tmp_path / "comparison.csv")
    assert [row["run"] for row in rows] == ["full precision", "StochBackward2bit"]
    assert all(
        float(row["test_bits_per_character"]) == pytest.approx(float(row["test_loss"]) / math.log(2)) for row in rows
    )
    stored = [float(row["saved_mib"]) for row in rows]
    assert stored[0] > 2 * stored[1]
    assert "test loss  test bits per character" in capsys.readouterr().out


# The memory report takes forward passes 1 and 2, an epoch two for training and one for testing.
@pytest.mark.exhaustive
def test_main_resumes_an_interrupted_run_to_the_same_result(whole_run, tmp_path):
    folder, _ = whole_run
    with interrupted_at_forward(GPT, 7):
        assert main([*TINY, *OPTIONS, "--out-dir", str(tmp_path)]) == 130
    assert len(results_without_time(tmp_path)) == 1 and not (tmp_path / "sample.txt").exists()
    assert main(["--resume", str(tmp_path)]) == 0
    assert results_without_time(tmp_path) == results_without_time(folder)
    assert same_weights(folder, tmp_path)
    assert (tmp_path / "sample.txt").read_bytes() == (folder / "sample.txt").read_bytes()


def test_main_lets_a_finished_run_write_more(whole_run, tmp_path, capsys):
    folder = shutil.copytree(whole_run[0], tmp_path / "copy")
    before = (folder / "sample.txt").read_text(encoding="utf-8")
    assert main(["--resume", str(folder), "--generate", "30"]) == 0
    after = (folder / "sample.txt").read_text(encoding="utf-8")
    assert len(after) == 31 and after.startswith(before[:-1])
    assert main(["--resume", str(folder), "--context", "8"]) == 2
    assert "was started with --context 16 (now 8)" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_main_takes_forward_quantizers_and_a_text_of_its_own(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"line {number}" for number in range(100)))
    forward = ["--weight-quant", "Int8WeightPerTensorFloat", "--input-quant", "Int8ActPerTensorFloat"]
    arguments = ["--text-file", str(text), *TINY, *forward, "--epochs", "1", "--act-quant", "StochBackward2bit"]
    assert main([*arguments, "--out-dir", str(tmp_path / "run")]) == 0
    assert set((tmp_path / "run/sample.txt").read_text()) <= set(text.read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text-file", "nowhere.txt"], "--text-file nowhere.txt cannot be read"),
        (["--context", "200"], "--context 200 needs at least 400 characters of training text, there are 160"),
        (["--context", "0"], "--context 0 is not possible"),
        (["--train-size", "99999999"], "--train-size 99999999 is not possible"),
        (["--generate", "-1"], "--generate -1 is not possible"),
        (["--temperature", "0"], "--temperature 0.0 is not possible"),
        (["--act-quant", "StochBackward2bt"], "nearest: StochBackward2bit"),
    ],
)
def test_main_says_what_to_do_and_exits_with_2(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("act_quant", [None, "StochBackward2bit"])
def test_gpt_learns_a_sentence(tmp_path, act_quant):
    path = tmp_path / "text.txt"
    path.write_text("the cat sat on the mat. " * 10 + "\n\n" + "the cat sat on the mat.")
    settings = CharGptSettings(act_quant=act_quant, text_file=str(path), context=8, batch_size=8, epochs=20)
    settings = replace(settings, schedule="constant", warmup_epochs=0.0)
    torch.manual_seed(0)
    data = load_data(settings)
    train_batches, test_batches = make_batches(settings, data, CPU)
    trainer = Trainer(build_objective(RECIPE, settings, data), settings, CPU, len(train_batches))
    losses = [trainer.train_epoch(train_batches, epoch, lambda: None).loss for epoch in range(1, 21)]
    assert sum(losses[-5:]) / 5 < 0.5 * losses[0]
    assert trainer.evaluate(test_batches).accuracy > 0.5
