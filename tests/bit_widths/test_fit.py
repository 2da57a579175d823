"""`fit`: bits where they matter, under a budget."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import asdict

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from brevact import FitReport, Policy, StochBackward3bit
from brevact.bit_widths.budgets import BIT_WIDTHS, Option, budget_of
from brevact.bit_widths.fit import FULL_PRECISION, groups_of, leaf_of, storing
from brevact.reports.gradient_noise import exact_gradients, gradient_noise
from brevact.reports.memory import memory_of
from tests.autograd.measuring import watch_saved


class Block(nn.Module):
    """A residual block, whose second chain derives from two tensors."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        layers = [nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.SiLU()]
        self.body = nn.Sequential(*layers, nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Net(nn.Module):
    """A stem, a block under a name that patterns would take for many, dropout and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.ModuleDict({"a*": Block(8), "ab": Block(8), "[c]": nn.Dropout(0.1)})
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks.values():
            x = block(x)
        return self.head(x.mean((2, 3)))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(6, 32, 3, 14, 14, generator=generator)
    return [(x, torch.randint(5, (32,), generator=generator)) for x in images]


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


def stored(model: nn.Module, batch: tuple[Tensor, Tensor]) -> int:
    return memory_of(model, lambda copied: loss(copied, batch)).saved_bytes


def test_bytes_are_those_of_a_step_with_its_loss():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 500))
    batches = [(torch.randn(128, 32), torch.randint(500, (128,))) for _ in range(3)]
    policy = brevact.fit(model, batches, loss, ratio=8)
    step = brevact.memory_report(brevact.quantize_backward(model, policy), batches[0], loss)
    assert policy.report.saved_bytes == step.saved_bytes and policy.report.plain_bytes == step.plain_bytes
    assert step.ratio >= 8  # of the loss's probabilities, too, which are most of the bytes
    assert any(group.source == "" for group in policy.report.groups)
    with watch_saved() as saved, brevact.backward_quant(model):
        value = loss(model, batches[0])
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved.tensors = [x for x in saved.tensors if x.untyped_storage().data_ptr() not in weights]
    assert saved.nbytes == step.saved_bytes and value.requires_grad


def state_of(model: nn.Module) -> list[object]:
    values = {name: x.tolist() for name, x in model.state_dict().items()}
    grads = [p.grad for p in model.parameters()]
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks), m.training) for m in model.modules()]
    return [values, grads, hooks, torch.get_rng_state().tolist()]


@pytest.mark.parametrize(
    "budget", [{"ratio": 9}, {"saved_bytes": 220_000}, {"noise": 0.02}], ids=lambda budget: next(iter(budget))
)
def test_fit_keeps_its_budget_and_says_what_is_measured(model, batches, budget):
    before = state_of(model)
    policy = brevact.fit(model, batches, loss, **budget)
    assert state_of(model) == before
    report = policy.report
    assert report.note == "" and report.budget == "{}={}".format(*next(iter(budget.items())))
    assert report.harm <= 1.5 * report.predicted and report.predicted <= 1.5 * report.harm
    brevact.quantize_backward(model, policy)
    assert stored(model, batches[0]) == report.saved_bytes
    if "noise" in budget:
        assert report.noise + max(0, report.bias) <= 0.02
    else:
        limit = report.plain_bytes / 9 if "ratio" in budget else 220_000
        assert 0.8 * limit <= report.saved_bytes <= limit
    assert {group.bit_width for group in report.groups} <= {*BIT_WIDTHS, FULL_PRECISION}
    assert sum(group.noise for group in report.groups) == pytest.approx(report.predicted)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "budget", [{"ratio": 9}, {"saved_bytes": 220_000}, {"noise": 0.02}], ids=lambda budget: next(iter(budget))
)
def test_a_quick_fit_keeps_its_budget_in_fewer_passes(model, batches, budget):
    before = state_of(model)
    policy = brevact.fit(model, batches, loss, **budget, quick=True)
    assert state_of(model) == before
    report, thorough = policy.report, brevact.fit(model, batches, loss, **budget).report
    assert report.passes < thorough.passes
    brevact.quantize_backward(model, policy)
    assert stored(model, batches[0]) == report.saved_bytes
    if "noise" in budget:
        assert report.saved_bytes <= 1.3 * thorough.saved_bytes
    else:
        limit = report.plain_bytes / 9 if "ratio" in budget else 220_000
        assert 0.8 * limit <= report.saved_bytes <= limit


@pytest.mark.exhaustive
def test_fit_has_less_noise_than_one_width_at_its_bytes(model, batches):
    uniform = Policy({"": leaf_of(3, attends=False)})
    exact = exact_gradients(model, batches, loss)
    brevact.quantize_backward(model, uniform)
    saved_bytes = stored(model, batches[0])
    noise, bias = gradient_noise(model, batches, loss, exact, 4)
    brevact.restore_backward(model)
    policy = brevact.fit(model, batches, loss, saved_bytes=saved_bytes)
    assert policy.report.saved_bytes <= saved_bytes
    brevact.quantize_backward(model, policy)
    fitted, fitted_bias = gradient_noise(model, batches, loss, exact, 4)
    assert fitted.value + fitted_bias.value < noise.value + bias.value


def test_bytes_of_groups_add_up_at_any_widths(model, batches):
    def report():
        return memory_of(model, lambda copied: loss(copied, batches[0]))

    reports = {}
    for width in BIT_WIDTHS:
        with storing(model, {"": leaf_of(width, attends=False)}):
            reports[width] = report()
    groups = groups_of(model, reports)
    assert {"stem.1", "blocks.a*.body.1", "blocks.ab.body.4"} <= {chain.source for chain in groups.chains}
    assert any(len(sources) == 2 for sources in groups.sources_of.values())
    draw = random.Random(0)
    for _ in range(6):
        widths = {chain.source: draw.choice(BIT_WIDTHS) for chain in groups.chains}
        with storing(model, groups.quantizers(widths)):
            attached = report().saved_bytes
        brevact.quantize_backward(model, groups.policy(widths))
        assert attached == report().saved_bytes == groups.saved_bytes(widths)
        brevact.restore_backward(model)


def test_fit_keeps_full_precision_where_it_fits(model, batches):
    report = brevact.fit(model, batches, loss, ratio=1).report
    assert report.saved_bytes == report.plain_bytes
    assert (report.noise, report.predicted, report.note) == (0, 0, "")
    assert abs(report.bias) < 1e-9
    assert {group.bit_width for group in report.groups} == {FULL_PRECISION}


def test_fit_gives_full_precision_to_some_where_8_bits_are_too_noisy(model, batches):
    report = brevact.fit(model, batches, loss, noise=1e-9).report
    widths = {group.bit_width for group in report.groups}
    assert FULL_PRECISION in widths and report.harm < 1e-6


@pytest.mark.exhaustive
def test_a_fitted_policy_is_saved_with_its_report_and_refuses_other_models(model, batches, tmp_path):
    path = tmp_path / "policy.json"
    policy = brevact.fit(model, batches, loss, ratio=8)
    policy.save(path)
    loaded = Policy.load(path)
    assert loaded.report == policy.report and loaded.layers == policy.layers
    assert str(loaded) == str(policy) and policy.report.summary in str(policy)
    settings = [[row.settings for row in brevact.backward_policy(m).rows] for m in apply_each(policy, loaded)]
    assert settings[0] == settings[1]
    other = Net()
    other.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 5))
    with pytest.raises(ValueError, match=r"head is a Sequential, and was a Linear, head.0 is new, head.1 is new"):
        brevact.quantize_backward(other, policy)
    path.write_text(path.read_text().replace('"passes"', '"steps"'))
    with pytest.raises(ValueError, match=r"report: .*'steps'"):
        Policy.load(path)


def apply_each(*policies: Policy) -> list[nn.Module]:
    return [brevact.quantize_backward(Net(), policy) for policy in policies]


@pytest.mark.exhaustive
def test_an_impossible_budget_names_the_nearest_possible_one(model, batches):
    with pytest.raises(ValueError, match="ratio=1000 is not possible") as caught:
        brevact.fit(model, batches, loss, ratio=1000)
    least = int(str(caught.value).split()[-2])
    report = brevact.fit(model, batches, loss, saved_bytes=least).report
    assert report.saved_bytes == least and {group.bit_width for group in report.groups} == {1}


@pytest.fixture
def widening() -> tuple[nn.Module, list]:
    """A perceptron whose hidden layers are recomputed from narrow inputs at two levels, and its batches."""
    torch.manual_seed(0)
    sizes = ((32, 32), (32, 96), (96, 96))
    layers = ((nn.LayerNorm(n), nn.Linear(n, 4 * n), nn.SiLU(), nn.Linear(4 * n, m)) for n, m in sizes)
    model = nn.Sequential(*(each for block in layers for each in block), nn.Linear(96, 5))
    return model, [(torch.randn(256, 32), torch.randint(5, (256,))) for _ in range(3)]


@pytest.mark.exhaustive
def test_layers_are_recomputed_where_the_budget_asks_for_it(widening):
    model, batches = widening
    both = brevact.fit(model, batches, loss, ratio=30, noise=0.01).report
    assert both.ratio >= 30 and both.harm <= 0.01 and both.recompute >= 32 and not both.time
    assert "are recomputed" in both.summary and "as long" not in both.summary  # without a budget of time
    quiet = brevact.fit(model, batches, loss, noise=0.01).report
    assert quiet.recompute == 0 and quiet.harm <= 0.01 and quiet.saved_bytes > both.saved_bytes
    timed = brevact.fit(model, batches, loss, noise=0.01, time=1000).report
    assert timed.recompute == 256 and timed.ratio >= both.ratio  # the last level that saves bytes
    assert f"{timed.time:.2f} times as long" in timed.summary


@pytest.mark.exhaustive
def test_a_quick_fit_recomputes_layers_where_noise_would_be_large(widening):
    model, batches = widening
    report = brevact.fit(model, batches, loss, ratio=20, quick=True).report
    assert report.ratio >= 20 and report.harm <= 0.01 and report.recompute >= 32
    loud = brevact.fit(model, batches, loss, ratio=20, noise=0.5, quick=True).report  # is said to be little enough
    assert loud.ratio >= 20 and 0.1 < loud.harm <= 0.5 and loud.recompute == 0
    quiet = brevact.fit(model, batches, loss, ratio=12, quick=True).report
    assert quiet.ratio >= 12 and 0.001 < quiet.harm <= 0.1 and quiet.recompute == 0  # one fit, not one a level


def test_a_time_that_no_step_takes_is_refused(widening):
    model, batches = widening
    with pytest.raises(ValueError, match=r"time=0.01 is not possible: .*; accepted is time=.* or more"):
        brevact.fit(model, batches, loss, noise=0.1, time=0.01)


@pytest.mark.parametrize(
    ("budget", "kind", "words"),
    [
        ({}, ValueError, "got no budget; accepted is one of ratio=24"),
        ({"ratio": 8, "saved_bytes": 100}, ValueError, "got ratio, saved_bytes"),
        ({"time": 1.2}, ValueError, "got time; accepted is one of ratio=24"),
        ({"ratio": "8x"}, TypeError, "ratio: got '8x' of type str"),
        ({"noise": True}, TypeError, "noise: got True"),
        ({"noise": 0.1, "time": 0}, ValueError, "time=0; accepted is a number above 0"),
        ({"noise": 0}, ValueError, "noise=0; accepted is a number above 0"),
        ({"saved_bytes": math.nan}, ValueError, "saved_bytes: got nan"),
    ],
)
def test_fit_refuses_a_budget(model, batches, budget, kind, words):
    with pytest.raises(kind, match=words):
        brevact.fit(model, batches, loss, **budget)


def test_fit_refuses_what_it_cannot_measure(model, batches):
    for wrong, kind, words in (
        ((batches, model, loss), TypeError, r"swapped: write fit\(model, batches"),
        ((model, batches[:1], loss), ValueError, "got 1; accepted are at least 2"),
        ((model, iter(batches), loss), TypeError, "a list of batches"),
        ((model, batches, lambda model, batch: model(batch[0])), ValueError, "a scalar tensor"),
        ((Net().requires_grad_(False), batches, loss), ValueError, "requires a gradient"),
    ):
        with pytest.raises(kind, match=words):
            brevact.fit(*wrong, ratio=8)
    brevact.quantize_backward(model, StochBackward3bit)
    with pytest.raises(ValueError, match="already has a backward policy"):
        brevact.fit(model, batches, loss, ratio=8)
    assert brevact.backward_policy(model).rows[0].source == "StochBackward3bit"


class Potential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 1)),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        energy = self.layers(x).squeeze(1)
        (grad,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy, -grad


def loss_on_forces(model: nn.Module, batch: Tensor) -> Tensor:
    energy, forces = model(batch)
    return F.mse_loss(forces, batch) + F.mse_loss(energy, batch.square().sum(1) / 2)


def test_fit_takes_a_loss_that_differentiates_gradients_again(tmp_path):
    torch.manual_seed(0)
    model, points = Potential(), list(torch.randn(3, 128, 32))
    with pytest.raises(RuntimeError, match=r"double backward .*brevact.fit\(.*double_backward=True"):
        brevact.fit(model, points, loss_on_forces, ratio=3, progress=False)
    policy = brevact.fit(model, points, loss_on_forces, ratio=3, double_backward=True, progress=False)
    assert policy.report.ratio >= 3
    policy.save(tmp_path / "policy.json")
    for each in (policy, Policy.load(tmp_path / "policy.json")):
        brevact.quantize_backward(model, each)
        loss_on_forces(model, points[0]).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        brevact.restore_backward(model)
    with pytest.raises(TypeError, match="double_backward: got 'yes'; accepted are True and False"):
        brevact.fit(model, points, loss_on_forces, ratio=3, double_backward="yes")


def test_budget_of_noise_takes_the_least_bytes_that_any_widths_have():
    draw = random.Random(0)
    kinds = [(draw.randint(1, 50), draw.random()) for _ in range(6)]
    items = [[Option(b * size, c / (2**b - 1) ** 2, b) for b in (1, 2, 3, 4)] for size, c in kinds]
    noise = 0.3
    chosen = budget_of(noise=noise).choose(items, 1000, 1.0)
    possible = [each for each in itertools.product(*items) if sum(option.noise for option in each) <= 0.95 * noise]
    least = min(sum(option.cost for option in each) for each in possible)
    assert sum(option.noise for option in chosen) <= noise
    assert sum(option.cost for option in chosen) <= least + max(items, key=lambda item: item[0].cost)[0].cost


def test_report_writes_what_was_not_reached():
    report = FitReport("ratio=24", 100, 2400, 0.01, 0.05, 0.001, 0.0, 0.001, 7, "Not reached.")
    assert report.ratio == 24 and str(report).endswith("Not reached.")
    assert FitReport.from_plain(asdict(report) | {"groups": []}) == report


@pytest.mark.exhaustive
def test_fit_says_where_noises_do_not_add_up():
    torch.manual_seed(0)
    deep = nn.Sequential(
        *(kind() for _ in range(12) for kind in (lambda: nn.Linear(64, 64), nn.SiLU)), nn.Linear(64, 5)
    )
    with torch.no_grad():
        for layer in deep[::2]:
            layer.weight *= 3  # activations grow, and noises multiply
    rows = [(torch.randn(128, 64), torch.randint(5, (128,))) for _ in range(4)]
    options = {"double_backward": True}  # nothing is recomputed, so that most layers have one bit
    report = brevact.fit(deep, rows, loss, ratio=28, **options).report
    assert report.harm < report.predicted / 1.5
    assert "times what was predicted" in report.note


def test_noise_of_layers_with_their_own_quantizer_is_predicted_too():
    torch.manual_seed(0)
    own = brevact.nn.SiLU(act_quant=brevact.StochBackward2bit)
    deep = nn.Sequential(nn.Linear(64, 128), own, nn.Linear(128, 5))
    rows = [(torch.randn(128, 64), torch.randint(5, (128,))) for _ in range(4)]
    report = brevact.fit(deep, rows, loss, ratio=6, progress=False).report
    assert report.predicted == pytest.approx(report.harm, rel=0.5)
    assert report.predicted > 3 * sum(group.noise for group in report.groups)
    whole = brevact.fit(deep, rows, loss, ratio=1, progress=False).report
    assert whole.predicted == 0 and whole.harm > 0 and not whole.note


def test_a_ratio_of_measured_bytes_is_met_by_them():
    for saved, plain in itertools.product(range(10_007, 10_107), range(300_000, 300_100, 7)):
        assert saved <= budget_of(ratio=plain / saved).bytes_of(plain)


@pytest.mark.exhaustive
def test_a_policy_of_more_noise_than_a_minibatch_has_is_warned_of(recwarn):
    """Unless the caller accepts it, or the noise is little."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(6)))
    model.append(nn.Linear(64, 5))
    batches = [(torch.randn(128, 64), torch.randint(5, (128,))) for _ in range(2)]
    brevact.fit(model, batches, loss, ratio=4, quick=True)
    assert not [each for each in recwarn if "minibatches" in str(each.message)]
    with pytest.warns(UserWarning, match=r"fit\(ratio=\d+\): noise and squared bias .* are .* times the noise"):
        report = brevact.fit(model, batches, loss, ratio=40, quick=True).report
    assert report.harm > 1
    recwarn.clear()
    brevact.fit(model, batches, loss, ratio=40, noise=1000, quick=True)
    assert not [each for each in recwarn if "minibatches" in str(each.message)]
