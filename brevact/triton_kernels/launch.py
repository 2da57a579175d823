"""Programs: a kernel with its numbers, its constants and its grid, to be run, or compiled without a GPU."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import next_power_of_2

from brevact.geometry import Geometry, UniformPlan, are_plain
from brevact.private_names.of_triton import CompiledKernel, driver, hooks

THREADS = 128
"""Threads of a program, unless its tile sets another number; AMD's warps of 64 make it twice as many."""
WARP = 32
WIDEST_ACCESS = 16
"""Bytes of the widest load or store of a thread."""


class Span(NamedTuple):
    """Some elements of a buffer, as an argument of a kernel: a tensor is made of them only where one is needed."""

    start: int
    dtype: torch.dtype
    numel: int

    def of(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.start + self.numel * self.dtype.itemsize].view(self.dtype)


TENSOR = Span(0, torch.uint8, -1)
"""An argument that is a tensor, of any type, from its first element on."""


def parts_of(plan: UniformPlan) -> dict[str, Any]:
    """Codes, minima and scales of a buffer, by the names that kernels have for them."""
    geometry = plan.geometry
    return {
        "codes_ptr": Span(0, torch.uint8, geometry.code_bytes),
        "minimum_ptr": Span(plan.minimum_at, plan.minimum_dtype, geometry.groups),
        "scale_ptr": Span(plan.scale_at, plan.scale_dtype, geometry.groups),
    }


class Program:
    """A kernel with its grid, numbers and constants, shared by launches for tensors of the same sizes.

    Triton finds the compiled kernel by inspecting each argument, in Python, and queries the driver about each pointer:
    many times the work of the launch. A program finds it by the types of its tensors and by their alignment.
    """

    __slots__ = (
        *("_compiled", "_numbers", "_tail", "_tensors"),
        *("arguments", "constants", "grid", "kernel", "registers", "threads"),
    )

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], threads: int = THREADS, registers: int | None = None, **values: Any
    ) -> None:
        names = [name for name in kernel.arg_names if not name.isupper()]
        self.kernel, self.grid, self.threads, self.registers = kernel, grid, threads, registers
        self.arguments = [values.get(name, TENSOR) if name.endswith("_ptr") else values[name] for name in names]
        self.constants = {name: values[name] for name in kernel.arg_names if name.isupper()}
        self._tensors = [(place, x.start) for place, x in enumerate(self.arguments) if type(x) is Span]
        self._numbers = [None if type(x) is Span else x for x in self.arguments]
        self._tail = tuple(self.constants.values())
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
            self._compile(tensors, (index, *key))
            return
        compiled, launch, function, metadata, stream_of = found
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        grid, stream = (*self.grid, 1, 1)[:3], stream_of(index)
        if enter.calls or leave.calls:  # somebody measures
            compiled[grid](*values, *self._tail, stream=stream)
        else:  # the same, without the calls of Triton that prepare it
            launch(*grid, stream, function, metadata, None, None, None, *values, *self._tail)

    def _compile(self, tensors: tuple[Tensor | None, ...], key: tuple[Any, ...]) -> None:
        """Run the kernel, compiled if need be, and remember the compiled one for tensors of this key."""
        if 0 in self.grid:
            return
        given = iter(tensors)
        arguments: list[Any] = [next(given) if type(x) is Span else x for x in self.arguments]
        for place, part in enumerate(self.arguments):
            if type(part) is Span and part is not TENSOR:
                arguments[place] = part.of(arguments[place])
        compiled = self.run_by_triton(arguments)
        if key[0] >= 0 and isinstance(compiled, CompiledKernel):  # not interpreted, and no hook of somebody's
            stream_of = driver.active.get_current_stream
            self._compiled[key] = compiled, compiled.run, compiled.function, compiled.packed_metadata, stream_of

    def run_by_triton(self, arguments: list[Any]) -> Any:
        """Launch the kernel by Triton, which compiles it if need be; return Triton's result."""
        device = next(x.device for x in arguments if isinstance(x, Tensor))
        constants = {**self.constants, "num_warps": self.threads // WARP, "enable_fp_fusion": False}
        if self.registers and torch.version.hip is None:
            constants["maxnreg"] = self.registers
        detached = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
        with torch.cuda.device(device if device.type == "cuda" else -1):
            return self.kernel[self.grid](*detached, **constants)


@functools.cache
def _has_several_devices() -> bool:
    return torch.cuda.device_count() > 1


can_run = functools.partial(are_plain, on_gpu=True)


def seed_on(device: torch.device, seed: int | Tensor | None) -> Tensor | None:
    """A seed as the kernels read it: from device memory, so that nothing waits for it."""
    if seed is None:
        return None
    if isinstance(seed, Tensor):
        return seed if seed.device == device else seed.to(device)
    return torch.full((), seed, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=4096)
def over_blocks(kernel: Any, geometry: Geometry, itemsize: int, in_rows: bool = True, **values: Any) -> Program:
    """The program of a kernel over `tile`s: rows of blocks if wanted and if a block is a power of two, else blocks."""
    block = geometry.block_size
    blocks, columns, a_thread = -(-geometry.numel // block), next_power_of_2(block // 8), WIDEST_ACCESS // itemsize
    if 8 * columns != block or not in_rows:
        rows, threads, programs = 0, min(max(columns // a_thread, 64), 512), blocks
    else:
        rows = max(THREADS * a_thread // columns, 1)
        threads, programs = max(rows * columns // a_thread, 64), -(-blocks // rows)
    known = {
        "numel": geometry.numel,
        "BIT_WIDTH": geometry.bit_width,
        "BLOCK": block,
        "ROWS": rows,
        "COLUMNS_2": columns,
    }
    return Program(kernel, (programs,), threads, **known | values)
