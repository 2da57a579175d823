"""Whether what torch's own op saves may be packed, where it has no counterpart for its arguments."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.keeper import EagerKeeper
from brevact.autograd.ops import MAY_ROUND, MUST_NOT_ROUND
from brevact.autograd.other_code import OPERATORS, operator_name

#: Modules of torch whose functions are one op to their caller and many to a region: what they save is like what the
#: decompositions save that they end in.
_ALGORITHMS = frozenset(("torch._lowrank", "torch._linalg_utils", "torch._lobpcg"))


def must_not_round(region: EagerKeeper, func: Callable, args: tuple) -> bool:
    """Return whether what ``func`` saves must stay as it is: an operator of another library's, unless a rule names it.

    So must what a function of another library saves that takes part in the protocol of torch functions.
    """
    if func in MAY_ROUND:
        return False
    of_arguments = MUST_NOT_ROUND.get(func)
    if of_arguments is not None:
        return of_arguments(region, args)
    if isinstance(func, OPERATORS):
        return _is_exact_operator(region, func, args)
    return True


def _is_exact_operator(region: EagerKeeper, func: Callable, args: tuple) -> bool:
    """The same for an operator of ``torch.ops``: torch's own is the function of its name, others are not torch's."""
    namespace, name = str(func).split(".")[:2]
    if namespace != "aten":
        return region.op is None or operator_name(func) != region.op
    function = getattr(torch, name, None) or getattr(Tensor, name, None) or getattr(F, name, None)
    return not callable(function) or must_not_round(region, function, args)


def is_of_torch(func: Callable) -> bool:
    """Return whether a function is one of torch's: the methods that are compiled say no module."""
    if isinstance(func, OPERATORS):
        return operator_name(func) is None
    module = getattr(func, "__module__", None)
    return not isinstance(module, str) or module.partition(".")[0] == "torch"


def is_in_algorithm(caller: FrameType | None) -> bool:
    """Return whether a frame runs one of the functions that torch composes of matrix products and decompositions."""
    return caller is not None and caller.f_globals.get("__name__") in _ALGORITHMS
