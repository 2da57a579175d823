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
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return _stand_in


def _stand_in(*args: object) -> object:
    raise RuntimeError("functions of kernels run compiled only: call the kernel")
