"""Tables of the levels of least variance for Weibull distributions; `scripts/weibull_table.py` computes them.

The file beside this module holds little-endian float32: E[x^2] / E[x]^2 at the `SHAPES - 1` bounds between shapes, then
nodes of `SHAPE_NODES` shapes k by `END_NODES` largest values M by these columns: M, the expected variance for each of
`SIDES`, the levels between 0 and M of each of `SIDES`. Unit is the mean of the distribution.

A side has m levels between 0 and M; `zero`: 0 is one beside them; otherwise the interval around zero
reaches from the first level of one side to that of the other.

Weibull distributions fitted to the moments of buckets, and the variance and levels that they make one expect.

Shapes: G buckets, N levels, 4 kinds of magnitudes: distances from the middle of values below it and above it, then of
values from the maximum and from the minimum. The middle is zero, or the end of the bucket that is closest to it.
Arithmetic is float64 with one rounding an operation, and tables, so that every device chooses the same.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files

import torch
from torch import Tensor

from brevact.private_names.of_torch import DisableFuncTorch, disable_modes

SHAPE_NODES, END_NODES = 33, 9
SHAPE_STEPS, END_STEPS = 4, 8
SHAPES = (SHAPE_NODES - 1) * SHAPE_STEPS + 1

SIDES = (*((True, m) for m in range(15)), *((False, m) for m in (1, 3, 7)))
"""(zero, m) of the sides in the file."""

FILE = "weibull_levels.bin"


@dataclass(frozen=True, eq=False)
class LevelTable:
    """A quantizer's N levels: for each row, which is shape * ENDS + end, and each of its sides.

    ENDS is (END_NODES - 1) * END_STEPS + 1.

    Args:
        shape_bounds: (SHAPES - 1,) float64 bounds of E[x^2] / E[x]^2 between shapes, ascending.
        end_bounds: (SHAPES * (ENDS - 1),) float64 bounds of shape + M / (M + 1) between ends, ascending.
        costs: (rows, N) float64 expected variances of the sides.
        levels: (rows, columns) float32 levels of the sides, one side after the other; the last column is 0.
    """

    shape_bounds: Tensor
    end_bounds: Tensor
    costs: Tensor
    levels: Tensor

    def rows(self, square_ratio: Tensor, end: Tensor) -> Tensor:
        """int64 rows of the closest shape, by E[x^2] / E[x]^2, and end, by the largest value in units of the mean."""
        shape = torch.bucketize(square_ratio, self.shape_bounds)
        return torch.bucketize(shape + end / (end + 1.0), self.end_bounds) + shape


@contextlib.contextmanager
def constants() -> Iterator[None]:
    """Make tensors that any later call may use: plain ones, whatever mode or transform the present call is under."""
    with torch.inference_mode(False), disable_modes(), DisableFuncTorch():
        yield


def sides(count: int) -> tuple[tuple[bool, int], ...]:
    """Sides (zero, m) of 4, 8 or 16 levels: with zero and 0 to N - 3 levels; without and N / 2 - 1; with and N - 2."""
    return (*((True, m) for m in range(count - 2)), (False, count // 2 - 1), (True, count - 2))


def level_columns(chosen: tuple[tuple[bool, int], ...]) -> dict[tuple[bool, int], range]:
    """Columns of the levels of each side where sides lie one after the other."""
    result, start = {}, 0
    for side in chosen:
        result[side] = range(start, start + side[1])
        start += side[1]
    return result


@functools.lru_cache(maxsize=64)
def level_table(count: int, device: torch.device) -> LevelTable:
    """The table of 4, 8 or 16 levels, interpolated between the nodes of the file; equal arguments share one."""
    with constants():
        shape_bounds, nodes = read_file()
        known, columns = level_columns(SIDES), [0, *(1 + SIDES.index(side) for side in sides(count))]
        first_level = 1 + len(SIDES)
        for side in sides(count):
            columns += [first_level + column for column in known[side]]
        fine = _refine(_refine(nodes[:, :, columns], SHAPE_STEPS).transpose(0, 1), END_STEPS).transpose(0, 1)
        end, costs, levels = fine.split((1, count, len(columns) - count - 1), 2)
        between = (end[:, 1:, 0] + end[:, :-1, 0]) * 0.5
        shape = torch.arange(SHAPES, dtype=torch.float64, device="cpu")[:, None]
        return LevelTable(
            shape_bounds.to(device),
            (shape + between / (between + 1.0)).flatten().to(device),
            costs.flatten(0, 1).to(device),
            torch.nn.functional.pad(levels.flatten(0, 1), (0, 1)).float().to(device),
        )


def read_file() -> tuple[Tensor, Tensor]:
    """The numbers of the file: (SHAPES - 1,) bounds and (SHAPE_NODES, END_NODES, columns) nodes, float64."""
    numbers = array("f", (files(__package__) / FILE).read_bytes())
    if sys.byteorder == "big":
        numbers.byteswap()
    values = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    return values[: SHAPES - 1], values[SHAPES - 1 :].view(SHAPE_NODES, END_NODES, -1)


def _refine(values: Tensor, steps: int) -> Tensor:
    """Put steps - 1 points between neighbours by Catmull and Rom's cubic, with exact weights for a power of two."""
    first, last = values[:3], values[-3:].flip(0)
    beyond = [(end[:1] - end[1:2]) * 3.0 + end[2:] for end in (first, last)]
    padded = torch.cat((beyond[0], values, beyond[1]))
    t = (torch.arange(steps, dtype=torch.float64, device="cpu") / steps).view(1, -1, *(1,) * (values.dim() - 1))
    weights = (
        ((2.0 - t) * t - 1.0) * t * 0.5,
        ((3.0 * t - 5.0) * t * t + 2.0) * 0.5,
        ((4.0 - 3.0 * t) * t + 1.0) * t * 0.5,
        (t - 1.0) * t * t * 0.5,
    )
    fine = torch.zeros((), dtype=torch.float64, device="cpu")
    for i, weight in enumerate(weights):
        fine = fine + padded[i : len(values) - 1 + i, None] * weight
    return torch.cat((fine.flatten(0, 1), values[-1:]))


UNITS = 65535.0
"""Units in which distances from the middle count: the largest is this."""


@dataclass(frozen=True, eq=False)
class SideFits:
    """Weibull distributions fitted to the magnitudes of each bucket, and the expected errors of their sets of levels.

    There are N + 1 sets of N levels, all with the minimum and the maximum. Sets 0 to N - 3 have the middle, so many
    levels above it and the rest below it; N - 2 has levels on both sides alone; N - 1 hangs from the maximum, N stands
    on the minimum.

    Args:
        count: N.
        table: Levels and variances by rows.
        rows_4G: Rows of the table.
        mean_4G: Mean magnitude, in units; 0 where there are none.
        first_4G: Sum of magnitudes.
        second_4G: Their sum of squares.
        reach_4G: The largest.
        zeros: (G,) number of elements that equal the middle.
    """

    count: int
    table: LevelTable
    rows_4G: Tensor
    mean_4G: Tensor
    first_4G: Tensor
    second_4G: Tensor
    reach_4G: Tensor
    zeros: Tensor

    @staticmethod
    def of(sums_G6: Tensor, below: Tensor, above: Tensor, size: Tensor, count: int) -> SideFits:
        """Fit distributions to (G, 6) float64 moments, those of the values below the middle, then of those above it.

        Each are number, sum and sum of squares in units, of buckets of a (G,) size whose minimum and maximum are (G,)
        distances below and above the middle.

        Source: TinyScript, ICML 2020, algorithm 1.
        """
        table = level_table(count, sums_G6.device)
        number_4G, first_4G, second_4G, reach_4G = _magnitudes(sums_G6, below, above, size)
        mean_4G = first_4G / number_4G.clamp(min=1.0)
        square_ratio = second_4G * number_4G / (first_4G * first_4G).clamp(min=1.0)
        rows_4G = table.rows(square_ratio, reach_4G / mean_4G.clamp(min=1.0 / UNITS))
        zeros = size - number_4G[0] - number_4G[1]
        return SideFits(count, table, rows_4G, mean_4G, first_4G, second_4G, reach_4G, zeros)

    def variances(self) -> Tensor:
        """(G, N + 1) float64 variance that is expected of each set, summed over the bucket, in squared units.

        It is infinite for impossible sets, as those without zero where an element is 0 and others have both signs.
        """
        costs_4GN = self.table.costs[self.rows_4G] * (self.first_4G * self.mean_4G)[..., None]
        costs_4GN[..., 0] = self.reach_4G * self.first_4G - self.second_4G  # known: nothing lies between 0 and the end
        middles = self.count - 2
        split = costs_4GN[0, :, :middles].flip(1) + costs_4GN[1, :, :middles]
        column = level_columns(sides(self.count))[False, middles // 2][0]
        nearest = self.table.levels[:, column][self.rows_4G[:2]].double() * self.mean_4G[:2]
        no_zero = costs_4GN[0, :, -2] + costs_4GN[1, :, -2] + self.zeros * nearest[0] * nearest[1]
        one_sided = costs_4GN[2:, :, -1]
        is_between = (self.zeros > 0) & (self.reach_4G[:2] > 0).all(0)
        no_zero, one_sided = no_zero.masked_fill(is_between, torch.inf), one_sided.masked_fill(is_between, torch.inf)
        return torch.cat((split, no_zero[:, None], one_sided.t()), 1)

    def levels(self, chosen: Tensor) -> Tensor:
        """(G, N - 2) float64 ascending distances in units of levels between the ends, of the (G,) sets chosen.

        They count from the middle, for set N - 1 from the maximum, for N from the minimum.
        """
        kinds_2G = torch.where(chosen >= self.count - 1, 2, 0) + torch.arange(2, device=chosen.device)[:, None]
        starts_2G = self.rows_4G.gather(0, kinds_2G) * self.table.levels.shape[1]
        columns_2GN = starts_2G[..., None] + _columns(self.count, chosen.device)[:, chosen]
        levels_2GN = self.table.levels.view(-1)[columns_2GN].double() * self.mean_4G.gather(0, kinds_2G)[..., None]
        return levels_2GN[1] - levels_2GN[0]


def _magnitudes(sums_G6: Tensor, below: Tensor, above: Tensor, size: Tensor) -> tuple[Tensor, ...]:
    """(4, G) number, sum, sum of squares and largest value, without elements at the middle if that is an end."""
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
