"""The way of every torch function through an eager region: to its counterpart, or to torch with hooks around it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType, MethodWrapperType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brevact.autograd import known_values, storage_report
from brevact.autograd.compiled import mode as compiled_mode
from brevact.autograd.derivations import MOST_DECODED
from brevact.autograd.derived import Kind, follow, operands_of
from brevact.autograd.interrupts import is_alive, running
from brevact.autograd.known_through_moves import follow as follow_exactly
from brevact.autograd.op_names import OP_NAMES, op_name
from brevact.autograd.ops import (
    AVERAGES,
    BILINEAR,
    HANDLERS,
    METADATA,
    MOVES,
    NORMS,
    ROUNDS_FORWARD,
    SUMS,
    UNVERSIONED,
    run_counterpart,
)
from brevact.autograd.ops.base import is_activation, may_overwrite, out_of_place
from brevact.autograd.ops.metadata import stores_nothing
from brevact.autograd.ops.rounding import is_in_algorithm, is_of_torch, must_not_round
from brevact.autograd.other_code import label_of
from brevact.autograd.saved import Saved
from brevact.autograd.saved_tensor_hooks import sizes_of
from brevact.autograd.short_ways import SHORT_WAYS
from brevact.autograd.transforms import check_rounding, is_transformed
from brevact.autograd.weights import tensors_in
from brevact.private_names.of_torch import frame_callback, is_any_autocast_enabled, pop_hooks, push_hooks, top_hooks

_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_dynamo_compiling


class _Active(threading.local):
    """The regions that this thread is in, outermost first."""

    def __init__(self) -> None:
        self.regions: list[Any] = []
        self.disabled = 0


active = _Active()


def current_region() -> Any:
    """Return the innermost ``Region`` of this thread, or None."""
    return active.regions[-1] if active.regions else None


def packing_region() -> Any:
    """Return the region in which the caller runs, if what it stores is packed; None in a traced graph."""
    if _is_compiling() or not active.regions or not _is_grad_enabled() or frame_callback() is not None:
        return None
    region = active.regions[-1]
    if not region.packs or top_hooks(True) != region.hooks.pair or not is_alive(sys._getframe(1)):
        return None
    return region


class EagerMode(compiled_mode.RegionMode):
    """Hands torch functions to their counterparts; runs the others and notes which results are activations."""

    @compiled_mode.skipped_by_dynamo
    def __torch_function__(
        self, func: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_compiling():
            return compiled_mode.traced_call(self, func, types, args, kwargs)
        if frame_callback() is not None:  # between the graphs of a compiled model
            return compiled_mode.out_of_dynamo(self.__torch_function__)(func, types, args, kwargs)
        if func in SHORT_WAYS:
            result = self._shortly(func, types, args, kwargs, sys._getframe(1))
            if result is not None:
                return result
        elif type(func) is MethodWrapperType or func in METADATA:
            if func in UNVERSIONED and args and is_activation(args[0]):
                known_values.forget(args[0])
            if stores_nothing(func, args):
                return func(*args, **kwargs)
        for kind in types:
            if not issubclass(kind, Tensor):  # a Brevitas QuantTensor: its own rule runs, the mode sees the ops inside
                with self:
                    return kind.__torch_function__(func, types, args, kwargs)
        regions = active.regions
        if not regions:
            return func(*args, **kwargs)
        region = regions[-1]
        if region.by_op:
            name = op_name(func)
            if (
                name is not None
                and name in region.by_op
                and not (is_transformed() or is_in_algorithm(sys._getframe(1)))
            ):
                with region.of_op(name):
                    return self.__torch_function__(func, types, args, kwargs)
            if func is F.multi_head_attention_forward:  # whose ops may have settings of their own
                return HANDLERS[func](region, func, *args, **kwargs)
        if storage_report.recorders:
            storage_report.report_op(func, storage_report.NO_QUANTIZER)
        # Not without gradients, not at full precision, and not under saved-tensor hooks that were entered inside the
        # region: a checkpointed function stores nothing, and its recomputation runs outside the region.
        if not region.packs or not _is_grad_enabled() or top_hooks(True) != region.hooks.pair:
            if region.rounds_norms and func in ROUNDS_FORWARD and not region.makes_weight(func, args, kwargs):
                check_rounding()
                result = _call_norm_aside(region, func, args, kwargs)
            else:
                result = func(*args, **kwargs)
            region.mark_weight(result, region.makes_weight(func, args, kwargs))
            return result
        if is_transformed():
            if region.rounds_norms and func in ROUNDS_FORWARD:
                check_rounding()
            with region.hooks.suspended:
                return func(*args, **kwargs)
        handler = HANDLERS.get(func)
        if handler and running.forwards and not is_alive(sys._getframe(1)):
            return func(*args, **kwargs)
        is_inside = is_in_algorithm(sys._getframe(1))
        operands = operands_of(region, tensors_in((args, kwargs))) if func in _OVERWRITES else None
        if handler and not is_inside and not (func in NORMS and region.makes_weight(func, args, kwargs)):
            result = run_counterpart(handler, region, func, args, kwargs)
            if result is not NotImplemented:
                if func in _FOLLOWED:
                    _follow(region, func, args, kwargs, result, operands)
                return result
        makes_weight = region.makes_weight(func, args, kwargs)  # whose norm, say, is one, too
        if makes_weight or (not region.settings.is_exact and (is_inside or must_not_round(region, func, args))):
            if storage_report.recorders:
                _report_exact(func, makes_weight)
            if makes_weight:
                result = region.hooks.make_weight(func, args, kwargs)
            else:
                with region.hooks.suspended:
                    result = func(*args, **kwargs)
        else:
            region.hooks.cast_shapes = _frozen_weight_shapes(region, (args, kwargs))
            try:
                result = func(*args, **kwargs)
            finally:
                region.hooks.cast_shapes = None
        region.mark_weight(result, makes_weight)
        if func in _FOLLOWED and not makes_weight:
            _follow(region, func, args, kwargs, result, operands)
        return result

    def _shortly(
        self, func: Callable, types: tuple[type, ...], args: tuple, kwargs: dict[str, Any], caller: FrameType
    ) -> Tensor | None:
        """Run a function by its short way where the region packs, alone; None where more has to be found out."""
        regions = active.regions
        if not regions:
            return None
        region = regions[-1]
        if not region.is_alone or not region.packs or storage_report.recorders:
            return None
        if region.by_op and OP_NAMES.get(func) in region.by_op:
            return None
        for kind in types:
            if kind not in _PLAIN_TYPES:
                return None
        if not _is_grad_enabled() or top_hooks(True) != region.hooks.pair or is_transformed():
            return None
        if is_any_autocast_enabled() or not is_alive(caller):
            return None
        return SHORT_WAYS[func](region, func, args, kwargs)


_PLAIN_TYPES = frozenset((Tensor, nn.Parameter))
_FOLLOWED = {
    **dict.fromkeys(SUMS, Kind.SUM),
    **dict.fromkeys(BILINEAR, Kind.BILINEAR),
    **dict.fromkeys(AVERAGES, Kind.AVERAGE),
    **dict.fromkeys(MOVES, Kind.MOVE),
}
#: Those that may overwrite an argument, of which has to be known before the call what keeps it.
_OVERWRITES = frozenset(func for func in _FOLLOWED if may_overwrite(func))


def _follow(
    region: Any,
    func: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    result: Any,
    operands: list[tuple[Tensor, Saved | None]] | None,
) -> None:
    """Remember the result of a call that moves elements, takes means, or is linear, as a function of its arguments.

    Where it may overwrite an argument, ``operands`` says what kept them before the call.
    """
    kind = _FOLLOWED[func]
    if func in MOVES:
        follow_exactly(func, args, kwargs, result)
    if type(result) is not Tensor or not region.settings.derives:
        return
    is_new = func not in MOVES and func not in _OVERWRITES  # others return memory of which something may be known
    if known_values.is_marked(result) if is_new else region.find_known(result) is not None:
        return
    tensors = tensors_in((args, kwargs))
    if kind is Kind.AVERAGE and result.numel() * MOST_DECODED < tensors[0].numel():
        return
    if func not in _OVERWRITES:
        operands = operands_of(region, tensors)
    if operands is not None:
        follow(region, out_of_place(func), args, kwargs, result, operands, kind)


def _call_norm_aside(region: Any, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run a norm where a region packs nothing: it goes on with rounded values there, too."""
    if is_alive(sys._getframe(2)):
        push_hooks(*region.hooks.pair)  # on top, where a Function of ours takes them off: others inside stay in force
        try:
            result = run_counterpart(HANDLERS[func], region, func, args, kwargs)
        finally:
            pop_hooks()
        if result is not NotImplemented:
            return result
    return func(*args, **kwargs)


def _report_exact(func: Callable, makes_weight: bool) -> None:
    """Tell the recorder of a report why a function stores what torch stores."""
    if makes_weight:
        storage_report.report_op(func, storage_report.WEIGHT)
    elif is_of_torch(func):
        storage_report.report_op(func, storage_report.NOT_NOISE)
    else:
        storage_report.report_op(func, storage_report.other_code(label_of(func)))


def _frozen_weight_shapes(region: Any, arguments: Any) -> frozenset[tuple[int, ...]]:
    """Sizes of the weights without gradient among the arguments, of which autocast may save anonymous copies."""
    if not is_any_autocast_enabled():
        return frozenset()
    return frozenset(sizes_of(x) for x in tensors_in(arguments) if not x.requires_grad and region.is_weight(x))
