"""Which functions are torch's, and which torch code composes ops that are one op to its caller."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType

from brevact.autograd.other_code import OPERATORS, operator_name

#: Modules whose functions are one op to their caller and many to a region, and save tensors as decompositions do.
_ALGORITHMS = frozenset(("torch._lowrank", "torch._linalg_utils", "torch._lobpcg"))


def is_of_torch(func: Callable) -> bool:
    """Return whether a function is torch's; its compiled methods have no module."""
    if isinstance(func, OPERATORS):
        return operator_name(func) is None
    module = getattr(func, "__module__", None)
    return not isinstance(module, str) or module.partition(".")[0] == "torch"


def is_in_algorithm(caller: FrameType | None) -> bool:
    """Return whether a frame runs a torch function composed of matrix products and decompositions."""
    return caller is not None and caller.f_globals.get("__name__") in _ALGORITHMS
