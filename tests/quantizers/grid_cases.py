"""Tensors, divisions into groups and grids for the tests of kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

from brevact.geometry import Geometry, Grid

SPECIAL = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, -1e-40)


def buckets(numel: int, bit_width: int, bucket_size: int, block_size: int = 512) -> Geometry:
    """Groups of consecutive elements; the last may be short."""
    return Geometry(numel, bit_width, block_size, bucket_size, -(-numel // bucket_size), True)


def random_grid(size: int, *, has_bounds: bool = False, marks: bool = False) -> Grid:
    """Random ascending levels, some equal or closer than normal numbers; with marks, they end in NaN."""
    levels = torch.randn(1, size) * 2
    levels[:, 4:6] = levels[:, 3:4]
    levels[:, 1:3] = torch.tensor([0.0, 1e-39])[: size - 1]
    levels = levels.sort(1).values
    bounds = torch.randn(len(levels), size - 1).sort(1).values * 2 if has_bounds else None
    if marks:
        levels[:, -1] = float("nan")
    return Grid(levels, bounds, marks=marks)


def values_around(grid: Grid, numel: int, dtype: torch.dtype) -> Tensor:
    """Random values, some of them on levels, at bounds, and special."""
    targets = torch.cat((grid.levels.flatten(), grid.steps(stochastic=False).flatten())).nan_to_num()
    x = torch.randn(numel) * 2
    hits = torch.rand(numel) < 0.2
    x[hits] = targets[torch.randint(len(targets), (int(hits.sum()),))]
    info = torch.finfo(dtype)
    special = torch.tensor([*SPECIAL, info.max, info.min, info.tiny], dtype=torch.float64)
    x = x.to(torch.float64)
    hits = torch.rand(numel) < 0.03
    x[hits] = special[torch.randint(len(special), (int(hits.sum()),))]
    return x.to(dtype)


@dataclasses.dataclass(frozen=True)
class GridCase:
    x: Tensor
    geometry: Geometry
    grid: Grid
    seed: int | None
    multiply: bool


@st.composite
def grid_cases(draw: Callable, dtypes: tuple[torch.dtype, ...], most: int) -> GridCase:
    bit_width, block_size = draw(st.integers(1, 10)), draw(st.sampled_from([512, 512, 64, 1024]))
    geometry = buckets(draw(st.integers(1, most)), bit_width, 512, block_size)
    torch.manual_seed(draw(st.integers(0, 2**32)))
    size = draw(st.one_of(st.just(1 << bit_width), st.integers(2, 1 << bit_width)))
    grid = random_grid(size, has_bounds=draw(st.booleans()), marks=draw(st.booleans()))
    x = values_around(grid, geometry.numel, draw(st.sampled_from(dtypes)))
    seed = draw(st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)))
    return GridCase(x, geometry, grid, seed, draw(st.booleans()))
