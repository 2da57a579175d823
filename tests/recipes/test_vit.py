"""`python -m recipes.vit`: its differences from the other recipes that classify images."""

from dataclasses import replace

import pytest
import torch

from recipes.command_line import default_folder
from recipes.files import read_rows
from recipes.images import make_batches
from recipes.models import ViT
from recipes.runs import build_objective
from recipes.training import Trainer
from recipes.vit import RECIPE, VitSettings, main
from tests.recipes.running import PNG, interrupted_at_forward, results_without_time, same_weights

#: Command line of the smallest run: two steps an epoch.
TINY = "--train-size 16 --test-size 8 --batch-size 8 --epochs 2 --warmup-epochs 0.5 --patch-size 8".split()


@pytest.mark.exhaustive
def test_main_compares_with_full_precision(tmp_path, capsys):
    arguments = [*TINY, "--epochs", "1", "--compare", "StochBackward2bit"]
    assert main([*arguments, "--out-dir", str(tmp_path)]) == 0
    rows = read_rows(tmp_path / "comparison.csv")
    assert [row["run"] for row in rows] == ["full precision", "StochBackward2bit"]
    stored = [float(row["saved_mib"]) for row in rows]
    assert stored[0] > 2 * stored[1]
    assert (tmp_path / "comparison.png").read_bytes().startswith(PNG)
    table = capsys.readouterr().out
    assert "test accuracy" in table and f"({stored[0] / stored[1]:.1f}x less)" in table


# The memory report takes forward passes 1 and 2, an epoch two for training and one for testing.
@pytest.mark.exhaustive
def test_main_resumes_an_interrupted_run_to_the_same_result(tmp_path):
    options = ["--act-quant", "StochBackward2bit", "--stochastic-depth", "0.2", "--dropout", "0.1"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main([*TINY, *options, "--out-dir", str(whole)]) == 0
    with interrupted_at_forward(ViT, 7):
        assert main([*TINY, *options, "--out-dir", str(stopped)]) == 130
    assert len(results_without_time(stopped)) == 1
    assert main(["--resume", str(stopped)]) == 0
    assert results_without_time(stopped) == results_without_time(whole)
    assert same_weights(whole, stopped)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--patch-size", "5"], "--patch-size 5 is not possible: images of digits have 32 pixels a side"),
        (["--patch-size", "0"], "--patch-size 0 is not possible: use at least 1"),
        (["--act-quant", "StochBackward2bt"], "nearest: StochBackward2bit"),
        (["--dataset", "cifar10", "--data-dir", "nowhere"], "CIFAR-10 was not found in nowhere"),
    ],
)
def test_main_says_what_to_do_and_exits_with_2(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_default_folder_tells_the_recipe():
    folder = default_folder(RECIPE, VitSettings(act_quant="StochBackward2bit"), None)
    assert folder.name == "vit-digits-nano-StochBackward2bit"


@pytest.mark.parametrize("act_quant", [None, "StochBackward2bit"])
def test_vit_learns_bright_from_dark(tiny_data, act_quant):
    settings = VitSettings(act_quant=act_quant, patch_size=8, batch_size=8, epochs=6, schedule="constant")
    settings = replace(settings, label_smoothing=0.0, warmup_epochs=0.0)
    torch.manual_seed(0)
    train_batches, _ = make_batches(settings, tiny_data, torch.device("cpu"))
    trainer = Trainer(build_objective(RECIPE, settings, tiny_data), settings, torch.device("cpu"), len(train_batches))
    losses = [trainer.train_epoch(train_batches, epoch, lambda: None).loss for epoch in range(1, 7)]
    assert losses[-1] < 0.5 * losses[0]
