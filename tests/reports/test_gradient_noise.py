"""Estimates of noise and bias of gradients: right where they are known, of a model that stays as it was."""

from __future__ import annotations

import copy
import math
import random

import brevitas.nn as qnn
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import brevact
import brevact.nn as bnn
from brevact.reports.gradient_noise import batch_variance, exact_gradients, gradient_noise, variance_and_bias

WEIGHTS, SAMPLES = 400, 4


class Mean(nn.Module):
    """A loss whose gradient is the mean of a batch: independent standard normal samples give variance 1 / SAMPLES."""

    def __init__(self, noise: float = 0.0, bias: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WEIGHTS))
        generator = torch.Generator().manual_seed(0)
        self.weight.register_hook(lambda grad: grad + bias + noise * torch.randn(WEIGHTS, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).mean()


class Net(nn.Module):
    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Dropout(0.5), nn.Conv2d(16, 4, 3)
        self.body = nn.Sequential(*layers)
        self.is_reentrant = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.1)
        if self.is_reentrant is None:
            x = self.body(x)
        else:
            x = checkpoint(self.body, x.requires_grad_(), use_reentrant=self.is_reentrant)
        return F.dropout(x, 0.1).square().mean()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch)


def batches_of(*shape: int, count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


IMAGES = batches_of(4, 3, 16, 16)


def measured(exact_model, model, batches=IMAGES, draws=4):
    return gradient_noise(model, batches, loss, exact_gradients(exact_model, batches, loss), draws)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize(("deviation", "shift"), [(0.3, 0.0), (1.0, 0.2), (0.0, 0.2)])
def test_gradient_noise_recovers_known_noise_and_bias(deviation, shift):
    found = measured(Mean(), Mean(deviation, shift), batches_of(SAMPLES, WEIGHTS, count=16))
    for estimate, expected in ((found.noise, deviation**2 * SAMPLES), (found.bias, shift**2 * SAMPLES)):
        assert abs(estimate.value - expected) <= 5 * estimate.error
        assert estimate.error < 0.1 * max(deviation**2, shift**2) * SAMPLES


def test_gradient_noise_of_one_batch_is_relative_to_its_gradient():
    batches = batches_of(SAMPLES, WEIGHTS, count=1)
    exact = exact_gradients(Mean(), batches, loss)
    noise, bias = gradient_noise(Mean(0.5, 0.3), batches, loss, exact, 64)
    norm = float(batches[0].mean(0).square().sum())
    assert exact.is_relative and math.isnan(noise.error) and math.isnan(bias.error)
    # Sums over 400 weights of 64 draws: of relative variance 2 / (400 * 63), and that of the mean error.
    assert abs(noise.value * norm / (WEIGHTS * 0.25) - 1) < 5 * math.sqrt(2 / (WEIGHTS * 63))
    assert abs(bias.value * norm / (WEIGHTS * 0.09) - 1) < 5 * 2 * 0.5 / 0.3 / math.sqrt(WEIGHTS * 64)


def test_batch_variance_recovers_a_known_variance():
    generator = torch.Generator().manual_seed(0)
    for batches in (2, 3, 8, 64):
        found = batch_variance([[2 * torch.randn(n, generator=generator) for n in (400, 600)] for _ in range(batches)])
        expected = 5 * 4000 * math.sqrt(2 / (1000 * (batches - 1)))
        assert abs(found.value - 4000) <= expected
        assert math.isnan(found.error) == (batches == 2)


def test_batch_variance_gives_the_error_of_the_jackknife():
    generator = torch.Generator().manual_seed(0)
    gradients = [[torch.randn(50, generator=generator)] for _ in range(6)]
    without = [batch_variance(gradients[:b] + gradients[b + 1 :]).value for b in range(6)]
    spread = torch.tensor(without, dtype=torch.float64).var(correction=0)
    assert batch_variance(gradients).error == pytest.approx(math.sqrt(5 * spread), rel=1e-5)


def test_variance_and_bias_are_unbiased():
    errors = 0.5 + torch.randn(2000, 3, 10, generator=torch.Generator().manual_seed(0))
    exact = [torch.zeros(4), torch.zeros(6)]
    figures = [variance_and_bias([each.split([4, 6]) for each in draws], exact) for draws in errors]
    for values, expected in zip(torch.tensor(figures).T, (10.0, 2.5), strict=True):
        assert abs(values.mean() - expected) <= 5 * values.std() / math.sqrt(2000)


@pytest.mark.parametrize("checkpointed", [None, False, True])
def test_exact_backward_quantization_has_neither_noise_nor_bias_with_dropout(checkpointed):
    torch.manual_seed(0)
    net = Net(checkpointed)
    for rules in (brevact.LosslessBackward, {"*": None}):
        changed = brevact.quantize_backward(copy.deepcopy(net), rules)
        assert measured(net, changed, draws=2) == ((0.0, 0.0), (0.0, 0.0))
    (noise, _), (bias, _) = measured(net, brevact.quantize_backward(copy.deepcopy(net), brevact.StochBackward4bit))
    assert noise > 0 and bias < 0.1  # another dropout mask would be a bias of about 1


def test_layers_with_quantizers_of_their_own_move_no_dropout_behind_them():
    torch.manual_seed(0)
    layers = (
        bnn.QuantLinear(64, 64, True, weight_quant=None, act_quant=brevact.StochBackward4bit),
        nn.Dropout(0.5),
    ) * 2
    activation = qnn.QuantReLU(act_quant=brevact.StochBackward4bit, forward_quant=None)
    net = nn.Sequential(*layers, activation, nn.Dropout(0.5))

    def of_square(model, batch):
        return model(batch).square().mean()

    batches = batches_of(64, 64)
    exact = exact_gradients(net, batches, of_square)
    noise, bias = gradient_noise(net, batches, of_square, exact, 4)
    assert 0 < noise.value < 0.1 and bias.value < 0.1


def test_a_nearest_quantizer_has_bias_alone_and_a_stochastic_one_noise(net):
    nearest, stochastic = (
        measured(net, brevact.quantize_backward(copy.deepcopy(net), quantizer))
        for quantizer in (brevact.NearestBackward2bit, brevact.StochBackward2bit)
    )
    assert nearest.noise == (0.0, 0.0) and nearest.bias.value > 5 * nearest.bias.error
    assert stochastic.noise.value > 5 * stochastic.noise.error > 0


def test_manual_seed_fixes_the_figures(net):
    changed = brevact.quantize_backward(copy.deepcopy(net), brevact.StochBackward2bit)
    torch.manual_seed(3)
    first = measured(net, changed, draws=2)
    torch.rand(3)
    assert measured(net, changed, draws=2) == first
    torch.manual_seed(4)
    assert measured(net, changed, draws=2) != first


def test_a_loss_that_draws_random_numbers_of_its_own_is_refused(net):
    generator = random.Random(0)
    with pytest.raises(ValueError, match="two exact gradients of the first batch"):
        exact_gradients(net, IMAGES, lambda model, batch: model(batch) * generator.random())


class WithState(nn.Module):
    """A layer with a hidden state, or a codebook that may have an optimizer of its own; and irreps as those of e3nn."""

    class Irreps(tuple):
        def __len__(self):
            raise NotImplementedError("ambiguous")

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.irreps = kind, nn.Linear(16, 16), self.Irreps(((1, 0),))
        self.state = torch.randn(8, 16) if kind == "codes" else None
        if kind == "optimizer":
            self.state = nn.Parameter(torch.randn(8, 16))
            self.optimizer = torch.optim.SGD([self.state], lr=100.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "hidden":
            self.state = (self.layer(x) if self.state is None else self.layer(x) + self.state).tanh().detach()
            return self.layer(x).mul(self.state).sum()
        codes = self.layer(x)
        places = torch.cdist(codes.detach(), self.state).argmin(1)
        chosen = self.state[places]
        if self.kind == "codes":
            self.state = self.state.lerp(torch.zeros_like(self.state).index_add(0, places, codes.detach()), 0.1)
        else:
            self.optimizer.zero_grad()
            F.mse_loss(chosen, codes.detach()).backward()
            self.optimizer.step()
        return F.mse_loss(codes, chosen.detach())


def test_state_of_modules_is_the_same_in_all_passes():
    rows = batches_of(32, 16)
    for kind in ("hidden", "codes"):
        model = brevact.quantize_backward(WithState(kind), brevact.StochBackward4bit, min_numel=0)
        before = model.state
        assert brevact.gradient_report(model, rows, loss, draws=2).noise > 0 and model.state is before
    with pytest.raises(ValueError, match="passes change parameters, state: leave steps of an optimizer"):
        brevact.gradient_report(WithState("optimizer"), rows, loss, draws=2)


def test_a_parameter_without_gradient_counts_as_zero():
    net = nn.ModuleDict({"used": nn.Linear(64, 1), "unused": nn.Linear(64, 64)})
    net["unused"].bias.requires_grad_(False)
    exact = exact_gradients(net, batches_of(64, 64), lambda model, batch: model["used"](batch).square().mean())
    assert [grad.shape for grad in exact.of_batches[0]] == [(1, 64), (1,), (64, 64)]
    assert not exact.of_batches[0][2].any()


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (lambda model, batch: model.body(batch), ValueError, r"shape \(4, 4, 12, 12\); return a scalar tensor"),
        (lambda model, batch: float(model(batch).detach()), TypeError, "of type float; return a scalar tensor"),
        (lambda model, batch: model(batch).detach(), ValueError, "requires no gradient"),
        (lambda model, batch: model(batch) / 0, ValueError, "returned inf"),
        (lambda model, batch: torch.ones((), requires_grad=True) * 2, ValueError, "no parameter of the model gets"),
        (lambda model, batch: 0 * model(batch), ValueError, "the gradients of all 3 are equal, or 0"),
    ],
)
def test_exact_gradients_refuses_a_loss(net, wrong, kind, message):
    with pytest.raises(kind, match=message):
        exact_gradients(net, IMAGES, wrong)


def test_exact_gradients_refuses_a_model_that_does_not_train(net):
    with pytest.raises(ValueError, match="none of the 6 parameters of Net requires a gradient"):
        exact_gradients(net.requires_grad_(False), IMAGES, loss)
