"""Launches: a kernel with its arguments, its constants and its grid, to be run, or compiled without a GPU."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from brevact.geometry import Geometry

THREADS = 128
"""Threads of a program, unless its tile asks for another number."""
WIDEST_ACCESS = 16
"""Bytes of the widest load or store of a thread."""
_LEAST_TILES = 8  # of a part of a group, so that what the parts find stays small beside the tensor
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_PROGRAMS = 1024  # that keep a large GPU busy


@dataclass(frozen=True)
class Launch:
    """A kernel made by `triton.jit` and what it is called with: grid, arguments in order, and constants by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Tensor | int | float | None, ...]
    constants: dict[str, int | bool]
    threads: int = THREADS

    def run(self) -> None:
        """Launch the kernel on its tensors' device, in the current stream. An empty grid is none."""
        if not math.prod(self.grid):
            return
        device = next(argument.device for argument in self.arguments if isinstance(argument, Tensor))
        with torch.cuda.device(device if device.type == "cuda" else -1):
            self.kernel[self.grid](
                *self.arguments, **self.constants, num_warps=self.threads // _warp_size(device), enable_fp_fusion=False
            )


def takes(arrays: tuple[Tensor | None, ...]) -> bool:
    """Whether the kernels can read and write these arrays: plain tensors with memory on a CUDA or ROCm device.

    Subclasses may have no memory of their own; zero tensors and the tensors of torch.func transforms have none. float64
    has no hardware worth a kernel.
    """
    try:
        for x in arrays:
            if x is None:
                continue
            if type(x) not in _PLAIN_TYPES or not x.is_cuda or x.dtype is torch.float64:
                return False
            if x.data_ptr() == 0 and x.numel():
                return False
    except RuntimeError:  # data_ptr() of a wrapper
        return False
    return True


def seed_on(device: torch.device, seed: int | Tensor | None) -> Tensor | None:
    """A seed as the kernels read it: from device memory, so that nothing waits for it."""
    if seed is None or isinstance(seed, Tensor):
        return None if seed is None else seed.to(device)
    return torch.full((), seed, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Tiling:
    """How programs divide a tensor: tiles of whole blocks if blocks are a power of two, else single blocks.

    Of single blocks, of any size, there are 0 rows. Columns are those of a block, rounded up to a power of two.
    """

    rows: int
    columns: int
    threads: int
    programs: int


@functools.lru_cache(maxsize=4096)
def tiling(numel: int, block_size: int, itemsize: int, least: int = 0) -> Tiling:
    """Tiles in which each thread's part of a plane is one widest access, of at least so many elements.

    That least number is a power of two.
    """
    blocks = -(-numel // block_size)
    columns = next_power_of_2(block_size // 8)
    a_thread = WIDEST_ACCESS // itemsize
    if 8 * columns != block_size:
        threads = min(max(columns // a_thread, 64), 512)
        return Tiling(0, columns, threads, blocks)
    rows = max(THREADS * a_thread // columns, least // block_size, 1)
    return Tiling(rows, columns, max(rows * columns // a_thread, 64), -(-blocks // rows))


@dataclass(frozen=True)
class GroupTiling:
    """How programs reduce the groups of a tensor: some groups each, or a part of some groups, the parts joined later.

    Args:
        shape: Extents of a tile, as constants: runs of a group, groups, elements of a run.
        repeats: Number of runs of one group.
        group_tiles: Number of programs beside each other that all groups need.
        parts: Number of programs that share a group.
    """

    shape: dict[str, int]
    repeats: int
    group_tiles: int
    parts: int


def group_tiling(geometry: Geometry, tile: int, least: int = 1) -> GroupTiling:
    """Tiles of whole runs of several groups, or pieces of one run, of a power of two of elements.

    A part of a group has at least so many of its elements.
    """
    inner, groups = geometry.inner, geometry.groups
    repeats = 1 if geometry.one_run else geometry.numel // (inner * groups)
    inner_tile = min(next_power_of_2(inner), tile)
    groups_tile = min(next_power_of_2(max(groups, 1)), tile // inner_tile)
    repeats_tile = min(next_power_of_2(max(repeats, 1)), tile // (inner_tile * groups_tile))
    shape = {"REPEATS_TILE": repeats_tile, "GROUPS_TILE": groups_tile, "INNER_TILE": inner_tile}
    tiles = -(-repeats // repeats_tile) * -(-inner // inner_tile)
    group_tiles = -(-groups // groups_tile)
    most = min(tiles // _LEAST_TILES, inner * repeats // least)
    return GroupTiling(shape, repeats, group_tiles, max(min(_PROGRAMS // max(group_tiles, 1), most), 1))


@functools.cache
def _warp_size(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32
