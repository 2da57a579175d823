"""`python -m recipes.qat`: forward quantizers at few bits, with and without backward ones beside them."""

import brevitas.nn as qnn
import pytest
import torch

from recipes.models import EfficientNetV2
from recipes.qat import QatSettings, QatTask, main
from tests.recipes.running import PNG, interrupted_at_forward, refused, values, without_time

#: Command line of the smallest run: two steps an epoch.
TINY = "--train-size 16 --test-size 8 --batch-size 8 --epochs 2 --warmup-epochs 0.5 --calibration-batches 1".split()
COMPARED = ["--compare", "LosslessBackward"]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    folder = tmp_path_factory.mktemp("comparison")
    assert main([*TINY, *COMPARED, "--out-dir", str(folder)]) == 0
    return folder


def test_lossless_runs_are_those_of_stock_brevitas_in_less_memory(comparison):
    rows = without_time(comparison)
    stock, lossless = (
        [(row["loss"], row["value"]) for row in rows if row["variant"] == name]
        for name in ("plain", "LosslessBackward")
    )
    assert stock == lossless
    kept = {key[0]: float(value) for key, value in values(comparison, column="kept_mib").items()}
    assert kept["LosslessBackward"] < kept["plain"] / 1.5
    assert (comparison / "comparison.png").read_bytes().startswith(PNG)


@pytest.mark.exhaustive
def test_main_resumes_an_interrupted_run_to_the_same_result(comparison, tmp_path):
    command = [*TINY, *COMPARED, "--out-dir", str(tmp_path)]
    with interrupted_at_forward(EfficientNetV2, 14):  # in the second run, behind calibration, report and an epoch
        assert main(command) == 130
    assert main([*command, "--resume"]) == 0
    assert without_time(tmp_path) == without_time(comparison)


def test_model_has_the_bit_widths_of_the_settings_and_learns_its_scales():
    settings = QatSettings(weight_bit_width=3, input_bit_width=5, train_size=16, test_size=8, batch_size=8)
    model = QatTask(settings, 0, torch.device("cpu")).model
    kinds = (qnn.QuantConv2d, qnn.QuantLinear)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    ends = {"stem.0", "classifier"}
    assert ends < layers.keys()
    for name, layer in layers.items():
        widths = int(layer.weight_quant.bit_width()), int(layer.input_quant.bit_width())
        assert widths == ((8, 8) if name in ends else (3, 5))
    scales = [module for module in model.modules() if hasattr(module, "collect_stats_steps")]
    assert scales and all(each.counter > each.collect_stats_steps and each.value.item() != 1 for each in scales)


@pytest.mark.parametrize("option", ["--weight-bit-width", "--input-bit-width", "--calibration-batches"])
def test_main_says_what_to_do_and_exits_with_2(tmp_path, capsys, option):
    refused(main, [*TINY, option, "0", "--out-dir", str(tmp_path)], f"{option} 0 is not possible: use ", capsys)
