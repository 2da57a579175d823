"""Gradients that are singular in a saved tensor are torch's: it stays in full precision."""

from __future__ import annotations

import statistics

import pytest
import torch
from torch.distributions import Gamma, Laplace, LogNormal, Normal, kl_divergence
from torch.nn import functional as F

import brevact
from brevact import DitherBackward4bit
from brevact.autograd import BackwardSettings, region
from tests.autograd.database_laws import Outcome, bias_of
from tests.autograd.leaves import every_noisy_leaf, packs
from tests.autograd.measuring import settings


@pytest.mark.parametrize(
    "op",
    [
        lambda x: 1.0 / x,
        lambda x: x**-1,
        lambda x: x**0.5,
        lambda x: torch.ones_like(x).div_(x),
        lambda x: (x * 1).log_(),
        lambda x: (x * 1).rsqrt_(),
        lambda x: torch.special.log1p(x),
        lambda x: x.prod(1),
        lambda x: x.view(-1, 2).std(1),
        lambda x: F.normalize(x.view(-1, 2)),
        lambda x: F.cosine_similarity(x[:, ::2], x[:, 1::2]),
    ],
)
def test_singular_gradients_are_exact(op):
    x = (torch.rand(1, 64, 8) * 10 + 0.01).squeeze(0).requires_grad_()
    weights = None
    grads = []
    for chosen in (None, settings(bit_width=2)):
        with region(chosen):
            out = op(x * 1 if chosen is None else x + 0)
        weights = torch.randn_like(out) if weights is None else weights
        grads.append(torch.autograd.grad((out * weights).sum(), x)[0])
    torch.testing.assert_close(grads[1], grads[0])


@every_noisy_leaf
@pytest.mark.parametrize("op", [lambda x: 1.0 / x, lambda x: x**0.5])
def test_singular_gradients_of_each_kind_are_exact(leaf, op):
    x = (torch.rand(64, 64) * 10 + 0.01).requires_grad_()
    weights, grads = torch.randn(64, 64), []
    for chosen in (None, packs(leaf)):
        with region(chosen):
            out = op(x + 0)
        grads.append(torch.autograd.grad((out * weights).sum(), x)[0])
    torch.testing.assert_close(grads[1], grads[0])


FOUR = BackwardSettings(brevact.quantizer(DitherBackward4bit))
#: Losses of a mean, the logarithm of a scale, and a target, which divide by exponentials.
RATIOS = {
    "gaussian_nll_loss": lambda mean, log, y: F.gaussian_nll_loss(mean, y, (2 * log).exp()),
    "Normal": lambda mean, log, y: -Normal(mean, log.exp()).log_prob(y).mean(),
    "Normal of softplus": lambda mean, log, y: -Normal(mean, F.softplus(log) + 1e-3).log_prob(y).mean(),
    "Laplace": lambda mean, log, y: -Laplace(mean, log.exp()).log_prob(y).mean(),
    "LogNormal": lambda mean, log, y: -LogNormal(mean, log.exp()).log_prob(y.exp()).mean(),
    "Gamma": lambda mean, log, y: -Gamma(mean.exp(), log.exp()).log_prob(y.exp()).mean(),
    "KL": lambda mean, log, y: kl_divergence(Normal(mean, log.exp()), Normal(y, (0.5 * y).exp())).mean(),
    "sum with a number": lambda mean, log, y: ((y - mean).abs() / (2 * log.exp() + 1e-3)).mean(),
}
#: Forms without a division: of all, but where there is another.
PRODUCT = lambda mean, log, y: (0.5 * ((y - mean) * (-log).exp()) ** 2 + log).mean()  # noqa: E731
PRODUCTS = {
    "KL": lambda mean, log, y: (0.5 * ((2 * log - y).exp() + ((mean - y) * (-0.5 * y).exp()) ** 2) - log).mean(),
}


@pytest.mark.parametrize(("spread", "columns"), [(0.2, 32), (1.0, 32), (1.0, 64)])
@pytest.mark.parametrize("name", RATIOS)
def test_ratios_have_no_more_noise_than_twice_that_of_products(name, spread, columns):
    """The median of nine batches: a few large elements decide the error of one."""

    def gradients(loss, seed: int, chosen=None, batch: int = 0) -> Outcome:
        torch.manual_seed(batch)
        mean, y, log = (torch.randn(128, columns) for _ in range(3))
        leaves = [x.requires_grad_() for x in (mean, spread * log)]
        torch.manual_seed(seed)
        with region(chosen):
            out = loss(leaves[0] * 1, leaves[1] * 1, y)
        return Outcome([], list(torch.autograd.grad(out, leaves)), 1.0)

    def noise(loss) -> float:
        errors = []
        for batch in range(9):
            packed, plain = (torch.cat(gradients(loss, batch, chosen, batch).grads) for chosen in (FOUR, None))
            errors.append(float((packed - plain).norm() / plain.norm()))
        return statistics.median(errors)

    assert noise(RATIOS[name]) <= 2 * noise(PRODUCTS.get(name, PRODUCT))
    plain = gradients(RATIOS[name], 0)
    assert bias_of(lambda seed: gradients(RATIOS[name], seed, FOUR), plain, [None, None]) == 0.0


TARGET = (torch.arange(4096) % 3 == 0).float().view(64, 64)


@pytest.mark.parametrize(
    ("given_up", "op", "function"),
    [
        (True, torch.exp, lambda y: y.log()),
        (True, torch.exp, lambda y: (0.5 + y * 2).log()),
        (False, torch.exp, lambda y: (y + 1e6).log()),
        (False, torch.exp, lambda y: (y * 1e-30).log()),
        (False, torch.exp, lambda y: y * 3),
        (True, torch.sigmoid, lambda y: F.binary_cross_entropy(y, TARGET)),
        (True, torch.sigmoid, lambda y: y.sqrt()),
        (True, torch.sigmoid, lambda y: (y * TARGET + (1 - y) * (1 - TARGET)).clamp(min=1e-6).log()),
        (True, torch.sigmoid, lambda y: (y / y.sum(-1, keepdim=True)).log()),
        (True, torch.tanh, lambda y: (1 - y.pow(2) + 1e-6).log()),
        (False, torch.tanh, lambda y: y * 3),
    ],
)
def test_what_is_packed_is_given_up_for_what_is_kept_exactly(given_up, op, function):
    torch.manual_seed(0)
    x = torch.randn(64, 64).mul_(1 if op is torch.exp else 3).requires_grad_()
    grads = []
    for chosen in (None, settings(bit_width=4)):
        with region(chosen):
            y = op(x * 1)
            out = function(y).sum() + y.sum()
        grads.append(torch.autograd.grad(out, x)[0])
    assert ((grads[1] - grads[0]).norm() < 1e-5 * grads[0].norm()) == given_up
