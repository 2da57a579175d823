"""`python -m recipes.qat`: forward quantizers at few bits, with and without backward ones beside them."""

import brevitas.nn as qnn
import pytest
import torch

from recipes.command_line import default_folder
from recipes.files import read_rows
from recipes.images import make_batches
from recipes.models import EfficientNetV2
from recipes.qat import RECIPE, QatSettings, calibrate, main
from recipes.runs import build_objective
from tests.recipes.running import PNG, interrupted_without_hooks, results_without_time, same_weights

#: Command line of the smallest run: two steps an epoch.
TINY = "--train-size 16 --test-size 8 --batch-size 8 --epochs 2 --warmup-epochs 0.5 --calibration-batches 1".split()


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    folder = tmp_path_factory.mktemp("comparison")
    assert main([*TINY, "--compare", "LosslessBackward", "StochBackward2bit", "--out-dir", str(folder)]) == 0
    return folder


def test_main_compares_with_stock_brevitas(comparison):
    rows = read_rows(comparison / "comparison.csv")
    assert [row["run"] for row in rows] == ["stock Brevitas", "LosslessBackward", "StochBackward2bit"]
    stock, lossless, stochastic = (float(row["saved_mib"]) for row in rows)
    assert lossless < stock / 1.5
    assert stochastic < stock / 8
    assert (comparison / "comparison.png").read_bytes().startswith(PNG)


def test_lossless_runs_end_in_the_weights_of_stock_brevitas(comparison):
    stock, lossless, stochastic = (
        comparison / name for name in ("stock-Brevitas", "LosslessBackward", "StochBackward2bit")
    )
    curves = [
        [(row["train_loss"], row["test_loss"]) for row in results_without_time(folder)]
        for folder in (stock, lossless, stochastic)
    ]
    assert curves[0] == curves[1] != curves[2]
    assert same_weights(stock, lossless)
    assert not same_weights(stock, stochastic)


@pytest.mark.exhaustive
# Calibration takes forward pass 1, the memory report 2 and 3, an epoch two for training and one for testing.
def test_main_resumes_an_interrupted_run_to_the_same_result(comparison, tmp_path):
    with interrupted_without_hooks(EfficientNetV2, 8):
        assert main([*TINY, "--act-quant", "StochBackward2bit", "--out-dir", str(tmp_path)]) == 130
    assert len(results_without_time(tmp_path)) == 1
    assert main(["--resume", str(tmp_path)]) == 0
    assert results_without_time(tmp_path) == results_without_time(comparison / "StochBackward2bit")
    assert same_weights(tmp_path, comparison / "StochBackward2bit")


def test_model_has_the_bit_widths_of_the_settings(tiny_data):
    settings = QatSettings(weight_bit_width=3, input_bit_width=5)
    model = build_objective(RECIPE, settings, tiny_data).model
    kinds = (qnn.QuantConv2d, qnn.QuantLinear)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    ends = {"stem.0", "classifier"}
    assert ends < layers.keys()
    for name, layer in layers.items():
        widths = int(layer.weight_quant.bit_width()), int(layer.input_quant.bit_width())
        assert widths == ((8, 8) if name in ends else (3, 5))


def test_calibrate_ends_the_collection_of_statistics(tiny_data):
    settings = QatSettings(batch_size=8)
    model = build_objective(RECIPE, settings, tiny_data).model
    calibrate(model, settings, make_batches(settings, tiny_data, torch.device("cpu"))[0])
    scales = [module for module in model.modules() if hasattr(module, "collect_stats_steps")]
    assert scales
    for scale in scales:
        assert scale.counter > scale.collect_stats_steps
        assert scale.value.item() != 1.0


@pytest.mark.parametrize("option", ["--weight-bit-width", "--input-bit-width", "--calibration-batches"])
def test_main_says_what_to_do_and_exits_with_2(tmp_path, monkeypatch, capsys, option):
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, option, "0"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {option} 0 is not possible: use ")


def test_default_folder_tells_the_bit_widths():
    assert default_folder(RECIPE, QatSettings(), None).name == "qat-digits-nano-w4a4-stock-Brevitas"
