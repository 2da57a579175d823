"""`python -m benchmarks`: one row per model and policy, with its measurements."""

from __future__ import annotations

import csv
import functools
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import measure, quantizers
from benchmarks.__main__ import FIGURES, PLAN, main
from benchmarks.measure import measure_model, with_policy
from benchmarks.models import GROUPS, MODELS, models_of
from benchmarks.records import append_rows
from benchmarks.step import Model, Step, classified, loss_of


def perceptron() -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    model.add_module("blocks", nn.Sequential(nn.Linear(10, 128), nn.GELU(), nn.Linear(128, 10)))
    return Step(model, (torch.randn(256, 64), torch.randint(10, (256,))), classified)


def test_bytes_fall_and_the_loss_stays():
    kept = {}
    for policy in ("plain", "checkpoint", "DEFAULT", "fit:6x"):
        step = with_policy(perceptron(), policy)
        kept[policy] = measure.kept_bytes(step, policy)
        assert torch.equal(step.loss(step.model, step.batch), loss_of(perceptron()))
    assert kept["plain"] > kept["checkpoint"] > kept["DEFAULT"] and kept["plain"] >= 6 * kept["fit:6x"]


def test_measures_of_a_model():
    rows, errors = measure_model("conv-BN-ReLU W4A4", ["LosslessBackward", "StochBackward9bit"], ["bytes"], 2, 2)
    assert float(rows["LosslessBackward"]["kept_less"]) == pytest.approx(2.0, abs=0.1)
    assert list(rows) == ["LosslessBackward"] and "StochBackward9bit" in errors[0]


def test_peaks():
    for peak in (measure.peak(with_policy(perceptron(), policy)) for policy in ("plain", "DEFAULT")):
        assert float(peak["peak_mib"]) > 0 and float(peak["growth_mib"] or 0) >= 0


def test_time_and_noise():
    plain, step = with_policy(perceptron(), "plain"), with_policy(perceptron(), "StochBackward2bit")
    times = measure.time_ratios(plain, step, 3)
    assert float(times["step_low"]) <= float(times["step"]) <= float(times["step_high"])
    data = plain.batches(4)
    exact = measure.exact_gradients(plain.model, data, plain.loss)
    noise, none = (measure.noise(each, data, exact, 2) for each in (step, plain))
    assert float(noise["noise"]) > 0 and float(noise["error"]) > 0
    assert float(none["noise"]) == float(none["error"]) == 0


def test_measures_of_compiled_steps(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setitem(MODELS, "perceptron", Model((), perceptron))
    policies = ["compile:1", "compile+StochBackward2bit", "compile:0.2+StochBackward2bit"]
    rows, errors = measure_model("perceptron", policies, ["bytes", "compile", "noise"], 2, 2)
    assert all(float(row["compile"]) > 0 for row in rows.values())
    plain, packed, again = (float(rows[policy]["kept_mib"]) for policy in policies)
    assert not errors and plain > packed > again
    noise = [float(rows[policy]["noise"]) for policy in policies[1:]]
    assert noise[0] > 0 == noise[1]  # computed again from the batch


@pytest.mark.exhaustive
def test_main_appends_rows_of_fresh_processes(tmp_path: Path):
    path = tmp_path / "rows.csv"
    assert main(["EfficientNetV2 nano", "--measure", "bytes,peak", "--jobs", "1", "--csv", str(path)]) == 0
    with path.open(newline="") as file:
        plain, packed = csv.DictReader(file)
    assert list(plain)[2:-7] == list(FIGURES) and plain["commit"] == packed["commit"]
    assert [plain["policy"], packed["policy"]] == ["plain", "DEFAULT"]
    assert 0 < float(packed["kept_mib"]) < float(plain["kept_mib"]) / 12
    assert 0 < float(packed["peak_mib"]) < float(plain["peak_mib"])  # gradients are part of it


@pytest.mark.parametrize(
    "options, message",
    [
        (["BART"], "'BART' is not a model or a group; near are BERT"),
        (["qat", "--measure", "speed"], "got speed; accepted are bytes, peak, time, compile, noise"),
        (["qat", "--rounds", "1"], "--rounds 1: use at least 2"),
    ],
)
def test_main_refuses_options(options, message, capsys):
    with pytest.raises(SystemExit):
        main(options)
    assert message in capsys.readouterr().err


def test_plan_and_groups():
    planned = {name for names, *_ in PLAN for name in models_of(names)}
    assert planned == MODELS.keys()
    cases = [(name, policy) for names, policies, _ in PLAN for name in models_of(names) for policy in policies]
    assert len(cases) == len(set(cases))  # a row of one case would end the other
    assert all(MODELS[name] is model for group in GROUPS.values() for name, model in group.items())


def test_rows_of_other_columns_are_refused(tmp_path: Path):
    (tmp_path / "rows.csv").write_text("name,ms\na,1\n")
    with pytest.raises(ValueError, match="has the columns name, ms; these rows have model"):
        append_rows([{"model": "a"}], tmp_path / "rows.csv")


def test_quantizers(tmp_path: Path):
    quantizers.main(["--numel", "4096", "--repeats", "2", "--bit-widths", "2", "--csv", str(tmp_path / "rows.csv")])
    with (tmp_path / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["dtype"] for row in rows} == {"float32", "bfloat16"} and all(float(row["ns"]) > 0 for row in rows)


@pytest.mark.gpu
def test_gpu_bench():
    from benchmarks import gpu

    assert gpu.main(["--models", "3-D U-Net, GPU", "--policies", "plain", "DEFAULT", "--rounds", "2"]) == 0
