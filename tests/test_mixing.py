"""Schedules of the probability of the higher width."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import brevact
from brevact import MixSchedule, StochBackward2bit, StochBackward2bit4bitMix
from brevact import nn as bnn


def model() -> nn.Module:
    layers = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    return brevact.quantize_backward(layers, StochBackward2bit4bitMix)


def kept(net: nn.Module) -> int:
    return brevact.memory_report(net, torch.randn(512, 256)).saved_bytes


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.8] * 5),
        ("linear", [0.8, 0.65, 0.5, 0.35, 0.2]),
        ("cosine", [round(0.2 + 0.6 * (1 + math.cos(math.pi * t / 4)) / 2, 3) for t in range(5)]),
        ("step", [0.8, 0.8, 0.5, 0.5, 0.2]),
    ],
)
def test_schedules_follow_their_formulas(kind, expected):
    schedule = MixSchedule(model(), kind, start=0.8, end=0.2, steps=4, stairs=2)
    found = []
    for _ in range(5):
        found.append(schedule.mix_prob)
        schedule.step()
    assert found == pytest.approx(expected)
    assert schedule.mix_prob == pytest.approx(expected[-1])  # and stays there


def test_stored_bytes_follow_the_schedule():
    net = model()
    schedule = MixSchedule(net, "linear", start=1.0, end=0.0, steps=2)
    sizes = []
    for _ in range(3):
        sizes.append(kept(net))
        schedule.step()
    four, half, two = sizes
    plain = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    assert two < half < four < kept(brevact.quantize_backward(plain, StochBackward2bit)) * 2
    assert abs(half - (two + four) / 2) < 0.25 * (four - two)  # 768 buckets: 5 standard errors are 0.09


def test_layers_with_slots_follow_and_others_stay():
    net = nn.Sequential(
        bnn.ReLU(act_quant=StochBackward2bit),
        bnn.QuantLinear(64, 64, True, act_quant=StochBackward2bit4bitMix),
        bnn.SiLU(act_quant=StochBackward2bit4bitMix, act_mix_prob=0.1),
    )
    before = net[0].act_quant.settings
    MixSchedule(net, start=0.25)
    assert net[0].act_quant.settings is before
    assert net[1].act_quant.settings.quantizer.mix_prob == net[2].act_quant.settings.quantizer.mix_prob == 0.25


def test_modules_that_shared_settings_share_the_new_ones():
    net = model()
    MixSchedule(net, start=0.3)
    settings = {id(hook.settings) for m in net.modules() for hook in brevact.autograd.hooks.regions_of(m)}
    assert len(settings) == 1


def test_a_schedule_resumes_from_a_checkpoint():
    net = model()
    schedule = MixSchedule(net, "cosine", start=0.9, end=0.1, steps=10)
    for _ in range(4):
        schedule.step()
    state = pickle.loads(pickle.dumps(schedule.state_dict()))
    other = model()
    resumed = MixSchedule(other)
    resumed.load_state_dict(copy.deepcopy(state))
    for _ in range(3):
        schedule.step(), resumed.step()
        assert resumed.mix_prob == schedule.mix_prob
    probabilities = {hook.settings.quantizer.mix_prob for hook in brevact.autograd.hooks.regions_of(other)}
    assert probabilities == {schedule.mix_prob}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"kind": "cosin"}, "kind='cosin'"),
        ({"start": 1.5}, "start=1.5"),
        ({"end": -1}, "end=-1"),
        ({"steps": 0}, "steps=0"),
        ({"stairs": True}, "stairs=True"),
    ],
)
def test_arguments_out_of_range_raise(arguments, error):
    with pytest.raises(ValueError, match=error):
        MixSchedule(model(), **arguments)


def test_a_model_without_mixing_raises():
    with pytest.raises(ValueError, match="no quantizer that mixes"):
        MixSchedule(brevact.quantize_backward(nn.Linear(8, 8), StochBackward2bit))
    with pytest.raises(TypeError, match="model"):
        MixSchedule("model")


def test_state_of_something_else_raises():
    with pytest.raises(ValueError, match="expected are"):
        MixSchedule(model()).load_state_dict({"last_epoch": 3})
