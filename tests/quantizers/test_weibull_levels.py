"""The table of levels: stationary, of least variance, equal to its script's, and fine enough."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import gamma, gammaincc

from brevact.quantizers.formats import weibull_levels as levels
from brevact.quantizers.formats.weibull_levels import SIDES, level_columns, level_table, read_file, sides
from scripts import weibull_table

K = weibull_table.shapes(levels.SHAPE_NODES)
END = weibull_table.ends(K, levels.END_NODES)
MEAN = gamma(1 + 1 / K)[:, None]
FINE_K = weibull_table.shapes(levels.SHAPES)
every_side = pytest.mark.parametrize(("zero", "m"), [side for side in SIDES if side[1]])


def _stored(zero: bool, m: int) -> np.ndarray:
    """Levels in units of the scale, (shapes, ends, m)."""
    columns = 1 + len(SIDES) + np.array(level_columns(SIDES)[zero, m])
    return read_file()[1].numpy()[:, :, columns] * MEAN[..., None]


def _gradient(s: np.ndarray, zero: bool) -> np.ndarray:
    """Equation 2 of TinyScript at every level, by upper incomplete gamma functions."""
    k, end = K[:, None, None], END[..., None]
    upper = lambda x: gamma(1 + 1 / k) * gammaincc(1 + 1 / k, x**k)  # noqa: E731
    before = np.concatenate([np.zeros_like(end), s[..., :-1]], -1)
    after = np.concatenate([s[..., 1:], end], -1)
    result = upper(before) - upper(after) + after * np.exp(-(after**k)) - before * np.exp(-(before**k))
    result -= (after - before) * np.exp(-(s**k))
    if not zero:  # the interval around zero: d/da of the integral of (a^2 - x^2) p from 0 to a
        a, b = s[..., :1], after[..., :1]
        right = upper(a) - upper(b) + b * np.exp(-(b**k)) - a * np.exp(-(a**k)) - (b - a) * np.exp(-(a**k))
        result[..., :1] = right + 2 * a * -np.expm1(-(a**k))
    return result


@every_side
def test_stored_levels_are_stationary(zero: bool, m: int):
    """Equation 2 is 0 but for the rounding of the levels to float32, and 1e-12 of its largest terms."""
    s = _stored(zero, m)
    slopes = np.abs(weibull_table.jacobian(s, K[:, None, None], END[..., None], zero))
    rounding = (slopes * s[..., None, :]).sum(-1) * 2.0**-24
    assert (np.abs(_gradient(s, zero)) <= 1.01 * rounding + 1e-12 * MEAN[..., None]).all()


@pytest.mark.parametrize(("k", "levels"), [(0.5, [0.0, 0.3, 2.0, 40.0]), (1.0, [-0.4, 0.4, 3.0]), (2.5, [0.0, 1.6])])
def test_variance_is_the_integral(k: float, levels: list[float]):
    def integrand(x: float) -> float:
        i = np.clip(np.searchsorted(levels, x, side="right") - 1, 0, len(levels) - 2)
        return k * x ** (k - 1) * np.exp(-(x**k)) * (levels[i + 1] - x) * (x - levels[i])

    cuts = [max(level, 0.0) for level in levels]
    pieces = [quad(integrand, a, b, epsrel=1e-10, limit=200)[0] for a, b in itertools.pairwise(cuts) if a < b]
    expected = float(weibull_table.variance(np.array(levels), np.array(k)))
    assert expected == pytest.approx(sum(pieces), rel=1e-7)


def test_the_script_computes_what_is_stored():
    """To a unit in the last place: library versions differ in the last bits of float64."""
    bounds, stored = read_file()
    chosen = [0, 13, levels.SHAPE_NODES - 1]
    np.testing.assert_allclose(weibull_table.nodes(K[chosen], levels.END_NODES), stored[chosen], rtol=2.0**-23)
    np.testing.assert_allclose(weibull_table.shape_bounds(levels.SHAPES), bounds, rtol=2.0**-23)


@pytest.mark.parametrize(
    ("count", "zero", "m"), [(4, True, 1), (4, False, 1), (8, True, 6), (16, False, 7), (16, True, 14)]
)
def test_look_up_costs_less_than_a_thousandth_of_the_variance(count: int, zero: bool, m: int):
    rng = np.random.default_rng(0)
    k = np.exp(rng.uniform(np.log(0.25), np.log(3.5), 300))
    mean, ratio = gamma(1 + 1 / k), weibull_table.square_ratio(k)
    end = rng.uniform(1.1 * (ratio * mean) ** k, 16.0) ** (1 / k)
    table = level_table(count, torch.device("cpu"))
    rows = table.rows(torch.from_numpy(ratio), torch.from_numpy(end / mean))
    found = table.levels[rows][:, list(level_columns(sides(count))[zero, m])].double().numpy() * mean[:, None]

    def variance(levels: np.ndarray) -> np.ndarray:
        first = np.zeros((len(k), 1)) if zero else -levels[:, :1]
        return weibull_table.variance(np.concatenate([first, np.minimum(levels, end[:, None]), end[:, None]], 1), k)

    loss = variance(found) / variance(weibull_table.solve(k, end, m, zero)) - 1
    assert loss.mean() < 1e-3 and loss.min() > -1e-6
