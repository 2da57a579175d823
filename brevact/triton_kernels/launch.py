"""Launches: a kernel with its arguments, its constants and its grid, to be run, or compiled without a GPU."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

THREADS = 128
"""Threads of a program, unless its tile asks for another number."""
WIDEST_ACCESS = 16
"""Bytes of the widest load or store of a thread."""


@dataclass(frozen=True)
class Launch:
    """A kernel and everything it is called with.

    Args:
        kernel: Function made by `triton.jit`.
        grid: Number of programs along each axis.
        arguments: Values of the parameters that are no compile-time constants, in order.
        constants: Values of those that are, by name.
        threads: Threads of a program.
    """

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


@dataclass(frozen=True)
class Tiling:
    """How programs divide a tensor: tiles of whole blocks if blocks are a power of two, else single blocks.

    Args:
        rows: Blocks of a tile; 0 for a single block of any size.
        columns: Columns of a block, rounded up to a power of two.
        threads: Threads of a program.
        programs: Number of programs.
    """

    rows: int
    columns: int
    threads: int
    programs: int


@functools.lru_cache(maxsize=4096)
def tiling(numel: int, block_size: int, itemsize: int, least: int = 0) -> Tiling:
    """Tiles in which each thread's part of a plane is one widest access.

    Args:
        numel: Number of elements.
        block_size: Elements of a block, a multiple of 8.
        itemsize: Bytes of an element.
        least: Elements that a tile has to hold at least, a power of two.

    Returns:
        The tiling.
    """
    blocks = -(-numel // block_size)
    columns = next_power_of_2(block_size // 8)
    a_thread = WIDEST_ACCESS // itemsize
    if 8 * columns != block_size:
        threads = min(max(columns // a_thread, 64), 512)
        return Tiling(0, columns, threads, blocks)
    rows = max(THREADS * a_thread // columns, least // block_size, 1)
    return Tiling(rows, columns, max(rows * columns // a_thread, 64), -(-blocks // rows))


@functools.cache
def _warp_size(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32
