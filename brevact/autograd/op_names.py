"""Names of ops in rules. Functions of one op share a counterpart, or a name apart from affixes.

Examples: ``torch.matmul``, ``Tensor.__matmul__`` and ``torch.bmm``;
``F.sigmoid``, ``torch.special.expit`` and ``Tensor.sigmoid_``.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from brevact.autograd.checkpoints import CHECKPOINT
from brevact.autograd.ops import OPS
from brevact.autograd.ops.op import NOTHING, Op, Saves

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


def _named() -> dict[Callable, str]:
    rows: dict[Callable, list[Op]] = {}
    for op in OPS:
        for func in op.functions:
            rows.setdefault(func, []).append(op)
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


#: Op names of the torch functions whose saved tensors a quantizer, or full precision, changes.
OP_NAMES: dict[Callable, str] = {**_named(), checkpoint: CHECKPOINT}


def is_torch_function(x: Any) -> bool:
    """Return whether ``x`` is a torch function or method, or a compiled one; a user's predicate is neither."""
    if isinstance(x, _BUILTIN):
        return True
    home = x if isinstance(x, types.FunctionType) else type(x)
    of_torch = str(getattr(home, "__module__", "")).partition(".")[0] == "torch"
    return callable(x) and not isinstance(x, type | torch.nn.Module) and of_torch
