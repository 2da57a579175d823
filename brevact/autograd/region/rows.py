"""The row of each torch function: merged once from the rows of the op families, looked up at each call.

Functions of one op share a name in rules: they share a counterpart, or a name apart from affixes. Examples:
``torch.matmul``, ``Tensor.__matmul__`` and ``torch.bmm``; ``F.sigmoid``, ``torch.special.expit`` and
``Tensor.sigmoid_``.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from brevact.autograd.call_arguments import tensors_of_call
from brevact.autograd.interop.library_functions import declares_writes
from brevact.autograd.interop.other_code import CHECKPOINT, OPERATORS, operator_name
from brevact.autograd.ops import OPS
from brevact.autograd.ops.base import may_overwrite
from brevact.autograd.ops.op import NOTHING, Op, Saves
from brevact.private_names.of_torch import schemas_of_operator

_BUILTIN = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(types.MethodWrapperType, types.GetSetDescriptorType),
)


def _stores(rows: list[Op]) -> bool:
    """Whether a rule changes the tensors that a function saves: its counterpart, or hooks, may pack some."""
    kinds = Saves.FACTORS, Saves.BOUNDED, Saves.SIZES
    saving = [row for row in rows if row.handler or row.must_not_round or row.saves in kinds]
    return any(row.stored is None or row.stored.kept != NOTHING for row in saving)


def _plain_name(func: Callable) -> str:
    """A function's name without the affixes of operators, in-place functions and ``torch.linalg``."""
    name = func.__name__
    operator = re.fullmatch(r"__[ir]?(matmul|mul|pow|(?:true)?div)__", name)
    if operator:
        return operator[1].removeprefix("true")
    return re.sub(r"^(linalg_|special_|_)|(_with_indices|_)$", "", name)


def _named(rows: dict[Callable, list[Op]]) -> dict[Callable, str]:
    names: dict[Callable, str] = {}
    of_link: dict[Hashable, str] = {}  # by plain name and by counterpart
    for func, of_func in rows.items():
        if _stores(of_func):
            links = [_plain_name(func), *(op.handler for op in of_func if op.handler)]
            found = dict.fromkeys(of_link[link] for link in links if link in of_link)
            name, *others = found or [_plain_name(func)]
            for table in (names, of_link):
                for key in [key for key, value in table.items() if value in others]:  # a function that joins two ops
                    table[key] = name  # type: ignore[index]
            names[func] = name
            of_link.update(dict.fromkeys(links, name))
    return names


def _always(region: Any, args: tuple) -> bool:
    return True


#: Methods that change their argument's sizes, strides or graph.
_CHANGES_ARGUMENT = frozenset(
    f"{name}_" for name in ("as_strided", "detach", "squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze")
)
_EXTREMES = frozenset("max min amax amin topk kthvalue cummax cummin".split())
#: Row of a function that no op family names: its saved tensors stay unpacked, since nobody has checked its gradient.
_UNKNOWN = Op(must_not_round=_always)
_MERGED = ("handler", "must_not_round", "places", "kind")
_FLAGS = (
    *("is_layer", "is_norm", "rounds_forward", "looks_up", "is_pointwise", "is_metadata", "is_backward"),
    *("is_unversioned", "twice"),
)


def _joined(func: Callable, ops: list[Op], name: str | None) -> Op:
    found: dict[str, Any] = {}
    for field in _MERGED:
        found[field] = next((getattr(op, field) for op in reversed(ops) if getattr(op, field) is not None), None)
    for field in _FLAGS:
        found[field] = any(getattr(op, field) for op in ops)
    may_round = any(op.saves is not None for op in ops)
    is_known = may_round or any(found[field] is not None for field in ("handler", "must_not_round", "kind"))
    found["is_layer"] = found["is_layer"] and not found["is_norm"]
    found["must_not_round"] = None if may_round else found["must_not_round"] or _always
    return Op(
        (func,),
        name=name,
        is_bit_exact=all(op.is_bit_exact for op in ops),
        reads_sizes=any(op.saves is Saves.SIZES for op in ops),
        overwrites=found["kind"] is not None and may_overwrite(func),
        is_tracked=any(found[field] for field in ("kind", "is_pointwise", "looks_up")) or func.__name__ == "sum",
        makes_weight=func is torch.eye,
        takes_tensors=is_known and func.__name__ not in _CHANGES_ARGUMENT,
        replaces=func is Tensor.copy_,
        picks_extremes=func.__name__ in _EXTREMES or "max_pool" in func.__name__,
        **found,
    )


def _table() -> tuple[dict[Callable, Op], dict[Callable, str]]:
    ops_of: dict[Callable, list[Op]] = {torch.eye: []}
    for op in OPS:
        for func in op.functions:
            ops_of.setdefault(func, []).append(op)
    names = _named(ops_of)
    return {func: _joined(func, ops, names.get(func)) for func, ops in ops_of.items()}, names


ROWS, _NAMES = _table()
#: Op names of the torch functions whose saved tensors a quantizer, or full precision, changes.
OP_NAMES: dict[Callable, str] = {**_NAMES, checkpoint: CHECKPOINT}


def row_of(func: Callable) -> Op:
    row = ROWS.get(func)
    if row is None:
        row = _row_of_operator(func) if isinstance(func, OPERATORS) else _UNKNOWN
    return row


@functools.lru_cache(maxsize=1024)
def _row_of_operator(func: Callable) -> Op:
    """Return an operator's row (``torch.ops``): of the function with its name; others save unpacked without a rule."""
    namespace, plain = str(func).split(".")[:2]
    if namespace != "aten":
        name = operator_name(func)
        written = None if name is None else _written_by(name)
        return Op(name=name, must_not_round=lambda region, args: name is None or region.op != name, written=written)
    function = next((found for home in (torch, Tensor, F) if callable(found := getattr(home, plain, None))), None)
    known = _UNKNOWN if function is None else ROWS.get(function, _UNKNOWN)
    return Op(must_not_round=known.must_not_round, is_layer=known.is_layer, looks_up=known.looks_up)


def _written_by(name: str) -> Callable[[tuple, dict[str, Any]], list[Tensor]]:
    """Select the tensors of a call that an operator declares to write, or all if none: kernels may bump no version.

    None of an operator that declares none, of a library whose operators are known to declare what they write.
    """
    found = {
        key
        for schema in schemas_of_operator(name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for key in (place, argument.name)
    }
    declares = declares_writes(name.partition(":")[0])

    def written(args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
        if found or declares:
            args = tuple([x for place, x in enumerate(args) if place in found])
            kwargs = {key: x for key, x in kwargs.items() if key in found}
        return tensors_of_call(args, kwargs)

    return written


def is_torch_function(x: Any) -> bool:
    if isinstance(x, _BUILTIN):
        return True
    home = x if isinstance(x, types.FunctionType) else type(x)
    of_torch = str(getattr(home, "__module__", "")).partition(".")[0] == "torch"
    return callable(x) and not isinstance(x, type | torch.nn.Module) and of_torch
