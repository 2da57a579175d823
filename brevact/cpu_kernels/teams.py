"""Kernels run by the OpenMP team that PyTorch's own CPU ops run on, or by a pool of threads where there is none.

Between two ops the threads of the team spin for a while. They start on a kernel at once; threads of our own would have
to wake up, and then to share the cores with them.

GCC's `GOMP_parallel`, which LLVM's OpenMP library has too, calls a C function on every thread of the team. The function
takes pieces of the work from a counter in memory, so that the team needs neither the GIL nor equal threads.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable

from numba import types

from brevact.cpu_kernels import threads
from brevact.cpu_kernels.kernel_cache import PackageCache
from brevact.cpu_kernels.memory import advance, i64_at, load, take, words
from brevact.private_names.of_numba import CFunc, normalize_signature

SMALLEST_SHARE = 1 << 13
"""Elements a thread below which a team costs more than it brings."""

_PIECES_PER_THREAD = 4  # so that uneven threads finish together


@functools.cache
def _team_function(kernel: Callable) -> int:
    """Address of a C function that runs pieces of a kernel until none is left.

    Its argument is the address of int64 words: the kernel's arguments but for the last two, the number of blocks, the
    blocks of a piece, and the first block that nobody has taken.
    """
    count = kernel.py_func.__code__.co_argcount - 2
    arguments_at = words(count)

    def work(address):
        pointer = i64_at(address)
        arguments = arguments_at(pointer)
        blocks, step = load(pointer, count), load(pointer, count + 1)
        free = advance(pointer, count + 2)
        start = take(free, step)
        while start < blocks:
            kernel(*(arguments + (start, min(start + step, blocks))))  # noqa: RUF005 (all that Numba compiles)
            start = take(free, step)

    function = CFunc(work, normalize_signature(types.void(types.intp)), {}, {"error_model": "numpy"})
    PackageCache.attach(function, work, kernel.py_func.__qualname__)
    function.compile()
    _compiled.append(function)
    return function.address


_compiled: list[CFunc] = []  # owns the machine code


def _find_team() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel(function, argument, threads, flags)` of the OpenMP library that PyTorch loaded, if it did."""
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


_parallel = _find_team()


def _lose_team() -> None:
    """Go on without the team: a fork copies none of its threads, and OpenMP would wait for them."""
    global _parallel
    _parallel = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lose_team)


def share(kernel: Callable, arguments: tuple[int, ...], blocks: int, block_size: int, most_threads: int) -> None:
    """Call `kernel(*arguments, start, stop)` over pieces that cover all blocks, on several threads where that pays.

    Args:
        kernel: Kernel of integers that works on a run of blocks.
        arguments: What it takes before `start` and `stop`.
        blocks: Number of blocks.
        block_size: Elements in a block.
        most_threads: Threads of the team, the caller among them.
    """
    if most_threads == 1 or blocks * block_size < 2 * SMALLEST_SHARE:
        if blocks:
            kernel(*arguments, 0, blocks)
    elif _parallel is None:
        threads.share(functools.partial(kernel, *arguments), blocks, block_size, most_threads)
    else:
        # The whole team, as PyTorch does: a smaller one would end the threads that the next op needs.
        step = max(-(-blocks // (most_threads * _PIECES_PER_THREAD)), SMALLEST_SHARE // (2 * block_size), 1)
        memory = (ctypes.c_int64 * (len(arguments) + 3))(*arguments, blocks, step, 0)
        _parallel(_team_function(kernel), ctypes.addressof(memory), most_threads, 0)
