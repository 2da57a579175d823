"""The names that kernels are written in, in a process that runs kernels: :mod:`compiler` gives them their meaning.

Kernels are compiled in processes of their own. Where they run, Numba is not imported: it and LLVM would take 100 MiB
of memory as long as the process lives. There, functions that only kernels call are stand-ins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from brevact.cpu_kernels.kernels import Kernel

if TYPE_CHECKING:
    from brevact.cpu_kernels.intrinsics import *  # noqa: F403
else:
    kernel = Kernel

    def inlined(function):
        """Nothing: kernels alone call the function."""
        return function

    def __getattr__(name: str) -> object:
        if name in _OF_KERNELS:
            return _stand_in
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_OF_KERNELS = set(
    """
    advance as_i32 as_u32 bits_of f32_at f32_scratch f64_scratch float64_of float_of
    fma i32_at i64_at lanes load look_up_lanes rint store u16_at u32_at u32_scratch u8_at u8_scratch
    """.split()
)


def _stand_in(*args: object) -> object:
    raise RuntimeError("functions of kernels run compiled only: call the kernel")
