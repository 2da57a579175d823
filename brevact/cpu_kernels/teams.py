"""Kernels run by the OpenMP team that PyTorch's own CPU ops run on, or by the caller alone where there is none.

Between two ops the threads of the team spin for a while. They start on a kernel at once; threads of our own would have
to wake up, and then to share the cores with them.

GCC's `GOMP_parallel`, which LLVM's OpenMP library has too, calls a C function on every thread of the team. The function
takes pieces of the work from a counter in memory, so that the team needs neither the GIL nor equal threads.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import torch

from brevact.cpu_kernels.kernels import Kernel

SMALLEST_SHARE = 1 << 13
"""Elements per thread below which a team costs more than it brings."""

_PIECES_PER_THREAD = 4  # so that uneven threads finish together


def _find_team() -> Callable[[int, ctypes.Array, int, int], None] | None:
    """`GOMP_parallel(function, argument, threads, flags)` of the OpenMP library that PyTorch loaded, if it did."""
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


_parallel = _find_team()


def _leave_team() -> None:
    """Go on without the team in a fork, which copies no threads: OpenMP would wait for them."""
    global _parallel
    _parallel = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_team)


def share(kernel: Kernel, arguments: tuple[int, ...], blocks: int, block_size: int) -> None:
    """Call `kernel(*arguments, start, stop)` over pieces of all blocks, by the caller and more threads if that pays."""
    threads = torch.get_num_threads()
    if threads == 1 or _parallel is None or blocks * block_size < 2 * SMALLEST_SHARE:
        if blocks:
            kernel.function(kernel.words(*arguments, blocks, blocks, 0))
        return
    # The whole team, as PyTorch does: a smaller one would end the threads that the next op needs.
    step = max(-(-blocks // (threads * _PIECES_PER_THREAD)), SMALLEST_SHARE // (2 * block_size), 1)
    words = kernel.words(*arguments, blocks, step, 0)
    _parallel(kernel.address, words, threads, 0)
