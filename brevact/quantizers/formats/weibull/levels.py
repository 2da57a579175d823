"""Tables of the levels of least variance for Weibull distributions; `scripts/weibull_table.py` computes them.

The file beside this module holds little-endian float32: E[x^2] / E[x]^2 at the `SHAPES - 1` bounds between shapes, then
nodes of `SHAPE_NODES` shapes k by `END_NODES` largest values M by these columns: M, the expected variance for each of
`SIDES`, the levels between 0 and M of each of `SIDES`. Unit is the mean of the distribution.

A side has m levels between 0 and M; `zero`: 0 is one beside them; otherwise the interval around zero
reaches from the first level of one side to that of the other.
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

LARGEST_SHAPE, SMALLEST_SHAPE = 4.0, 0.1
LARGEST_END = 24.0
"""Of (M / scale)^k: beyond M lies a share of exp(-24)."""

SHAPE_NODES, END_NODES = 33, 9
SHAPE_STEPS, END_STEPS = 4, 8
SHAPES = (SHAPE_NODES - 1) * SHAPE_STEPS + 1
ENDS = (END_NODES - 1) * END_STEPS + 1

SIDES = (*((True, m) for m in range(15)), *((False, m) for m in (1, 3, 7)))
"""(zero, m) of the sides in the file."""

FILE = "levels.bin"


@dataclass(frozen=True, eq=False)
class LevelTable:
    """A quantizer's N levels: for each row, which is shape * ENDS + end, and each of `sides(N)`.

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
