"""Time and peak of a step, plain against packed, and a model that stays as it was."""

import csv
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import brevact
from brevact import StochBackward2bit
from brevact.reports.step import StepReport

BATCH = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))


def net():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.GELU(), nn.Conv2d(16, 16, 3), nn.GELU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def test_step_report_measures_pairs_and_peaks():
    report = brevact.step_report(brevact.quantize_backward(net(), StochBackward2bit), BATCH, loss, rounds=4)
    assert len(report.plain_seconds) == len(report.packed_seconds) == len(report.ratios) == 4
    assert all(each > 0 for each in (*report.plain_seconds, *report.packed_seconds))
    low, high = report.spread
    assert low <= report.time_ratio <= high
    assert not report.note
    assert "4 pairs" in str(report)


def test_peak_is_what_a_step_allocates_at_most():
    """Both layers' outputs and derivatives are alive at once: at least the saved bytes of plain training."""
    model = brevact.quantize_backward(net(), StochBackward2bit, min_numel=0)
    kept = brevact.memory_report(model, BATCH, loss)
    report = brevact.step_report(model, BATCH, loss, rounds=2)
    assert report.plain_peak > kept.plain_bytes - BATCH[0].nbytes
    assert report.packed_peak < report.plain_peak
    assert report.peak_ratio == report.plain_peak / report.packed_peak


@pytest.mark.parametrize("of_model", [False, True])
def test_a_region_around_a_report_packs_nothing_of_its_steps(of_model):
    model = brevact.quantize_backward(net(), StochBackward2bit, min_numel=0)
    memory, step = brevact.memory_report(model, BATCH, loss), brevact.step_report(model, BATCH, loss, rounds=2)
    with brevact.backward_quant(model if of_model else StochBackward2bit):
        assert brevact.memory_report(model, BATCH, loss) == memory
        found = brevact.step_report(model, BATCH, loss, rounds=2)
    assert (found.plain_peak, found.packed_peak) == (step.plain_peak, step.packed_peak)


def test_a_model_without_a_policy_is_measured_with_the_default_one():
    model = net()
    report = brevact.step_report(model, BATCH, loss, rounds=2)
    assert report.note in str(report)
    assert "quantize_backward(model)" in report.note
    with pytest.raises(ValueError, match="no backward policy"):
        brevact.restore_backward(model)


def test_spread_is_that_of_the_ratios_of_pairs(tmp_path):
    report = StepReport((1.0, 2.0, 4.0), (2.0, 2.0, 2.0), 100, 50)
    assert report.ratios == (2.0, 1.0, 0.5)
    assert (report.time_ratio, report.spread, report.peak_ratio) == (1.0, (0.75, 1.5), 2.0)
    report.to_csv(tmp_path / "step.csv")
    with open(tmp_path / "step.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["packed_seconds"]) for row in rows] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("policy", [None, brevact.DEFAULT], ids=["none", "DEFAULT"])
def test_a_model_with_checkpoints_is_measured(policy):
    """Checkpoints in the plain step recompute in full precision."""
    layers = net()
    layers.forward = partial(checkpoint_sequential, layers, 2, use_reentrant=False)
    model = nn.Sequential(layers)
    if policy is not None:
        brevact.quantize_backward(model, policy)
    report = brevact.step_report(model, BATCH, loss, rounds=2)
    assert 0 < report.packed_peak < report.plain_peak


@pytest.mark.parametrize("rounds", [1, 0, 2.0, True])
def test_rounds_are_checked(rounds):
    with pytest.raises((TypeError, ValueError), match="rounds"):
        brevact.step_report(net(), BATCH, loss, rounds=rounds)


def test_no_step_is_timed_on_the_meta_device():
    with torch.device("meta"), pytest.raises(ValueError, match="on the meta device no step runs; memory_report"):
        brevact.step_report(net(), torch.empty(4, 3, 8, 8), loss)
