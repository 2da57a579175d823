"""`gradient_report`: a row per layer, their sum, and an unchanged model."""

from __future__ import annotations

import copy
import csv
import math

import brevitas.nn as qnn
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from brevact.reports.gradients import Isolation


class Net(nn.Module):
    def __init__(self, act: type[nn.Module] = nn.SiLU) -> None:
        super().__init__()
        self.first, self.norm, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), act()
        self.drop, self.second = nn.Dropout(0.2), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8 * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.act(self.norm(self.first(x))))
        return self.head(self.second(x).flatten(1))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches_of(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shape, size = (32, 3, 8, 8), (32,)
    return [
        (torch.randn(shape, generator=generator), torch.randint(10, size, generator=generator)) for _ in range(count)
    ]


BATCHES = batches_of(4)
TWO_BITS = brevact.StochBackward2bit


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


def report_of(model: nn.Module, policy=None, **options) -> brevact.GradientReport:
    return brevact.gradient_report(model, BATCHES, loss, policy, **options)


@pytest.mark.parametrize("act", [nn.ReLU, nn.SiLU])
def test_gradient_report_rows_add_up_to_the_whole(act):
    torch.manual_seed(0)
    report = report_of(Net(act), layer_draws=4)
    assert [(row.layer, row.readers) for row in report.rows] == [
        ("first", ()),
        ("norm", ("act", "second") if act is nn.SiLU else ("second",)),
        ("head", ()),
    ]
    total = sum(row.noise for row in report.rows)
    error = math.hypot(report.noise_error, *(row.noise_error for row in report.rows))
    assert abs(total - report.noise) <= 5 * error and report.noise > 10 * report.noise_error / 5
    assert report.saved_bytes > sum(row.saved_bytes for row in report.rows)


@pytest.mark.parametrize(
    "quantizer", [brevact.WeibullBackward3bit, brevact.L4Backward, brevact.StochBackward2bitPerSample]
)
def test_gradient_report_isolates_layers_under_every_format(quantizer):
    torch.manual_seed(0)
    report = report_of(Net(nn.ReLU), quantizer, draws=4, layer_draws=4)
    whole = report.noise + report.bias
    assert sum(row.noise + row.bias for row in report.rows) == pytest.approx(whole, rel=0.05) and whole > 0


def test_gradient_report_gives_noise_to_the_layer_that_has_few_bits(net):
    report = report_of(net, {"head": brevact.StochBackward1bit, "*": brevact.StochBackward6bit}, draws=2)
    noises = {row.layer: row.noise for row in report.rows}
    assert noises["head"] > 50 * max(noises["first"], noises["norm"])
    assert {row.layer: row.bit_widths for row in report.rows} == {"first": (6,), "norm": (6,), "head": (1,)}


def test_gradient_report_of_nearest_rounding_has_bias_in_its_rows(net):
    report = report_of(net, brevact.NearestBackward2bit, draws=2)
    assert report.noise == 0 and all(row.noise == 0 for row in report.rows)
    assert all(row.bias > 0 for row in report.rows)
    assert max(row.bias for row in report.rows) < report.bias < 2 * sum(row.bias for row in report.rows)


def test_gradient_report_measures_layers_with_quantizers_of_their_own():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), qnn.QuantReLU(act_quant=TWO_BITS), qnn.QuantConv2d(8, 8, 3, input_quant=TWO_BITS)
    report = report_of(nn.Sequential(*layers, nn.Flatten()), draws=2)
    assert [row.layer for row in report.rows] == ["2"]
    assert report.rows[0].noise == pytest.approx(report.noise, abs=5 * report.noise_error) and report.noise > 0


def test_gradient_report_measures_a_region_in_a_models_code_in_the_total_only(net):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            with brevact.backward_quant(TWO_BITS):
                return self.net(x)

    report = report_of(Model(), draws=2)
    assert report.noise > 0 and report.notes and "sets a region" in report.notes[0]
    assert {row.layer for row in report.rows} == {"net.first", "net.norm", "net.act", "net.second", "net.head"}
    assert all(math.isnan(row.noise) and row.saved_bytes for row in report.rows)


def test_gradient_report_of_full_precision_is_zero(net):
    for rules in ({"*": None}, brevact.LosslessBackward):
        report = report_of(net, rules, draws=2)
        assert (report.noise, report.bias, report.rows) == (0.0, 0.0, ())


@pytest.mark.parametrize(
    "policy", [TWO_BITS, brevact.DEFAULT, brevact.TRANSFORMER, brevact.L4Backward, brevact.StochBackward2bit4bitMix]
)
def test_isolation_stores_the_same_tensors_at_8_bits(policy):
    """Also at 2 bits, from which smooth functions do not derive, and where readers have fewer bits than sources."""
    layer = nn.TransformerEncoderLayer(32, 2, 64, activation=F.gelu, batch_first=True)
    model = nn.Sequential(nn.Linear(32, 32), layer, nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 32))
    brevact.quantize_backward(model, policy)

    def stored() -> list:
        ops = brevact.memory_report(model, torch.randn(8, 32, 32)).ops
        return [(op.layer, op.op, op.how, op.source, bool(op.saved_bytes)) for op in ops]

    expected = stored()
    Isolation(model).restrict_to(())
    assert stored() == expected
    assert any(how == "packed" for _, _, how, _, _ in expected)


def test_gradient_report_takes_a_policy_in_place_of_the_models(net):
    expected = report_of(brevact.quantize_backward(copy.deepcopy(net), brevact.StochBackward6bit), draws=2, layers=None)
    assert (
        report_of(brevact.quantize_backward(net, TWO_BITS), brevact.StochBackward6bit, draws=2, layers=None) == expected
    )


def test_gradient_report_of_a_model_without_quantizers_is_that_of_the_default(net):
    report = report_of(net, draws=2)
    assert report.notes and "no backward quantizer" in report.notes[0]
    default = report_of(brevact.quantize_backward(net), draws=2)
    assert (report.rows, report.noise, default.notes) == (default.rows, default.noise, ())


def test_gradient_report_prints_a_row_a_layer_and_the_unit(net):
    report = report_of(net, draws=2)
    text = str(report)
    assert all(row.layer in text for row in report.rows)
    assert (
        "total" in text
        and "(exact)" in text
        and "Unit of noise and bias²: variance of the gradient between the 4 batches" in text
    )
    alone = brevact.gradient_report(net, BATCHES[:1], loss, draws=2)
    assert alone.is_relative and math.isnan(alone.noise_error) and alone.noise > 0
    assert "squared norm of the gradient of the one batch" in str(alone) and "±" not in str(alone)


def test_gradient_report_writes_csv_and_a_picture(net, tmp_path):
    report = report_of(net, draws=2)
    report.to_csv(tmp_path / "gradients.csv")
    with open(tmp_path / "gradients.csv", newline="") as file:
        *lines, total = csv.DictReader(file)
    assert [(line["layer"], float(line["noise"])) for line in lines] == [(row.layer, row.noise) for row in report.rows]
    assert lines[1]["readers"].split() == list(report.rows[1].readers)
    assert (total["layer"], float(total["noise"]), int(total["saved_bytes"])) == (
        *("total", report.noise),
        report.saved_bytes,
    )
    report.plot(tmp_path / "gradients.png")
    assert (tmp_path / "gradients.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"model": loss}, TypeError, "model: got"),
        ({"batches": BATCHES[0][0]}, TypeError, "accepted is a list of batches"),
        ({"batches": []}, ValueError, "batches: got none"),
        ({"loss": F.cross_entropy(torch.ones(1, 2), torch.zeros(1, dtype=torch.long))}, TypeError, "loss: got"),
        ({"loss": nn.CrossEntropyLoss()}, TypeError, "accepted is a function of the model and a batch"),
        ({"loss": lambda model, batch: model(batch[0])}, ValueError, r"shape \(32, 10\); return a scalar"),
        ({"draws": 1}, ValueError, "draws: got 1; accepted is an int of at least 2"),
        ({"layer_draws": 1}, ValueError, "layer_draws: got 1"),
        ({"layers": "all"}, ValueError, "layers='all'; accepted are 'measured', None"),
        ({"policy": {"nothing": TWO_BITS}}, ValueError, "matches no module"),
    ],
)
def test_gradient_report_refuses(net, changes, kind, message):
    arguments = {"model": net, "batches": BATCHES, "loss": loss, "policy": None} | changes
    with pytest.raises(kind, match=message):
        brevact.gradient_report(**arguments)


def test_gradient_report_refuses_a_loss_of_another_model(net):
    other = copy.deepcopy(net)
    other.head.bias.grad = grad = torch.ones(10)
    with pytest.raises(ValueError, match="no parameter of the model gets a gradient; compute it with the model that"):
        report_of(net, draws=2) and brevact.gradient_report(net, BATCHES, lambda model, batch: loss(other, batch))
    assert other.head.bias.grad is grad and torch.equal(grad, torch.ones(10))
    assert other.head.weight.grad is None


def test_gradient_report_leaves_no_gradients_at_what_is_no_model(net):
    temperature = torch.ones((), requires_grad=True)
    batches = [(x.clone().requires_grad_(), y) for x, y in BATCHES]
    batches[0][0].grad = grad = torch.ones_like(batches[0][0])

    def scaled(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]) * temperature, batch[1])

    brevact.gradient_report(net, batches, scaled, draws=2, layer_draws=2)
    assert temperature.grad is None and batches[1][0].grad is None
    assert batches[0][0].grad is grad and torch.equal(grad, torch.ones_like(grad))


def test_gradient_report_runs_in_inference_mode(net):
    expected = report_of(net, draws=2, layers=None)
    with torch.inference_mode():
        found = report_of(net, draws=2, layers=None)
    assert (found.noise, found.bias) == (expected.noise, expected.bias)


def test_gradient_report_refuses_to_run_in_a_region(net):
    with brevact.backward_quant(TWO_BITS), pytest.raises(ValueError, match="gradient_report: called in a region"):
        report_of(net)
