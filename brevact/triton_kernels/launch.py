"""Launches: a kernel with its arguments, its constants and its grid, to be run, or compiled without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2

from brevact.geometry import Geometry
from brevact.private_names.of_triton import CompiledKernel, driver

THREADS = 128
"""Threads of a program, unless its tile asks for another number."""
WIDEST_ACCESS = 16
"""Bytes of the widest load or store of a thread."""
_LEAST_TILES = 8  # of a part of a group, so that what the parts find stays small beside the tensor
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_PROGRAMS = 1024  # that keep a large GPU busy
_MOST_COMPILED = 1 << 16  # launches of different sizes that are remembered


class Part(NamedTuple):
    """Some elements of a buffer, as an argument of a kernel: a tensor is made of them only where one is needed."""

    buffer: Tensor
    start: int
    dtype: torch.dtype
    numel: int

    def tensor(self) -> Tensor:
        """The elements, a 1-D view."""
        return self.buffer[self.start : self.start + self.numel * self.dtype.itemsize].view(self.dtype)


class Launch(NamedTuple):
    """A kernel made by `triton.jit` and what it is called with: grid, arguments in order, and constants by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Tensor | Part | int | float | None, ...]
    constants: Mapping[str, int | bool]
    threads: int = THREADS

    def run(self) -> None:
        """Launch the kernel on its tensors' device, in the current stream. An empty grid is none.

        Triton finds the compiled kernel by looking at each argument, in Python, and asks the driver about each pointer:
        five times the work of the launch. Launches that are equal but for the addresses therefore find it here.
        """
        kernel, grid, arguments, constants, threads = self
        if 0 in grid:
            return
        values: list[int | float | None] = []  # pointers are their addresses
        key: list[Any] = [kernel.fn, threads, *constants, *constants.values()]
        device = None
        for argument in arguments:
            kind = type(argument)
            if kind is int or kind is float or argument is None:
                values.append(argument)  # type: ignore[arg-type]
                key.append(argument)
            elif kind is Part:
                buffer, start, dtype, _ = argument  # type: ignore[misc]
                values.append(address := buffer.data_ptr() + start)
                key += (dtype, address % WIDEST_ACCESS)
            else:
                device = argument.device  # type: ignore[union-attr]
                values.append(address := argument.data_ptr())  # type: ignore[union-attr]
                key += (argument.dtype, address % WIDEST_ACCESS)  # type: ignore[union-attr]
        assert device is not None, "a kernel writes or reads a tensor"
        index = device.index
        found = _compiled.get((*key, index))
        if found is None or torch.cuda.current_device() != index:
            self._run_by_triton(device, (*key, index))
            return
        compiled, tail = found
        compiled[(*grid, 1, 1)](*values, *tail, stream=driver.active.get_current_stream(index))

    def _run_by_triton(self, device: torch.device, key: tuple[Any, ...]) -> None:
        """Compile the kernel if need be, run it, and remember it for equal launches."""
        constants = {**self.constants, "num_warps": self.threads // _warp_size(device), "enable_fp_fusion": False}
        with torch.cuda.device(device if device.type == "cuda" else -1):
            compiled = self.kernel[self.grid](*self.tensors_and_numbers, **constants)
        if device.type != "cuda" or not isinstance(compiled, CompiledKernel):  # interpreted, or somebody's hook
            return
        names = self.kernel.arg_names[len(self.arguments) :]
        if len(_compiled) >= _MOST_COMPILED:
            _compiled.clear()
        _compiled[key] = compiled, tuple(self.constants[name] for name in names)

    @property
    def tensors_and_numbers(self) -> tuple[Tensor | int | float | None, ...]:
        """The arguments as Triton takes them."""
        return tuple(
            x.tensor() if isinstance(x, Part) else x.detach() if isinstance(x, Tensor) else x for x in self.arguments
        )


#: Compiled kernels and the constants behind their arguments, by all that Triton compiles for, and by sizes.
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[int | bool, ...]]] = {}


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
    if seed is None:
        return None
    if isinstance(seed, Tensor):
        return seed if seed.device == device else seed.to(device)
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
