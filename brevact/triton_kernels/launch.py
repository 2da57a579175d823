"""Launches: a kernel with its arguments, its constants and its grid, to be run, or compiled without a GPU."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2

from brevact.geometry import Geometry, UniformPlan
from brevact.private_names.of_triton import CompiledKernel, driver, hooks

THREADS = 128
"""Threads of a program, unless its tile asks for another number."""
WIDEST_ACCESS = 16
"""Bytes of the widest load or store of a thread."""
_LEAST_TILES = 8  # of a part of a group, so that what the parts find stays small beside the tensor
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
_PROGRAMS = 1024  # that keep a large GPU busy
_MOST_PROGRAMS = 1 << 16  # launches of different sizes that are remembered


class Part(NamedTuple):
    """Some elements of a buffer, as an argument of a kernel: a tensor is made of them only where one is needed."""

    start: int
    dtype: torch.dtype
    numel: int

    def of(self, buffer: Tensor) -> Tensor:
        """The elements, a 1-D view."""
        return buffer[self.start : self.start + self.numel * self.dtype.itemsize].view(self.dtype)


TENSOR = Part(0, torch.uint8, -1)
"""An argument that is a tensor, of any type, from its first element on."""


def parts_of(plan: UniformPlan) -> tuple[Part, Part, Part]:
    """Codes, minima and scales of a buffer."""
    geometry = plan.geometry
    return (
        Part(0, torch.uint8, geometry.code_bytes),
        Part(plan.minimum_at, plan.minimum_dtype, geometry.groups),
        Part(plan.scale_at, plan.scale_dtype, geometry.groups),
    )


class Launch(NamedTuple):
    """A kernel made by `triton.jit` with its grid, arguments in order, and constants by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Tensor | int | float | None, ...]
    constants: Mapping[str, int | bool]
    threads: int = THREADS

    def run(self) -> None:
        """Launch the kernel on its tensors' device, in the current stream. An empty grid is none."""
        tensors = [x for x in self.arguments if isinstance(x, Tensor)]
        arguments = tuple([TENSOR if isinstance(x, Tensor) else x for x in self.arguments])
        key = (self.kernel.fn, self.grid, self.threads, arguments, *self.constants, *self.constants.values())
        program = _programs.get(key)
        if program is None:
            if len(_programs) >= _MOST_PROGRAMS:
                _programs.clear()
            program = _programs[key] = Program(self.kernel, self.grid, arguments, self.constants, self.threads)
        program.run(*tensors)

    def run_by_triton(self) -> Any:
        """Launch the kernel by Triton, which compiles it if need be; return Triton's result."""
        device = next(x.device for x in self.arguments if isinstance(x, Tensor))
        constants = {**self.constants, "num_warps": self.threads // _warp_size(device), "enable_fp_fusion": False}
        arguments = [x.detach() if isinstance(x, Tensor) else x for x in self.arguments]
        with torch.cuda.device(device if device.type == "cuda" else -1):
            return self.kernel[self.grid](*arguments, **constants)


class Program:
    """A kernel with its grid, numbers and constants, shared by launches for tensors of the same sizes.

    Triton finds the compiled kernel by looking at each argument, in Python, and asks the driver about each pointer:
    many times the work of the launch. A program finds it by the types of its tensors and by their alignment.

    Args:
        kernel: Made by `triton.jit`.
        grid: Programs of the GPU.
        arguments: In the order of the kernel: numbers, and `TENSOR` or a `Part` of a buffer where a tensor stands.
        constants: By name.
        threads: Of a program of the GPU.
    """

    __slots__ = ("_compiled", "_numbers", "_tail", "_tensors", "arguments", "constants", "grid", "kernel", "threads")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: tuple[Part | int | float | None, ...],
        constants: Mapping[str, int | bool],
        threads: int = THREADS,
    ) -> None:
        self.kernel, self.grid, self.arguments = kernel, grid, arguments
        self.constants, self.threads = constants, threads
        self._tensors = [(place, x.start) for place, x in enumerate(arguments) if type(x) is Part]
        self._numbers: list[Any] = [None if type(x) is Part else x for x in arguments]
        self._tail = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        self._compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def run(self, *tensors: Tensor | None) -> None:
        """Launch the kernel with these tensors on their device, in the current stream. An empty grid is none."""
        values, index = self._numbers.copy(), -1  # pointers are addresses
        key: list[Any] = []
        for (place, start), x in zip(self._tensors, tensors, strict=True):
            if x is None:
                key.append(None)
            else:
                values[place] = address = x.data_ptr() + start
                key += (x.dtype, address % WIDEST_ACCESS)
                index = x.get_device()
        found = self._compiled.get((index, *key))
        if found is None or (_has_several_devices() and torch.cuda.current_device() != index):
            self._run_by_triton(tensors, (index, *key))
            return
        compiled, launch, function, metadata, stream_of = found
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        grid, stream = (*self.grid, 1, 1)[:3], stream_of(index)
        if enter.calls or leave.calls:  # somebody measures
            compiled[grid](*values, *self._tail, stream=stream)
        else:  # the same, without the calls of Triton that prepare it
            launch(*grid, stream, function, metadata, None, None, None, *values, *self._tail)

    def _run_by_triton(self, tensors: tuple[Tensor | None, ...], key: tuple[Any, ...]) -> None:
        """Run the kernel, compiled if need be, and remember the compiled one for tensors of this key."""
        if 0 in self.grid:
            return
        given = iter(tensors)
        arguments: list[Any] = [next(given) if type(x) is Part else x for x in self.arguments]
        for place, part in enumerate(self.arguments):
            if type(part) is Part and part is not TENSOR:
                arguments[place] = part.of(arguments[place])
        compiled = Launch(self.kernel, self.grid, tuple(arguments), self.constants, self.threads).run_by_triton()
        if key[0] >= 0 and isinstance(compiled, CompiledKernel):  # not interpreted, and no hook of somebody's
            stream_of = driver.active.get_current_stream
            self._compiled[key] = compiled, compiled.run, compiled.function, compiled.packed_metadata, stream_of


#: Programs of launches without one of their own, by all but their tensors.
_programs: dict[tuple[Any, ...], Program] = {}


@functools.cache
def _has_several_devices() -> bool:
    return torch.cuda.device_count() > 1


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
