"""Schedules of the probability of the higher width."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

import brevact
from brevact import MixSchedule, SaveMode, SignMagnitudeBackward, StochBackward2bit, StochBackward2bit4bitMix
from brevact import nn as bnn
from brevact.autograd.region.module_hooks import regions_of


def model(source: object = StochBackward2bit4bitMix) -> nn.Module:
    layers = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    return brevact.quantize_backward(layers, source)


def probabilities(net: nn.Module) -> set[float]:
    return {hook.settings.quantizer.probability for module in net.modules() for hook in regions_of(module)}


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


def test_schedules_reach_the_quantizers_of_rules_for_ops():
    net = nn.Sequential(nn.Linear(256, 256), nn.SiLU())
    brevact.quantize_backward(net, {nn.functional.silu: brevact.StochBackward2bit4bitMix, "*": None})
    schedule = MixSchedule(net, "linear", start=1.0, end=0.0, steps=1)
    sizes = [kept(net)]
    schedule.step()
    assert 512 * 256 * 2 // 8 <= sizes[0] - kept(net) < 512 * 256 * 2.1 // 8  # 4 bits an element, then 2


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "step"])
def test_a_schedule_starts_and_ends_where_it_is_told(kind):
    net = model(StochBackward2bit4bitMix.let(mix_prob=1 / 3))
    schedule = MixSchedule(net, kind, end=0.0004, steps=2, stairs=2)  # of more decimals than those between
    assert probabilities(net) == {1 / 3}
    for _ in range(3):
        schedule.step()
    assert probabilities(net) == {1 / 3 if kind == "constant" else 0.0004}


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
    assert probabilities(other) == {schedule.mix_prob}


def test_levels_mixed_by_sign_and_magnitude_follow_beside_widths():
    net = nn.Sequential(model(SignMagnitudeBackward), model())
    schedule = MixSchedule(net, "linear", end=0.0, steps=2)
    assert schedule.mix_prob == 0.3  # the first quantizer's
    sizes = []
    for expected in (0.3, 0.15, 0.0):
        assert probabilities(net) == {expected}
        sizes.append(kept(net))
        schedule.step()
    assert sizes[0] > sizes[1] > sizes[2]


def test_copies_of_a_model_go_their_own_ways():
    net = model()
    schedule = MixSchedule(net, "linear", start=1.0, end=0.0, steps=2)
    alone = copy.deepcopy(net)
    both, own = copy.deepcopy((net, schedule))
    schedule.step()
    assert (probabilities(net), probabilities(alone), probabilities(both)) == ({0.5}, {1.0}, {1.0})
    own.step(), own.step()
    assert (probabilities(net), probabilities(both)) == ({0.5}, {0.0})


def test_a_schedule_outlives_a_change_of_policy():
    net = model()
    schedule = MixSchedule(net, start=0.25)
    brevact.restore_backward(net)
    with pytest.raises(ValueError, match="no quantizer that mixes"):
        schedule.step()
    brevact.quantize_backward(net, StochBackward2bit4bitMix)
    schedule.step()
    assert probabilities(net) == {0.25}


@pytest.mark.parametrize("mode", SaveMode)
def test_a_step_between_forward_and_backward_changes_nothing(mode):
    net, batch = model(StochBackward2bit4bitMix.let(save_mode=mode)), torch.randn(512, 256)
    found = []
    for end in (0.5, 0.0):
        schedule = MixSchedule(net, "linear", start=0.5, end=end, steps=1)
        net.zero_grad()
        torch.manual_seed(1)
        loss = net(batch).square().mean()
        schedule.step()
        assert probabilities(net) == {end}
        loss.backward()
        found.append([p.grad.clone() for p in net.parameters()])
    assert all(map(torch.equal, *found))


MIXTURES = [
    StochBackward2bit4bitMix,
    brevact.NearestBackward3bit6bitMix,
    SignMagnitudeBackward,
    brevact.SignMagnitudeGlobalBackward,
    brevact.SignMagnitudeL2Backward,
]


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.branches = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(8 * 9 * 9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.silu(self.norm(self.conv(x)))
        x = torch.relu(x + sum(branch(x) for branch in self.branches))
        return self.head(x.flatten(1))


@pytest.mark.parametrize("source", MIXTURES, ids=lambda leaf: leaf.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantizing_on_backward_gives_the_same_gradients(source, dtype):
    def run(mode: SaveMode) -> list[Tensor]:
        torch.manual_seed(0)
        net = brevact.quantize_backward(Images(), source, save_mode=mode, min_numel=0).to(dtype)
        images = torch.randn(5, 3, 9, 9).to(dtype, memory_format=torch.channels_last)
        torch.manual_seed(1)
        loss = net(images).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return [p.grad for p in net.parameters()]

    stored, late = map(run, SaveMode)
    assert all(map(torch.equal, stored, late))
    assert all(grad.isfinite().all() for grad in stored)


class Segments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Dropout(0.3), nn.Linear(64, 64)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("mode", SaveMode)
@pytest.mark.parametrize("source", MIXTURES, ids=lambda leaf: leaf.__name__)
def test_checkpoints_recompute_tensors_of_the_same_sizes(source, mode):
    torch.manual_seed(0)
    net = brevact.quantize_backward(Segments(), source, save_mode=mode, min_numel=0)
    for _ in range(3):
        loss = net(torch.randn(300, 64)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())
    images = brevact.quantize_backward(Images(), source, save_mode=mode, min_numel=0)
    torch.utils.checkpoint.checkpoint(images, torch.randn(5, 3, 9, 9), use_reentrant=False).sum().backward()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"kind": "cosin"}, "kind='cosin'"),
        ({"start": 1.5}, "start: got 1.5"),
        ({"end": -1}, "end: got -1"),
        ({"steps": 0}, "steps: got 0"),
        ({"stairs": True}, "stairs: got True"),
    ],
)
def test_arguments_out_of_range_raise(arguments, error):
    with pytest.raises((TypeError, ValueError), match=error):
        MixSchedule(model(), **arguments)


def test_a_model_without_mixing_raises():
    with pytest.raises(ValueError, match="no quantizer that mixes"):
        MixSchedule(brevact.quantize_backward(nn.Linear(8, 8), StochBackward2bit))
    with pytest.raises(TypeError, match="model"):
        MixSchedule("model")


def test_state_of_something_else_raises():
    schedule = MixSchedule(model(), "linear", steps=2)
    good = schedule.state_dict()
    with pytest.raises(ValueError, match="accepted are"):
        schedule.load_state_dict({"last_epoch": 3})
    with pytest.raises(TypeError, match="state: got None"):
        schedule.load_state_dict(None)
    for wrong, error in (
        ({"kind": "expo"}, "kind='expo'"),
        ({"start": 2.0}, "start: got 2.0"),
        ({"steps": 0}, "steps: got 0"),
        ({"done": -1}, "done: got -1"),
        ({"done": 1.5}, "done: got 1.5"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            schedule.load_state_dict({**good, **wrong})
    assert schedule.state_dict() == good
