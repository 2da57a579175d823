"""Dispatch each torch function in an eager region: to its counterpart, or to torch under the region's hooks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType, MethodWrapperType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from brevact.autograd.call_arguments import PLAIN_TYPES, as_given, as_tensors, is_stored, tensors_of_call
from brevact.autograd.deriving.derived import MOST_DECODED, Kind, operands_of, track_derived, track_moved
from brevact.autograd.interop.other_code import ALGORITHMS, is_in_algorithm, is_of_torch, label_of
from brevact.autograd.ops.base import out_of_place
from brevact.autograd.ops.op import Op
from brevact.autograd.ops.saved_by_torch import hand_out_memory, stores_nothing
from brevact.autograd.region.rows import ROWS, row_of
from brevact.autograd.region.running import active, check_rounding, is_alive, is_transformed, leave_abandoned
from brevact.autograd.saving import storage_report
from brevact.autograd.saving.saved_tensor_hooks import sizes_of
from brevact.autograd.saving.stand_ins import carry, carry_logs, offer_again
from brevact.autograd.saving.storages import any_tracked, end_known_values, find_record, note_made
from brevact.autograd.saving.store import INTEGERS
from brevact.compiler import marks
from brevact.private_names.of_torch import (
    functorch_interpreter,
    is_any_autocast_enabled,
    is_torch_function_on,
    pop_hooks,
    push_hooks,
    skipped_by_dynamo,
    top_hooks,
)

_is_grad_enabled = torch.is_grad_enabled


class EagerMode(marks.RegionMode):
    """Hands torch functions to their counterparts; runs the others and marks which results are activations."""

    @skipped_by_dynamo
    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        row = ROWS.get(func)
        if row is None:
            if type(func) is MethodWrapperType:  # an attribute
                return func(*args, **kwargs)
            row = row_of(func)
            if row.written is not None:
                for x in row.written(args, kwargs):
                    end_known_values(x)
        elif row.is_metadata:
            if row.is_unversioned:
                hand_out_memory(func, args, sys._getframe(1))
            if stores_nothing(func, args):
                return func(*args, **kwargs)
        result = None
        for kind in types:
            if kind not in PLAIN_TYPES and (
                not issubclass(kind, Tensor) or (is_torch_function_on() and is_stored(kind))
            ):
                with self:  # a Brevitas QuantTensor or a subclass: its own rule runs, the mode sees the ops inside
                    result = kind.__torch_function__(func, types, args, kwargs)
                if result is not NotImplemented:
                    return result
        regions = active.regions
        if not regions or result is NotImplemented:
            return func(*args, **kwargs) if result is None else result
        region = regions[-1]
        if not is_torch_function_on() and row.takes_tensors and not is_in_algorithm(sys._getframe(1)):
            given: list[tuple[Tensor, Tensor]] = []  # in a subclass's rule: its tensors are saved as plain tensors
            args, kwargs = as_tensors((args, kwargs), given)
            if given:
                return as_given(self.__torch_function__(func, (), args, kwargs), given)
        if not args and "input" in kwargs and row.handler is not None:  # the first one, whatever the order of names
            args, kwargs = (kwargs["input"],), {name: x for name, x in kwargs.items() if name != "input"}
        if region.by_op:
            if row.name in region.by_op and not (is_transformed() or is_in_algorithm(sys._getframe(1))):
                with region.region_for_op(row.name):
                    return self.__torch_function__(func, types, args, kwargs)
            if func is F.multi_head_attention_forward and row.handler is not None:  # its ops may have rules
                return row.handler(region, func, *args, **kwargs)
        if row.is_backward and not (region.packs and region.settings.double_backward):
            return _run_backward(region, func, args, kwargs)
        if storage_report.recorders:
            storage_report.report_op(func, storage_report.NO_QUANTIZER)
        # Hooks entered inside the region: a checkpointed function saves nothing, and is recomputed outside the region.
        if not region.packs or not _is_grad_enabled() or top_hooks(True) != region.hooks.pair:
            return _run_unpacked(region, row, func, args, kwargs)
        if forward_ad._current_level >= 0 or functorch_interpreter() is not None:
            if region.rounds_norms and row.rounds_forward:
                check_rounding()
            return region.hooks.run_aside(func, args, kwargs)
        return _run_packed(region, row, func, args, kwargs, sys._getframe(1))


def _run_counterpart(row: Op, region: Any, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a counterpart; NotImplemented for arguments that it does not support (``out=``), too few or too many.

    Torch then handles them or raises the error. NotImplemented, too, if a policy is lossless and torch's own gradient
    differs in the last bits, and for double backward, which Functions of ours do not support.
    """
    settings = region.settings
    if settings.leaves_ops_to_torch and (
        (settings.is_exact and not row.is_bit_exact) or (settings.double_backward and not row.twice)
    ):
        return NotImplemented
    assert row.handler is not None
    try:
        return row.handler(region, func, *args, **kwargs)
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:  # raised inside the handler
            raise
    return NotImplemented


def _run_packed(region: Any, row: Op, func: Callable, args: tuple, kwargs: dict[str, Any], caller: FrameType) -> Any:
    is_inside = caller.f_globals.get("__name__") in ALGORITHMS
    tensors = tensors_of_call(args, kwargs)
    operands = operands_of(region, tensors) if row.overwrites else None
    if row.picks_extremes:
        region.hooks.give_up_saturated(tensors)
    if row.handler is not None:
        if active.forwards and not is_alive(caller):
            return func(*args, **kwargs)
        is_empty = args and type(args[0]) is Tensor and not args[0].numel()  # torch knows its gradients' strides
        if not (is_inside or is_empty or (row.is_norm and region.makes_weight(row, tensors))):
            result = _run_counterpart(row, region, func, args, kwargs)
            if result is not NotImplemented:
                if row.is_tracked:
                    _track(region, row, func, args, kwargs, result, tensors, operands)
                return result
    if region.makes_weight(row, tensors, kwargs.get("out")):
        if storage_report.recorders:
            storage_report.report_op(func, storage_report.WEIGHT)
        result = region.hooks.make_weight(func, args, kwargs)
        region.mark(result, is_weight=True)
        return result
    hooks, settings = region.hooks, region.settings
    stays = is_inside or (
        row.must_not_round is not None and row.must_not_round(region, (*args, *kwargs.values()) if kwargs else args)
    )
    if stays and row.is_backward and settings.double_backward:
        return hooks.run_backward(func, args, kwargs)
    if stays and not settings.is_exact:
        if storage_report.recorders:
            is_torchs = is_of_torch(func)
            why = storage_report.NOT_NOISE if is_torchs else storage_report.other_code(label_of(func))
            storage_report.report_op(func, why)
        run = hooks.run_exactly if is_of_torch(func) and not settings.double_backward else hooks.run_aside
        result = run(func, args, kwargs)
    elif row.is_pointwise and hooks.pass_on(tensors):
        result = hooks.run_aside(func, args, kwargs)
    else:
        hooks.cast_shapes = _NO_SHAPES
        if is_any_autocast_enabled():  # it may save anonymous copies of weights without gradient
            hooks.cast_shapes = frozenset(sizes_of(x) for x in tensors if not x.requires_grad and region.is_weight(x))
        hooks.reads_sizes = row.reads_sizes
        hooks.places = 0 if row.places is None else row.places(tensors)
        try:
            result = func(*args, **kwargs)
        finally:
            hooks.cast_shapes, hooks.reads_sizes, hooks.places = None, False, 0
    region.mark(result, is_weight=False)
    if type(result) is Tensor:
        if result.dtype in INTEGERS:
            note_made(result, tensors)
        if row.is_tracked:
            _track(region, row, func, args, kwargs, result, tensors, operands)
    return result


def _run_unpacked(region: Any, row: Op, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    makes_weight = region.makes_weight(row, tensors_of_call(args, kwargs), kwargs.get("out"))
    if region.rounds_norms and row.rounds_forward and not makes_weight:
        check_rounding()
        result = _call_norm_aside(region, row, func, args, kwargs)
    else:
        result = func(*args, **kwargs)
    region.mark(result, is_weight=makes_weight)
    return result


def _run_backward(region: Any, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a backward pass as if after the region: without its mode, and checkpoints recompute in their regions."""
    if not is_alive(sys._getframe(1)):
        return func(*args, **kwargs)
    regions, active.regions = active.regions, []
    try:
        with region.hooks.suspended if top_hooks(True) == region.hooks.pair else nullcontext():
            try:
                return func(*args, **kwargs)
            finally:
                leave_abandoned(sys._getframe())  # forwards that an interrupt ended, before the hooks are back
    finally:
        active.regions = regions


#: Elements of a sum of squares, such as of a complex number, that may be held for its root.
_MOST_SUMMED = 4
_NO_SHAPES: frozenset[tuple[int, ...]] = frozenset()


def _track(
    region: Any, row: Op, func: Callable, args: tuple, kwargs: dict, result: Any, tensors: list[Tensor], operands: Any
) -> None:
    """Record a call's result as a function of its arguments; ``operands``: saved forms from before the call."""
    if type(result) is not Tensor:
        return
    is_tracked = any_tracked(tensors)
    if not (row.overwrites or is_tracked):
        return
    if is_tracked == 2 and (row.is_pointwise or _is_short_sum(func, tensors, result)):
        carry(tensors, result)
    adds = row.kind is Kind.SUM or (row.kind is Kind.BILINEAR and len(tensors) == 1)
    carry_logs(func, args, kwargs, tensors, result, adds=adds)
    if row.kind is None:
        return
    # A new result is known only if the counterpart recorded it; a move may return a view of a known tensor.
    is_new = row.kind is not Kind.MOVE and not row.overwrites
    if row.is_pointwise and len(args) == 2 and type(args[1]) in (int, float, bool):
        offer_again(func, args, kwargs, result)
    record = find_record(result) if is_new else None
    if record is not None and record.known is not None:
        return
    if row.kind is Kind.MOVE:
        track_moved(func, args, kwargs, tensors, result)
    if not region.settings.derives or (not is_new and region.find_known(result) is not None):
        return
    if not row.overwrites:
        if row.kind is Kind.AVERAGE and result.numel() * MOST_DECODED < tensors[0].numel():
            return
        operands = operands_of(region, tensors)
    if operands is None:
        return
    track_derived(region, out_of_place(func), args, kwargs, result, operands, row.kind)


def _is_short_sum(func: Callable, tensors: list[Tensor], result: Tensor) -> bool:
    return func.__name__ == "sum" and tensors[0].numel() <= _MOST_SUMMED * result.numel()


def _call_norm_aside(region: Any, row: Op, func: Callable, args: tuple, kwargs: dict) -> Any:
    if row.handler is not None and is_alive(sys._getframe(3)):
        push_hooks(*region.hooks.pair)  # on top, where our Function pops them: others inside stay in force
        try:
            result = _run_counterpart(row, region, func, args, kwargs)
        finally:
            pop_hooks()
        if result is not NotImplemented:
            return result
    return func(*args, **kwargs)
