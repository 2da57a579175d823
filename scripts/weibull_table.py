"""Compute `brevact/quantizers/formats/weibull_levels.bin`, the levels of least variance for Weibull distributions.

    python -m scripts.weibull_table

Needs scipy, which comes with scikit-learn of the `test` extra. Stochastic rounding between neighbouring levels a <= x
<= b has variance (b - x)(x - a). For one side of a double Weibull distribution with survival function S(x) = exp(-x^k)
(scale 1), the m levels between 0 and the largest value M that minimize its expectation satisfy

    h_t = (s_{t+1} - s_{t-1}) S(s_t) - integral of S from s_{t-1} to s_{t+1} = 0,   s_0 = 0, s_{m+1} = M,

which is equation 2 of TinyScript with the opposite sign: the integral of S from 0 to x is Gamma(1 + 1/k) P(1/k, x^k), P
the regularized incomplete gamma function. The stationary point is unique (theorem 1). Levels `without zero` belong to
both sides together: the interval around zero ends at -s_1 and s_1, and h_1 becomes

    (s_2 - s_1) S(s_1) - integral of S from s_1 to s_2 - 2 s_1 (1 - S(s_1)).

Source: TinyScript, ICML 2020, sections 3.2 and 3.3, algorithms 1 and 2. Differs: M is a parameter of the table, since
the largest value is known and is a level (the paper assumes 3 standard deviations and appends the largest value);
shapes up to 4 serve sides with lighter tails than an exponential distribution; levels without zero.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from scipy.special import gamma, gammainc

from brevact.quantizers.formats import weibull_levels as layout

Array = np.ndarray
LARGEST_SHAPE, SMALLEST_SHAPE = 4.0, 0.1
LARGEST_END = 24.0
"""Of (M / scale)^k: beyond M lies a share of exp(-24)."""


def shapes(count: int) -> Array:
    """Shapes k in geometric steps, the shortest tail first.

    Args:
        count: how many.

    Returns:
        (count,) float64, from 4 to 0.1.
    """
    return np.geomspace(LARGEST_SHAPE, SMALLEST_SHAPE, count)


def square_ratio(k: Array) -> Array:
    """E[x^2] / E[x]^2 = 1 + CV^2 = Gamma(1 + 2/k) / Gamma(1 + 1/k)^2."""
    return gamma(1 + 2 / k) / gamma(1 + 1 / k) ** 2


def ends(k: Array, count: int) -> Array:
    """Largest values M in units of the scale, so that M^k grows in geometric steps to 24.

    The smallest is E[x^2] / E[x]: the mean of squares of any values is at most their mean times the largest.

    Args:
        k: (K,) shapes.
        count: how many for each.

    Returns:
        (K, count) float64.
    """
    first = (square_ratio(k) * gamma(1 + 1 / k)) ** k
    return np.geomspace(first, LARGEST_END, count, axis=-1) ** (1 / k[:, None])


def survival(x: Array, k: Array) -> Array:
    """S(x) = exp(-x^k)."""
    return np.exp(-(x**k))


def integral(x: Array, k: Array) -> Array:
    """Integral of S from 0 to x."""
    return gamma(1 + 1 / k) * gammainc(1 / k, x**k)


def stationarity(s: Array, k: Array, end: Array, zero: bool) -> Array:
    """h of the module's docstring: the negative gradient of the variance, 0 at the levels sought.

    Args:
        s: (..., m) ascending levels.
        k: (..., 1) shapes.
        end: (..., 1) largest values M.
        zero: whether 0 is a level.

    Returns:
        (..., m) residuals.
    """
    before = np.concatenate([np.zeros_like(end), s[..., :-1]], -1)
    after = np.concatenate([s[..., 1:], end], -1)
    h = (after - before) * survival(s, k) - (integral(after, k) - integral(before, k))
    if not zero:
        a, b = s[..., :1], after[..., :1]
        first = (b - a) * survival(a, k) - (integral(b, k) - integral(a, k)) - 2 * a * -np.expm1(-(a**k))
        h = np.concatenate([first, h[..., 1:]], -1)
    return h


def jacobian(s: Array, k: Array, end: Array, zero: bool) -> Array:
    """Derivatives of `stationarity`, (..., m, m), with three diagonals set."""
    m = s.shape[-1]
    before = np.concatenate([np.zeros_like(end), s[..., :-1]], -1)
    after = np.concatenate([s[..., 1:], end], -1)
    density = k * s ** (k - 1) * survival(s, k)
    here = -(after - before) * density
    if not zero:
        a, b = s[..., :1], after[..., :1]
        here = np.concatenate([-(b + a) * density[..., :1] + 2 * np.expm1(-(a**k)), here[..., 1:]], -1)
    beside = survival(s[..., :-1], k) - survival(s[..., 1:], k)
    matrix, t = np.zeros((*s.shape, m)), np.arange(m)
    matrix[..., t, t], matrix[..., t[:-1], t[1:]], matrix[..., t[1:], t[:-1]] = here, beside, beside
    return matrix


def solve(k: Array, end: Array, m: int, zero: bool) -> Array:
    """Levels of least variance.

    Starts from sweeps that put every other level where it belongs between its neighbours (S(s_t) is the mean of S
    between them), then Newton's method in the logarithms of the levels.

    Args:
        k: (...) shapes.
        end: (...) largest values M.
        m: number of levels between 0 and M.
        zero: whether 0 is a level.

    Returns:
        (..., m) float64, ascending, in units of the scale.

    Raises:
        RuntimeError: if Newton's method does not converge.
    """
    k, end = np.asarray(k, float)[..., None], np.asarray(end, float)[..., None]
    if m == 0:
        return np.zeros((*k.shape[:-1], 0))
    s = end * (np.arange(1, m + 1) / (m + 1)) ** (1 + 2 / k)
    for sweep in range(120):
        before = np.concatenate([np.zeros_like(end), s[..., :-1]], -1)
        after = np.concatenate([s[..., 1:], end], -1)
        mean = (integral(after, k) - integral(before, k)) / (after - before)
        s = np.where(np.arange(m) % 2 == sweep % 2, (-np.log(mean)) ** (1 / k), s)
    for _ in range(100):
        h = stationarity(s, k, end, zero)
        step = -np.linalg.solve(jacobian(s, k, end, zero) * s[..., None, :], h[..., None])[..., 0]
        largest = np.abs(step).max(-1, keepdims=True)
        s = s * np.exp(step * np.minimum(1.0, 0.5 / np.maximum(largest, 1e-300)))
        if largest.max() < 1e-12:
            return s
    raise RuntimeError(f"no convergence for m={m}, zero={zero}: steps of {largest.max()}")


def variance(levels: Array, k: Array) -> Array:
    """Expected variance of stochastic rounding between levels.

    Args:
        levels: (..., n) ascending levels; a negative first one counts from 0 on.
        k: (...) shapes.

    Returns:
        (...) float64, in units of the squared scale; values above the last level count for nothing.
    """
    k = np.asarray(k, float)[..., None]
    x = np.maximum(levels, 0.0)
    moments = [gamma(1 + j / k) * gammainc(1 + j / k, x**k) for j in range(3)]
    zeroth, first, second = (np.diff(moment, axis=-1) for moment in moments)
    a, b = levels[..., :-1], levels[..., 1:]
    return ((a + b) * first - a * b * zeroth - second).sum(-1)


def nodes(k: Array, end_count: int) -> Array:
    """The table: for each shape and end the columns that `levels` of the format names, in units of the mean.

    Args:
        k: (K,) shapes.
        end_count: number of ends of each.

    Returns:
        (K, end_count, columns) float64.
    """
    end = ends(k, end_count)
    k = np.broadcast_to(k[:, None], end.shape)
    mean = gamma(1 + 1 / k)
    costs, levels = [], []
    for zero, m in layout.SIDES:
        s = solve(k, end, m, zero)
        first = np.zeros((*k.shape, 1)) if zero else -s[..., :1]
        costs.append(variance(np.concatenate([first, s, end[..., None]], -1), k) / mean**2)
        levels.append(s / mean[..., None])
    return np.concatenate([(end / mean)[..., None], np.stack(costs, -1), *levels], -1)


def shape_bounds(count: int) -> Array:
    """E[x^2] / E[x]^2 half-way between the coefficients of variation of neighbouring shapes, ascending.

    Args:
        count: number of shapes.

    Returns:
        (count - 1,) float64.
    """
    variation = np.sqrt(square_ratio(shapes(count)) - 1)
    return 1 + ((variation[1:] + variation[:-1]) / 2) ** 2


def main() -> None:
    table = nodes(shapes(layout.SHAPE_NODES), layout.END_NODES)
    values = np.concatenate([shape_bounds(layout.SHAPES), table.reshape(-1)])
    path = Path(layout.__file__).with_name(layout.FILE)
    path.write_bytes(values.astype("<f4").tobytes())
    print(f"{path}: {values.size} numbers")


if __name__ == "__main__":
    main()
