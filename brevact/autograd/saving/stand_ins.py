"""Stand-ins for a tensor until another op saves it unpacked: rectifier masks and packed copies.

A ReLU's gradient reads where its output is positive: one bit per element. If the next layer saves that output anyway,
the mask would come on top of it, so the tensor replaces the mask. It also replaces a copy that hooks packed if a
divisor or a logarithm needs the tensor exactly: when an exponential is a divisor, the gradient multiplies its error by
a power of the inverse, and two readers of one copy multiply their errors by each other's. Ops that save the tensor
later find it unpacked. A tensor plus or times a number can give the tensor back, too. Other functions of a saturating
output hold that output, since its slope is a small difference of packed values: a program may divide by 1 - tanh(x)^2.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from brevact.autograd.call_arguments import BoundCall, bound_call
from brevact.autograd.deriving.derived import function_of
from brevact.autograd.deriving.expressions import Restrided
from brevact.autograd.saving import storage_report
from brevact.autograd.saving.saved import AS_IT_IS, Saved, SavedByHook, mapped
from brevact.autograd.saving.storages import find_record, is_tracked, note_held, record_of
from brevact.autograd.saving.store import keep_exact


def stand_in(mask: Saved, dtype: torch.dtype, inside: float = 1.0) -> Saved:
    """Return the saved form of a tensor that is ``inside`` where a mask is set and 0 elsewhere."""
    return mapped(mask, BoundCall(_signs, (Tensor, dtype, inside)))


def _signs(mask: Tensor, dtype: torch.dtype, inside: float) -> Tensor:
    signs = mask.to(dtype)
    return signs if inside == 1.0 else signs.mul_(inside)


#: Tensors that a function of them holds, such as the differences of a total variation.
_MOST_CARRIED = 3
_LOGARITHMS = frozenset(("log", "log2", "log10", "log1p"))
_DIFFERENCES = frozenset(("sub", "subtract", "__sub__"))
#: Functions that write constants, which have no gradient, in place of elements.
_CHOICES = frozenset(("masked_fill", "where"))
_MOVES = frozenset(("clone", "contiguous", "reshape", "flatten", "__getitem__", "index_select"))
_INVERSES: dict[str, Callable[..., Tensor]] = {
    **dict.fromkeys(("add", "__add__", "__radd__"), torch.sub),
    **dict.fromkeys(("sub", "__sub__"), torch.add),
    **dict.fromkeys(("mul", "__mul__", "__rmul__"), torch.div),
    **dict.fromkeys(("div", "__truediv__"), torch.mul),
}


def offer(x: Tensor, stored: SavedByHook, inverses: tuple[BoundCall, ...] = (), *, saturates: bool = False) -> None:
    """Attach to a tensor the stand-in for it, or for the result that these functions give for it.

    The stand-in of a saturating output also ends when an op saves a function of the output unpacked.
    """
    record = None if x.is_inference() or x.layout is not torch.strided else record_of(x)
    if record is not None:
        entry = weakref.ref(stored), x._version, x.dtype, (x.shape, x.stride(), x.storage_offset()), inverses
        record.offered = *(each for each in record.offered if each[0]() is not None), entry
        record.saturates = record.saturates or saturates


def saturates(x: Tensor) -> bool:
    """Return whether an offered output may saturate; one without a record was written since."""
    record = find_record(x)
    return record is None or record.saturates


def carry(tensors: list[Tensor], out: Any) -> None:
    """Let a function of saturating outputs and constants hold these outputs as long as it lives."""
    if type(out) is not Tensor or out.is_inference() or out.layout is not torch.strided:
        return
    found: dict[int, Tensor] = {}
    for x in tensors:
        if not x.requires_grad or 8 * x.numel() <= out.numel():
            continue
        record = find_record(x)
        carried = () if record is None else record.carried
        if record is not None and record.saturates and record.offered:
            carried = (x.detach(),)
        if not carried:
            return
        found |= {each.untyped_storage()._cdata: each for each in carried}
    is_one = len(found) == 1 or not any(map(saturates, found.values()))
    if 1 <= len(found) <= _MOST_CARRIED and is_one and out.untyped_storage()._cdata not in found:
        record = record_of(out)
        if record is not None:
            record.carried = tuple(found.values())


class Logs(NamedTuple):
    """A logarithm, or a sum of one and constants, of sizes and strides ``like``.

    ``kept``: saved form of the probabilities along ``dim``; None for a logarithm of anything else. ``readers``: empty
    if log-softmax alone reads these. ``logs``: the log-softmax, if it is not the tensor itself. ``source``: of a tensor
    that is one less its log-sum-exp, places of both.
    """

    like: tuple[torch.Size, tuple[int, ...]]
    dim: int = 0
    kept: Saved | None = None
    readers: Any = ()
    logs: Tensor | None = None
    source: tuple[Any, ...] = ()


def like_of(x: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    return x.shape, x.stride()


def source_of(x: Tensor) -> tuple[Any, ...]:
    return weakref.ref(x.untyped_storage()), x._version, x.storage_offset(), *like_of(x)


def note_logs(x: Tensor, logs: Logs) -> None:
    record = None if x.is_inference() or x._is_view() else record_of(x)
    if record is not None:
        record.logs = logs


def find_logs(x: Tensor) -> Logs | None:
    """Return the logarithm that a tensor is, or a view of one; of log-probabilities, one that has all classes."""
    record = None if x.is_inference() else find_record(x)
    found: Logs | None = None if record is None else record.logs
    if found is None or x._version or (found.logs is not None and found.logs._version):
        return None
    if found.kept is None or found.like == like_of(x):
        return found
    shape, stride = found.like
    move = Restrided(stride, x.shape, x.stride(), int(x.storage_offset()))
    return _moved(found, (shape[found.dim], stride[found.dim]), move, (), x)


def _moved(found: Logs, classes: tuple[int, int], move: Any, indices: Sequence[Tensor], x: Tensor) -> Logs | None:
    """Return log-probabilities moved to the places of ``x``, along a dimension with this size and stride of classes."""
    dims = [dim for dim, each in enumerate(zip(*like_of(x), strict=True)) if each == classes]
    if len(dims) != 1 or found.kept is None:
        return None
    kept = function_of(move, (found.kept, *map(keep_exact, indices)), x, is_pointwise=False)
    logs = None if found.logs is None else move(found.logs, *indices)
    return Logs(like_of(x), dims[0], kept, found.readers, logs)


def carry_logs(func: Callable, args: tuple, kwargs: dict, tensors: list[Tensor], out: Tensor, *, adds: bool) -> None:
    """Note that a result is a logarithm, ``adds`` or writes constants to one, or has its elements in other places."""
    name = func.__name__
    if name in _LOGARITHMS:
        note_logs(out, Logs(like_of(out)))
    adds = adds or name in _CHOICES
    if not (adds or name in _MOVES):
        return
    tensors, indices = (tensors, []) if adds else (tensors[:1], tensors[1:])
    pairs = [(x, logs) for x in tensors if x is not out and (logs := find_logs(x))]
    if not pairs:
        return
    first = find_record(tensors[0])
    of_difference = first.less_sum if first is not None and name in _DIFFERENCES else None
    (x, logs), *others = pairs
    found: Logs | None = None
    if of_difference is not None and not kwargs and of_difference.source == tuple(map(source_of, tensors)):
        found = of_difference._replace(like=like_of(out), source=())
    elif others or logs.kept is None:
        found = Logs(like_of(out))
    elif not adds:
        classes = x.shape[logs.dim], x.shape[logs.dim + 1 :].numel()
        found = _moved(logs, classes, bound_call(func, args, kwargs), indices, out)
    elif out.shape == x.shape:
        found = logs._replace(like=like_of(out), logs=x.detach() if logs.logs is None else logs.logs)
    if found is not None:
        note_logs(out, found)


def offer_again(func: Callable, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
    """Let a tensor's sum or product with a number, which loses next to nothing, give that tensor back."""
    x, number = args if len(args) == 2 and not kwargs else (None, None)
    inverse = _INVERSES.get(func.__name__)
    if inverse is None or not isinstance(x, Tensor) or not isinstance(number, int | float):
        return
    size = abs(number)
    if not (size <= 1 if inverse in (torch.add, torch.sub) else 2**-8 <= size <= 2**8):
        return
    if out is x or not (out.dtype is x.dtype in (torch.float32, torch.float64)) or out.stride() != x.stride():
        return
    place = x.shape, x.stride(), x.storage_offset()
    record = find_record(x)
    for reference, version, dtype, own_place, inverses in () if record is None else record.offered:
        stored = reference()
        if stored is not None and version == x._version and dtype is x.dtype and own_place == place:
            offer(out, stored, (BoundCall(inverse, (Tensor, number)), *inverses))


def give_up(
    x: Tensor,
    outer: tuple[Callable, Callable] | None,
    why: str = storage_report.EXACT_POLICY,
    keep: Callable[[Tensor], Saved] | None = None,
) -> None:
    """Replace the stand-ins in the storage of ``x``, which an op saves unpacked, or as ``keep`` packs it.

    ``outer``: hooks around the region.
    """
    if x.is_inference() or x.layout is not torch.strided:
        return
    record = find_record(x)
    if record is None:
        return
    carried, offered, record.carried, record.offered = record.carried, record.offered, (), ()
    for source in carried:
        give_up(source, outer, why, keep)
    for reference, version, dtype, place, inverses in offered:
        stored = reference()
        if stored is None or version != x._version or dtype is not x.dtype:
            continue
        out = x.detach().as_strided(*place)  # x may be a view of it: all of the storage is kept
        kept: Saved | None = keep(out) if keep else ((out,), AS_IT_IS)
        for inverse in inverses:
            kept = kept and function_of(inverse, (kept,), out)
        if kept is None:
            continue
        if storage_report.recorders:
            storage_report.withdraw(stored.handles)
            if not keep:
                storage_report.report_saved(kept, why)
        stored.fill(kept, outer)


def give_up_saturated(x: Tensor, outer: tuple[Callable, Callable] | None) -> None:
    """Save the saturating outputs unpacked that ``x``, an argument that an op needs exactly, is a function of."""
    record = find_record(x)
    if record is not None and (record.saturates or record.carried):
        give_up(x, outer, storage_report.NOT_NOISE)


def hold(x: Tensor, outer: tuple[Callable, Callable] | None) -> SavedByHook:
    """Save a tensor unpacked for an op that needs it exactly, and for the others that save it."""
    stored = SavedByHook()
    stored.fill(((x if x.grad_fn is None else x.detach(),), AS_IT_IS), outer)
    if is_tracked(x):
        give_up(x, outer, storage_report.NOT_NOISE)
    if x.layout is torch.strided and not (x.is_leaf and x.requires_grad):
        note_held(x, stored)
    return stored
