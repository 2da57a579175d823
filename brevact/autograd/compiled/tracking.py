"""Functions of a compiled graph that save nothing: their results derive from packed tensors as in eager regions.

Eager regions identify a view by its storage. Traced tensors cannot be identified so: views are graph nodes, too, and a
view of a known tensor is recorded as the function that returns it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from brevact.autograd.call_arguments import tensors_of_call
from brevact.autograd.derived import MOST_DECODED, Kind, operands_of, track_derived
from brevact.autograd.ops.base import is_inplace, out_of_place
from brevact.autograd.ops.op import Op, everywhere
from brevact.autograd.rows import ROWS, row_of
from brevact.autograd.saved import Keeper, Saved
from brevact.private_names.of_torch import FunctionalTensor

#: Functions that return a view of their first argument.
_VIEWS: tuple[Callable, ...] = tuple(
    func
    for func in everywhere(
        *("squeeze", "unsqueeze", "expand", "broadcast_to", "permute", "transpose", "swapaxes", "swapdims", "movedim"),
        *("moveaxis", "t", "adjoint", "narrow", "select", "getitem"),
    )
    if not is_inplace(func, (), {})
)
#: Functions that keep the order of elements.
_RESHAPES: tuple[Callable, ...] = (Tensor.view, torch.unflatten)
#: Functions that may not return a tensor, or a class's Python functions, which Dynamo does not find in a table.
_LEFT_OUT = Tensor.__float__, Tensor.type, Tensor.__rsub__, Tensor.__rdiv__
#: Functions whose results may derive from their arguments, in the same order in all processes.
TRACKED: tuple[Callable, ...] = (
    *(func for func, row in ROWS.items() if row.kind is not None and func not in _LEFT_OUT),
    *(*_VIEWS, *_RESHAPES),
)
_OF_VIEWS = frozenset((*_VIEWS, *_RESHAPES))


def run_tracked(
    region: Keeper, run: Callable[[tuple, dict[str, Any]], Any], func: Callable, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Call ``run(args, kwargs)``, and record the result as ``func`` of the saved forms, unless ``run`` did so."""
    row = row_of(func)
    if row.kind is None and func not in _OF_VIEWS:
        return run(args, kwargs)
    tensors = tensors_of_call(args, kwargs)
    operands = _known(region, tensors) if row.overwrites else None
    result = run(args, kwargs)
    if not isinstance(result, FunctionalTensor) or region.find_known(result) is not None:
        return result
    if not row.overwrites:
        operands = _known(region, tensors)
    if operands is not None:
        _track(region, row, func, args, kwargs, result, operands)
    return result


def _known(region: Keeper, tensors: list[Tensor]) -> list[tuple[Tensor, Saved | None]] | None:
    """Return the arguments with their saved forms; without any, do not compare sizes, which may be symbolic."""
    return operands_of(region, tensors) if any([region.find_kept(x) is not None for x in tensors]) else None


def _track(
    region: Keeper,
    row: Op,
    func: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    result: Tensor,
    operands: list[tuple[Tensor, Saved | None]],
) -> None:
    """Record a result; a known tensor's view may decode to another memory order."""
    first, kind = operands[0][0], row.kind
    if kind is None:
        if len(operands) != 1 or result.dtype is not first.dtype:
            return  # indices, and bytes as numbers
        kind = Kind.MOVE
        if func in _RESHAPES:
            func, args, kwargs = torch.reshape, (first, result.shape), {}
    elif kind is Kind.AVERAGE and not row.overwrites and result.numel() * MOST_DECODED < first.numel():
        return
    track_derived(region, out_of_place(func), args, kwargs, result, operands, kind)
