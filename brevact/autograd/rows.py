"""A torch function's row in a region: merged once from the rows of the op families, looked up at each call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd.call_arguments import tensors_of_call
from brevact.autograd.derived import Kind
from brevact.autograd.keeper import EagerKeeper
from brevact.autograd.op_names import OP_NAMES
from brevact.autograd.ops import OPS
from brevact.autograd.ops.base import may_overwrite
from brevact.autograd.ops.op import Op, Saves
from brevact.autograd.other_code import OPERATORS, operator_name
from brevact.private_names.of_torch import schemas_of_operator


@dataclass(frozen=True, slots=True)
class Row:
    """All that op families say about one torch function (:class:`~.ops.op.Op` documents each field).

    Args:
        handler: its counterpart, or None.
        name: by which rules know it; None if no rule applies to it.
        kind: how its results derive from its arguments, None for functions whose results are not tracked here.
        overwrites: whether it may overwrite an argument of a tracked result: the region looks up that argument's saved
            form before the call.
        must_not_round: (region, args) -> whether the tensors of torch's own op must stay unpacked; None if they need
            not.
        is_bit_exact: whether the counterpart's gradient, with nothing rounded, is torch's to the last bit.
        is_layer: whether it is no norm and its result is an activation even if only a weight went in.
        is_norm: whether it is a norm, which makes a weight of a weight.
        rounds_forward: whether some quantizers change its result.
        looks_up: whether integers beside a tensor are indices.
        reads_sizes: whether its gradient reads only the sizes of floating-point tensors.
        places: returns the number of places, if saved integers are places.
        is_pointwise: whether each result element is a function of the elements at its position.
        is_metadata: whether a call reads a tensor's metadata, or makes a plain view (``stores_nothing``).
        is_backward: whether it runs a backward pass.
        is_unversioned: whether the caller may change values behind the version counter.
        written: returns the tensors of a call whose values an operator may change that way; None if there are none.
        makes_weight: whether the result is always a weight: it has no batch, and parametrizations add it.
        takes_tensors: whether it accepts a plain tensor in place of a subclass's that shares its storage: its saved
            tensors are known, and it changes no attribute of an argument.
        replaces: whether the result does not depend on the first argument, which is overwritten.
        picks_extremes: whether its gradient goes to the smallest or the largest elements alone.
    """

    handler: Callable[..., Any] | None = None
    name: str | None = None
    kind: Kind | None = None
    overwrites: bool = False
    must_not_round: Callable[[EagerKeeper, tuple], bool] | None = None
    is_bit_exact: bool = True
    is_layer: bool = False
    is_norm: bool = False
    rounds_forward: bool = False
    looks_up: bool = False
    reads_sizes: bool = False
    places: Callable[[list[Tensor]], int] | None = None
    is_pointwise: bool = False
    is_metadata: bool = False
    is_backward: bool = False
    is_unversioned: bool = False
    written: Callable[[tuple, dict[str, Any]], list[Tensor]] | None = None
    makes_weight: bool = False
    takes_tensors: bool = False
    replaces: bool = False
    picks_extremes: bool = False


def _always(region: EagerKeeper, args: tuple) -> bool:
    return True


#: Methods that change their argument's sizes, strides or graph.
_CHANGES_ARGUMENT = frozenset(
    f"{name}_" for name in ("as_strided", "detach", "squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze")
)
_EXTREMES = frozenset("max min amax amin topk kthvalue cummax cummin".split())
#: Row of a function that no op family names: its saved tensors stay unpacked, since nobody has checked its gradient.
_UNKNOWN = Row(must_not_round=_always)


def _table() -> dict[Callable, Row]:
    ops_of: dict[Callable, list[Op]] = {}
    for op in OPS:
        for func in op.functions:
            ops_of.setdefault(func, []).append(op)
    rows = {func: _joined(func, ops) for func, ops in ops_of.items()}
    rows[torch.eye] = replace(rows.get(torch.eye, _UNKNOWN), makes_weight=True)
    rows[Tensor.copy_] = replace(rows.get(Tensor.copy_, _UNKNOWN), replaces=True)
    return rows


def _joined(func: Callable, ops: list[Op]) -> Row:
    """Merge the op families' rows of a function; the last of two counterparts counts."""
    handlers = [op.handler for op in ops if op.handler]
    tests = [op.must_not_round for op in ops if op.must_not_round]
    may_round = any(op.saves is not None for op in ops)
    kinds = {
        Kind.SUM: any(op.is_sum for op in ops),
        Kind.BILINEAR: any(op.is_bilinear for op in ops),
        Kind.AVERAGE: any(op.is_average for op in ops),
        Kind.MOVE: any(op.moves for op in ops),
    }
    kind = next((kind for kind in reversed(kinds) if kinds[kind]), None)
    is_norm = any(op.is_norm for op in ops)
    is_known = may_round or kind is not None or bool(handlers or tests)
    return Row(
        handler=handlers[-1] if handlers else None,
        name=OP_NAMES.get(func),
        kind=kind,
        overwrites=kind is not None and may_overwrite(func),
        must_not_round=None if may_round else (tests[-1] if tests else _always),
        is_bit_exact=all(op.is_bit_exact for op in ops),
        is_layer=any(op.is_layer for op in ops) and not is_norm,
        is_norm=is_norm,
        rounds_forward=any(op.rounds_forward for op in ops),
        looks_up=any(op.looks_up for op in ops),
        reads_sizes=any(op.saves is Saves.SIZES for op in ops),
        places=next((op.places for op in ops if op.places), None),
        is_pointwise=any(op.is_pointwise for op in ops),
        is_metadata=any(op.is_metadata for op in ops),
        is_backward=any(op.is_backward for op in ops),
        is_unversioned=any(op.is_unversioned for op in ops),
        takes_tensors=is_known and func.__name__ not in _CHANGES_ARGUMENT,
        picks_extremes=func.__name__ in _EXTREMES or "max_pool" in func.__name__,
    )


#: Rows of the functions that op families name.
ROWS: dict[Callable, Row] = _table()


def row_of(func: Callable) -> Row:
    """Return the row of any function that a region's mode sees, including other libraries' and operators."""
    row = ROWS.get(func)
    if row is None:
        row = _row_of_operator(func) if isinstance(func, OPERATORS) else _UNKNOWN
    return row


@functools.lru_cache(maxsize=1024)
def _row_of_operator(func: Callable) -> Row:
    """Return the row of a ``torch.ops`` operator: torch's own saves the same tensors as the function with its name.

    Tensors of another library's operator stay unpacked, unless a rule names the operator.
    """
    namespace, plain = str(func).split(".")[:2]
    if namespace != "aten":
        name = operator_name(func)
        written = None if name is None else _written_by(name)
        return Row(name=name, must_not_round=lambda region, args: name is None or region.op != name, written=written)
    function = next((found for home in (torch, Tensor, F) if callable(found := getattr(home, plain, None))), None)
    known = _UNKNOWN if function is None else ROWS.get(function, _UNKNOWN)
    return Row(must_not_round=known.must_not_round)


def _written_by(name: str) -> Callable[[tuple, dict[str, Any]], list[Tensor]]:
    """Return a function that selects the tensors of a call that an operator declares to write, or all if none.

    Nobody checks the declarations, and not all kernels bump the versions of the tensors that they write.
    """
    found = {
        key
        for schema in schemas_of_operator(name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for key in (place, argument.name)
    }

    def written(args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
        if found:
            args = tuple([x for place, x in enumerate(args) if place in found])
            kwargs = {key: x for key, x in kwargs.items() if key in found}
        return tensors_of_call(args, kwargs)

    return written
