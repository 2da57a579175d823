"""Which levels a bucket gets: Weibull distributions fitted to its moments, and the set with least expected variance.

Shapes: G buckets, N levels, 4 kinds of magnitudes: distances from the middle of values below it and above it, then of
values from the maximum and from the minimum. The middle is zero, or the end of the bucket that is closest to it.
Arithmetic is float64 with one rounding an operation, and tables, so that every device chooses the same.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from brevact.quantizers.weibull_levels import LevelTable, constants, level_columns, level_table, sides

UNITS = 65535.0
"""Units in which distances from the middle count: the largest is this."""


def choose_levels(
    sums_G6: Tensor, below: Tensor, above: Tensor, size: Tensor, *, count: int, keep_zeros: bool
) -> tuple[Tensor, Tensor]:
    """The set of levels with the least expected variance.

    Sets 0 to N - 3 have the middle, so many levels above it and the rest below it; N - 2 has levels on both sides
    alone; N - 1 hangs from the maximum, N stands on the minimum.

    Source: TinyScript, ICML 2020, algorithms 1 and 2.

    Args:
        sums_G6: (G, 6) float64 moments in units: number, sum and sum of squares of the values below the middle, then of
            those above it.
        below: (G,) float64 distance of the minimum from the middle, in units.
        above: (G,) float64 distance of the maximum from the middle, in units.
        size: (G,) float64 numbers of elements.
        count: N.
        keep_zeros: Whether the middle has to be a level where it is zero.

    Returns:
        (G,) int64 sets and (G, N - 2) float64 levels between the minimum and the maximum, ascending, in units, as
        distances from the middle, for N - 1 from the maximum, for N from the minimum.
    """
    table = level_table(count, sums_G6.device)
    number_4G, first_4G, second_4G, reach_4G = _magnitudes(sums_G6, below, above, size)
    mean_4G = first_4G / number_4G.clamp(min=1.0)
    square_ratio = second_4G * number_4G / (first_4G * first_4G).clamp(min=1.0)
    rows_4G = table.rows(square_ratio, reach_4G / mean_4G.clamp(min=1.0 / UNITS))
    costs_4GN = table.costs[rows_4G] * (first_4G * mean_4G)[..., None]
    costs_4GN[..., 0] = reach_4G * first_4G - second_4G  # known: nothing lies between 0 and the end
    split = costs_4GN[0, :, : count - 2].flip(1) + costs_4GN[1, :, : count - 2]
    zeros = size - number_4G[0] - number_4G[1]
    no_zero = costs_4GN[0, :, -2] + costs_4GN[1, :, -2] + zeros * _around_zero(table, rows_4G, mean_4G, count)
    one_sided = costs_4GN[2:, :, -1]
    if keep_zeros:
        no_zero = torch.full_like(no_zero, torch.inf)
        one_sided = torch.where(torch.stack((above, below)) > 0, torch.inf, one_sided)
    chosen = torch.cat((split, no_zero[:, None], one_sided.t()), 1).argmin(1)
    kinds_2G = torch.where(chosen >= count - 1, 2, 0) + torch.arange(2, device=chosen.device)[:, None]
    starts_2G = rows_4G.gather(0, kinds_2G) * table.levels.shape[1]
    columns_2GN = starts_2G[..., None] + _columns(count, chosen.device)[:, chosen]
    levels_2GN = table.levels.view(-1)[columns_2GN].double() * mean_4G.gather(0, kinds_2G)[..., None]
    return chosen, levels_2GN[1] - levels_2GN[0]


def _magnitudes(sums_G6: Tensor, below: Tensor, above: Tensor, size: Tensor) -> tuple[Tensor, ...]:
    """Number, sum, sum of squares and largest value, (4, G) each; without what equals the middle if that is an end."""
    n_below, sum_below, square_below, n_above, sum_above, square_above = sums_G6.unbind(1)
    signed, square = sum_above - sum_below, square_below + square_above
    number = (n_below, n_above, torch.where(above > 0, size, n_below), torch.where(below > 0, size, n_above))
    first = (sum_below, sum_above, size * above - signed, size * below + signed)
    second = (
        square_below,
        square_above,
        square + above * (size * above - signed * 2.0),
        square + below * (size * below + signed * 2.0),
    )
    span = below + above
    number_4G, first_4G, second_4G = (torch.stack(parts).clamp(min=0.0) for parts in (number, first, second))
    return number_4G, first_4G, second_4G, torch.stack((below, above, span, span))


def _around_zero(table: LevelTable, rows_4G: Tensor, mean_4G: Tensor, count: int) -> Tensor:
    """Variance of a zero where zero is no level: the product of its distances from the two levels around it, (G,)."""
    column = level_columns(sides(count))[False, count // 2 - 1][0]
    nearest_2G = table.levels[:, column][rows_4G[:2]].double() * mean_4G[:2]
    return nearest_2G[0] * nearest_2G[1]


@functools.lru_cache(maxsize=64)
def _columns(count: int, device: torch.device) -> Tensor:
    """Columns of the level table for each set, (2, N + 1, N - 2): below where the set stands, and above it."""
    columns = level_columns(sides(count))
    zero, middles = sum(map(len, columns.values())), count - 2
    below, above = [], []
    for m in range(middles):
        rest = middles - 1 - m
        below.append([*reversed(columns[True, rest]), *[zero] * (m + 1)])
        above.append([*[zero] * (rest + 1), *columns[True, m]])
    half, whole = list(columns[False, middles // 2]), list(columns[True, middles])
    below += [[*reversed(half), *[zero] * len(half)], [*reversed(whole)], [zero] * middles]
    above += [[*[zero] * len(half), *half], [zero] * middles, whole]
    with constants():
        return torch.tensor([below, above], device="cpu").to(device)
