"""Exact zeros in saved tensors: a gradient of zero stays zero, whatever its factor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from brevact import DitherBackward8bit, StochBackward2bit, StochBackward4bit
from brevact.policy.files import LEAVES

FAR = 1e10
"""Distance between the last sample of a ray and the next one, as NeRFs have it."""

#: Formats whose levels are too far apart for distances of 0.08 beside `FAR`: block means in float16, and magnitudes in
#: quarters of the largest.
COARSE = ("DualPrecision", "SignMagnitude")


def _distances(samples: int, rays: int = 256) -> Tensor:
    return torch.cat([torch.full((rays, samples - 1), 0.08), torch.full((rays, 1), FAR)], 1)


def _gradient_of_transmittance(density: Tensor) -> Tensor:
    density = density.clone().requires_grad_()
    (1 - torch.exp(-(density * 1.0) * _distances(density.shape[1]))).sum().backward()
    return density.grad


@pytest.mark.parametrize("name", [*sorted(LEAVES), "DEFAULT"])
def test_transmittance_of_a_ray_has_no_gradient_from_its_last_sample(name: str):
    """exp(-1e10 density) is 0, and its gradient 0 times 1e10; the others are off by the rounding of values up to 1."""
    torch.manual_seed(0)
    density = torch.rand(256, 48)
    expected = _gradient_of_transmittance(density)
    for seed in range(3):
        torch.manual_seed(seed)
        with brevact.backward_quant(brevact.DEFAULT if name == "DEFAULT" else LEAVES[name]):
            found = _gradient_of_transmittance(density)
        assert (found[:, -1] == 0).all()
        if not name.startswith(COARSE):
            assert (found - expected).norm() <= 0.3 * expected.norm()


class _DensityHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(21, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, positions: Tensor) -> Tensor:
        waves = [f(positions * 2**k) for k in range(3) for f in (torch.sin, torch.cos)]
        density = F.relu(10 * self.body(torch.cat([positions, *waves], -1))[..., 0] + 2)
        alpha = 1 - torch.exp(-density * _distances(density.shape[1], len(density)))
        clear = torch.cumprod(torch.cat([torch.ones(len(density), 1), 1 - alpha + 1e-10], 1), 1)
        return alpha * clear[:, :-1]


def test_mean_gradient_of_a_nerfs_density_at_default_is_exact():
    torch.manual_seed(0)
    model, positions = _DensityHead(), torch.randn(200, 24, 3)  # exp has more than min_numel elements
    depth = torch.linspace(0, 1, 24)

    def gradient() -> Tensor:
        loss = (model(positions) * depth).sum(1).square().mean()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).double()

    exact, draws = gradient(), 60
    found = []
    for seed in range(draws):
        torch.manual_seed(seed)
        with brevact.backward_quant():
            found.append(gradient())
    mean, deviation = torch.stack(found).mean(0), torch.stack(found).std(0)
    assert 1e-3 * exact.norm() < deviation.norm() < exact.norm()
    assert ((mean - exact).abs() <= 5 * deviation / draws**0.5 + 1e-5 * exact.abs().max()).all()


def _masked(x: Tensor) -> Tensor:
    """Probabilities of attention behind a mask of the lowest float."""
    return F.softmax(x.masked_fill(x < -0.5, torch.finfo(x.dtype).min), -1)


#: Functions that reach 0, or a gradient of 0, exactly.
ENDS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda x: torch.exp(-200 * x.abs()),
    "expm1": lambda x: torch.expm1(20 * x),
    "exp2": lambda x: torch.exp2(-300 * x.abs()),
    "masked softmax": _masked,
    "masked by a sum": lambda x: F.softmax(x + (x < -0.5) * -1e9, -1),
    "relu": F.relu,
    "hardsigmoid": lambda x: F.hardsigmoid(3 * x),
    "hardtanh": lambda x: F.hardtanh(x, 0.0, 1.0),
    "relu6": F.relu6,
    "dropout": lambda x: F.dropout(x, 0.5),
    "masked": lambda x: x.masked_fill(x > 0, 0.0),
    "where": lambda x: torch.where(x > 0.3, x, 0.0),
    "padding": lambda x: F.pad(x, (2, 2)),
    "softshrink": F.softshrink,
    "tril": torch.tril,
    "norm of zeros": lambda x: F.normalize(x.masked_fill(torch.arange(len(x))[:, None] % 4 == 0, 0.0), dim=-1),
}
#: Sources of the function's input: a plain tensor, or an op from whose result functions derive.
BEFORE: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x * 1.0,
    "batch norm": lambda x: F.batch_norm(x, None, None, torch.ones(256), torch.zeros(256), training=True),
    "layer norm": lambda x: F.layer_norm(x, (256,)),
}


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("source", [None, DitherBackward8bit, StochBackward4bit, StochBackward2bit])
def test_a_factor_of_zero_leaves_no_gradient(before: str, source: type | None):
    """The other factor of the product has the gradient zero times a huge number."""
    for name, function in ENDS.items():
        torch.manual_seed(3)
        x = torch.randn(64, 256).requires_grad_()
        with brevact.backward_quant() if source is None else brevact.backward_quant(source):
            factor = function(BEFORE[before](x))
            other = torch.ones_like(factor).requires_grad_()
            product = factor * other
        is_zero = factor.detach() == 0
        (found,) = torch.autograd.grad(product, other, torch.where(is_zero, FAR, 1.0))
        assert name == "expm1" or is_zero.any(), name
        assert (found[is_zero] == 0).all(), name


@pytest.mark.parametrize("source", [DitherBackward8bit, StochBackward4bit, StochBackward2bit])
def test_a_slope_of_zero_leaves_no_gradient(source: type):
    """Elementwise functions whose slope reaches 0 in float32, by saved tensor."""
    for name in ("exp", "expm1", "exp2", "relu", "hardsigmoid", "hardtanh", "relu6", "masked", "where", "softshrink"):
        torch.manual_seed(3)
        x = torch.randn(64, 256).masked_fill(torch.rand(64, 256) < 0.01, 0.0)
        gradients = []
        for region in (None, source):
            leaf = x.clone().requires_grad_()
            if region is None:
                out = ENDS[name](leaf * 1.0)
                (slope,) = torch.autograd.grad(out, leaf, torch.ones_like(out), retain_graph=True)
            else:
                with brevact.backward_quant(region):
                    out = ENDS[name](leaf * 1.0)
            gradients += torch.autograd.grad(out, leaf, torch.where(slope == 0, FAR, 1.0))
        assert (slope == 0).any(), name
        assert (gradients[1][slope == 0] == 0).all(), name
