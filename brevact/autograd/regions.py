"""The region: code whose torch ops store packed activations.

While a region is active, a ``TorchFunctionMode`` hands each torch function that would save activations to its
counterpart (``brevact.autograd.ops``): a Function, or torch's own op with saved-tensor hooks that keep its input
as a Function would. The hooks catch what is left, too: functions without a counterpart, scripted code, other people's
``autograd.Function``s.

Regions nest: the innermost one decides. ``region(None)`` keeps full precision inside a packing region.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from types import FrameType, MethodWrapperType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brevact.autograd import known_values, storage_report
from brevact.autograd.compiled import mode as compiled_mode
from brevact.autograd.derivations import MOST_DECODED
from brevact.autograd.derived import Kind, derive_output, follow, operands_of
from brevact.autograd.interrupts import is_alive, leave_abandoned, leave_last, running
from brevact.autograd.keeper import EagerKeeper
from brevact.autograd.known_through_moves import follow as follow_exactly
from brevact.autograd.normalizing import NormInput
from brevact.autograd.op_names import OP_NAMES
from brevact.autograd.ops import (
    AVERAGES,
    HANDLERS,
    LAYERS,
    LINEAR,
    LOOKUPS,
    METADATA,
    MOVES,
    NORMS,
    ROUNDS_FORWARD,
    UNVERSIONED,
    run_counterpart,
)
from brevact.autograd.ops.base import is_activation, may_overwrite, out_of_place
from brevact.autograd.ops.metadata import stores_nothing
from brevact.autograd.ops.rounding import ALGORITHMS, must_not_round
from brevact.autograd.saved import Saved
from brevact.autograd.saved_tensor_hooks import SavedTensorHooks, sizes_of
from brevact.autograd.seeds import SeedStream
from brevact.autograd.settings import BackwardSettings
from brevact.autograd.short_ways import SHORT_WAYS
from brevact.autograd.store import find_packed, keep_as_it_is, keep_packed, reported
from brevact.autograd.transforms import check_rounding, is_tracing, is_transformed
from brevact.autograd.weights import ModelState, is_known_activation, is_parameter, is_weight, tensors_in
from brevact.private_names.lookup import refuse_without
from brevact.private_names.of_torch import (
    REGIONS,
    frame_callback,
    is_any_autocast_enabled,
    pop_hooks,
    push_hooks,
    top_hooks,
)


class _Active(threading.local):
    """The regions that this thread is in, outermost first."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.disabled = 0


active = _Active()
_is_grad_enabled = torch.is_grad_enabled
_is_compiling = torch.compiler.is_dynamo_compiling


def current_region() -> Region | None:
    """Return the innermost region of this thread, or None."""
    return active.regions[-1] if active.regions else None


def packing_region() -> Region | None:
    """Return the region in which the caller runs, if what it stores is packed; None in a traced graph."""
    if _is_compiling() or not active.regions or not _is_grad_enabled() or frame_callback() is not None:
        return None
    region = active.regions[-1]
    if not region.packs or top_hooks(True) != region.hooks.pair or not is_alive(sys._getframe(1)):
        return None
    return region


class Region(EagerKeeper):
    """One entry of the stack of active regions; the outermost one owns the mode, the seeds and the module list.

    Args:
        settings: what ops inside store, or None for full precision.
        owner: the module whose forward runs in the region; None for a ``with`` block.
        norms_only: whether nothing is packed, and norms alone go on with rounded values: for a module in eval mode.
    """

    def __init__(
        self, settings: BackwardSettings | None, owner: nn.Module | None = None, *, norms_only: bool = False
    ) -> None:
        self.given = settings
        #: What some ops store in place of ``settings``, by their names.
        self.by_op = {} if settings is None else settings.by_op
        if settings is not None and settings.quantizer is None:
            settings = None
        self.settings = settings
        self.owner = owner
        self.norms_only = norms_only
        self.packs = settings is not None and not norms_only
        self.rounds_norms = settings is not None and settings.quantizes_forward
        self.parent: Region | None = None
        self.places = itertools.count()  # of the tensors that a quantizer with statistics keeps
        self._of_ops: dict[tuple[str, bool], Region] = {}

    def __enter__(self) -> Region:
        refuse_without(REGIONS)
        self.parent = current_region()
        self.hooks: SavedTensorHooks = SavedTensorHooks(self, None if self.parent is None else self.parent.hooks)
        self.hooks.__enter__()  # raises under torch.func transforms: nothing else has changed yet
        if self.parent is None:
            self.seeds = SeedStream(self.owner, replays=self.hooks.are_in_recomputation())
            self.state = ModelState(self.owner)
            self.mode = _EagerMode()
            self.mode.__enter__()
        else:
            self.seeds, self.state, self.mode = self.parent.seeds, self.parent.state, self.parent.mode
        active.regions.append(self)
        self._describe()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.hooks.__exit__(*exc_info)
        active.regions.pop()
        if self.parent is None:
            self.mode.__exit__(*exc_info)
            self.state.close()
            self.seeds.close()
        else:
            self.parent._describe()

    def _describe(self) -> None:
        """Tell Dynamo about the region, which asks its mode."""
        self.mode.spelled, self.mode.norms_only = compiled_mode.text_of(self.given), self.norms_only

    def of_op(self, name: str) -> Region:
        """Return the region, not entered yet, of an op that has settings of its own (``by_op``).

        It packs nothing where this one does not: without gradients, or under saved-tensor hooks that were entered here.
        """
        norms_only = self.norms_only or not _is_grad_enabled() or top_hooks(True) != self.hooks.innermost
        key = name, norms_only
        if key not in self._of_ops:
            self._of_ops[key] = Region(self.by_op[name], self.owner, norms_only=norms_only)
        return self._of_ops[key]

    def is_weight(self, x: Tensor) -> bool:
        """Return whether ``x`` is a weight of the model that runs in the region."""
        return is_weight(x, self.state)

    def are_weights(self, arguments: Any, *, looks_up: bool = False) -> bool:
        """Return whether the tensors among nested arguments are weights, apart from masks, integers and constants.

        Not in a lookup, where integers are indices: rows of a table that trains are activations, as an embedding's are.
        """
        found = trains = indexed = False
        for x in tensors_in(arguments):
            if is_weight(x, self.state):
                found, trains = True, trains or x.requires_grad
            elif x.requires_grad:
                return False
            elif x.numel() != 1 and x.dtype is not torch.bool:
                if x.is_floating_point():
                    return False
                indexed = True
        return found and not (looks_up and indexed and trains)

    def makes_weight(self, func: Callable, args: tuple, kwargs: dict) -> bool:
        """Return whether a function makes a weight of weights."""
        if func is torch.eye:  # parametrizations add it; it is of no batch
            return True
        is_layer = (func in LAYERS and func not in NORMS) or (args and is_known_activation(args[0]))
        return not is_layer and self.are_weights((args, kwargs), looks_up=func in LOOKUPS)

    def mark_weight(self, result: Any, weight: bool) -> None:
        """Note whether what a function returned is a weight or an activation."""
        if isinstance(result, Tensor):
            is_marked = result.is_floating_point() or result.dtype is torch.bool
        else:
            is_marked = isinstance(result, tuple | list)
        if is_marked:
            self.state.mark_weight(result, weight=weight)

    def packs_for(self, saver: FrameType) -> bool:
        """Return whether what autograd saves below a frame is packed.

        Not by a graph that was compiled beforehand, nor by a function of torch's that decomposes matrices.
        """
        if not is_alive(saver) or compiled_mode.is_compiled_graph(saver):
            return False
        return not (_is_in_algorithm(saver) or _is_in_algorithm(saver.f_back))  # behind `Function.apply`

    def is_watched(self) -> bool:
        """Return whether somebody around the region sees each tensor that it keeps: hooks, or a report."""
        return bool(storage_report.recorders) or not self.hooks.are_alone()

    #: Whether a tensor is one that a Function of ours can pack.
    is_activation = staticmethod(is_activation)

    def packs_layer_input(self, x: Any) -> bool:
        """Return whether the input of a layer with weights can be packed: an activation by its place."""
        return type(x) is Tensor and is_activation(x)

    def packs_input(self, x: Any) -> bool:
        """Return whether the input of a function can be packed: floating point and no weight."""
        return type(x) is Tensor and is_activation(x) and (x.grad_fn is None or not is_weight(x, self.state))

    def apply(self, function: type[torch.autograd.Function], *args: Any) -> Any:
        """Apply one of our Functions, whose saved tensors are packed already."""
        pop_hooks()
        try:
            return function.record(self, *args)
        finally:
            push_hooks(*self.hooks.pair)

    def torch_runner(self, *tensors: Tensor | None) -> Region | None:
        """Return the region, which runs torch's own layer that saves these tensors.

        Not where autocast lets it save copies of them, nor inference tensors, which torch refuses to save.
        """
        if is_any_autocast_enabled():
            return None
        for x in tensors:
            if x is not None and x.is_inference():
                return None
        return self

    def run_torch_norm(self, norm: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Run torch's own norm as :meth:`run_torch` does; of its input the hooks keep the normalized values."""
        hooks = self.hooks
        try:
            hooks.layer, hooks.waiting = (input, weight), []
            hooks.buffers = norm.running_mean, norm.running_var
            out, mean, spread = norm.forward(input, weight, bias)
            kept = hooks.keep_waiting(NormInput(norm, mean.detach(), spread.detach(), input.dtype, alone=True))
            derive_output(self, norm, kept, out, weight, bias)
            self.state.mark_activation(out)
            return out
        finally:
            hooks.layer = hooks.waiting = None
            hooks.buffers = None, None

    def run_torch(self, layer: Callable[..., Tensor], input: Tensor, weight: Tensor | None, *args: Any) -> Tensor:
        """Run torch's own layer, whose gradient is that of a Function of ours, and let hooks keep its input.

        It saves its input, its weight and statistics, whoever needs a gradient. The two calls of hooks for each cost
        less than a Function.
        """
        hooks = self.hooks
        try:
            hooks.layer = input, weight
            out = layer(input, weight, *args)
        finally:
            hooks.layer = None
        self.state.mark_activation(out)
        return out

    def run_torch_function(self, function: Callable[[Tensor], Tensor], input: Tensor, kept: Saved | None) -> Tensor:
        """Run a function of torch's that saves one tensor, in the place of which hooks keep what keeps it."""
        hooks = self.hooks
        try:
            hooks.layer, hooks.kept = (input, None), kept
            out = function(input)
        finally:
            hooks.layer = hooks.kept = None
        self.state.mark_activation(out)
        return out

    def apply_to_weight(self, function: type[torch.autograd.Function], *args: Any) -> Any:
        """Apply one of our Functions that returns a weight, and note that it does."""
        pop_hooks()
        try:
            result = function.record(*args)
        finally:
            push_hooks(*self.hooks.pair)
        self.state.mark_weight(result, weight=True)
        return result

    def keep(self, x: Tensor, *, share: bool = True, norm: NormInput | None = None) -> Saved:
        """Keep a floating-point activation for backward as the settings say; of a norm's input, what it normalizes.

        A view of a parameter, learned queries that several samples share, is none.
        """
        if x._is_view() and is_parameter(x._base):
            kept = keep_as_it_is(x.detach(), storage_report.WEIGHT)
            return kept if norm is None else norm.unpacked(kept)
        settings = self.settings
        repeats = settings.draws_size and self.hooks.are_in_checkpoint()
        place = next(self.places) if settings.observes else 0
        return keep_packed(x, settings, self.seeds, share, repeats, place, norm, self.hooks.scope)

    def find_known(self, x: Tensor) -> Saved | None:
        """Return what ``x`` is known by, if that is as good as what the region would keep."""
        return known_values.find(x, self.settings, self.hooks.scope)

    def find_kept(self, x: Tensor) -> Saved | None:
        """Return what ``x`` is known by, or what keeps it for an op that has run."""
        known = self.find_known(x)
        if known is None and self.settings.derives and self.hooks.scope is None:  # where it lives until backward
            known = find_packed(x, self.settings)
        return known

    def register(self, out: Tensor, kept: Saved, *, is_dirty: bool = False) -> None:
        """Remember what a tensor is known by; ``is_dirty`` says that a Function is about to mark it as changed."""
        known_values.register(out, *kept, is_dirty=is_dirty, scope=self.hooks.scope)

    def keep_levels(self, x: Tensor, norm: NormInput) -> Saved:
        """Keep the input of a norm by a quantizer that has a form for normalized values."""
        return keep_packed(x, self.settings.of_normalized, self.seeds, norm=norm)

    def keep_activation(self, x: Tensor) -> Saved:
        """Keep an operand that may be a weight: packed if it is an activation, as it is otherwise.

        A leaf that requires a gradient is somebody's variable and stays in memory anyway.
        """
        if x.is_leaf and x.requires_grad:
            return keep_as_it_is(x, storage_report.VARIABLE)
        return self.keep_weight(x) if self.is_weight(x) else self.keep(x)

    def keep_weight(self, x: Tensor) -> Saved:
        """Keep a weight: as it is, or what a fake-quantized one is computed from again."""
        known = known_values.find(x)
        return keep_as_it_is(x, storage_report.WEIGHT) if known is None else reported(known)


class _EagerMode(compiled_mode.RegionMode):
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
        if type(func) is MethodWrapperType or func in METADATA:
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
            name = OP_NAMES.get(func)
            if name in region.by_op and not (is_transformed() or _is_in_algorithm(sys._getframe(1))):
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
        short, handler = SHORT_WAYS.get(func), HANDLERS.get(func)
        if (short or handler) and running.forwards and not is_alive(sys._getframe(1)):
            return func(*args, **kwargs)
        if short is not None and not region.is_watched() and not is_any_autocast_enabled():
            result = short(region, func, args, kwargs)
            if result is not None:
                return result
        is_inside = _is_in_algorithm(sys._getframe(1))
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
                storage_report.report_op(func, storage_report.WEIGHT if makes_weight else storage_report.NOT_NOISE)
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
                region.hooks.cast_shapes = frozenset()
        region.mark_weight(result, makes_weight)
        if func in _FOLLOWED and not makes_weight:
            _follow(region, func, args, kwargs, result, operands)
        return result


_FOLLOWED = dict.fromkeys(LINEAR, Kind.LINEAR) | dict.fromkeys(AVERAGES, Kind.AVERAGE) | dict.fromkeys(MOVES, Kind.MOVE)
#: Those that may overwrite an argument, of which has to be known before the call what keeps it.
_OVERWRITES = frozenset(func for func in _FOLLOWED if may_overwrite(func))


def _follow(
    region: Region,
    func: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    result: Any,
    operands: list[tuple[Tensor, Saved | None]] | None,
) -> None:
    """Remember the result of a call as a function of what keeps its arguments.

    Args:
        region: the region that runs.
        func: a function that moves elements, takes means, or is linear.
        args: its arguments.
        kwargs: its keyword arguments.
        result: what it has returned.
        operands: where it may overwrite an argument, what kept them before the call (``operands_of``).
    """
    kind = _FOLLOWED[func]
    if func in MOVES:
        follow_exactly(func, args, kwargs, result)
    if type(result) is not Tensor or not region.settings.derives or region.find_known(result) is not None:
        return
    tensors = tensors_in((args, kwargs))
    if kind is Kind.AVERAGE and result.numel() * MOST_DECODED < tensors[0].numel():
        return
    if func not in _OVERWRITES:
        operands = operands_of(region, tensors)
    if operands is not None:
        follow(region, out_of_place(func), args, kwargs, result, operands, kind)


def _is_in_algorithm(caller: FrameType | None) -> bool:
    """Whether a frame runs one of the functions that torch composes of matrix products and decompositions."""
    return caller is not None and caller.f_globals.get("__name__") in ALGORITHMS


def _call_norm_aside(region: Region, func: Callable, args: tuple, kwargs: dict) -> Any:
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


def _frozen_weight_shapes(region: Region, arguments: Any) -> frozenset[tuple[int, ...]]:
    """Sizes of the weights without gradient among the arguments, of which autocast may save anonymous copies."""
    if not is_any_autocast_enabled():
        return frozenset()
    return frozenset(sizes_of(x) for x in tensors_in(arguments) if not x.requires_grad and region.is_weight(x))


class region(ContextDecorator):
    """Context manager and decorator: a block of code runs in a region.

    Args:
        settings: what the ops inside store for backward; None keeps full precision, also inside another region.
    """

    def __init__(self, settings: BackwardSettings | None) -> None:
        self.settings = settings
        self._entered: list[Region | None] = []

    @compiled_mode.skipped_by_dynamo
    def __enter__(self) -> None:
        if _is_compiling() or compiled_mode.is_exporting():
            compiled_mode.TracingMode(compiled_mode.text_of(self.settings)).__enter__()
            return
        leave_abandoned(sys._getframe(1))
        entered = None if active.disabled or is_tracing() else Region(self.settings).__enter__()
        self._entered.append(entered)

    @compiled_mode.skipped_by_dynamo
    def __exit__(self, *exc_info: object) -> None:
        if _is_compiling() or compiled_mode.is_exporting():
            compiled_mode.leave(None)
            return
        entered = self._entered.pop()
        if entered is not None:
            while running.forwards and active.regions[-1] is not entered:  # forwards that an interrupt ended
                leave_last()
            entered.__exit__(*exc_info)


@contextmanager
def regions_disabled() -> Iterator[None]:
    """Run a block in which entering a region does nothing (to measure a model as it is without brevact)."""
    active.disabled += 1
    try:
        yield
    finally:
        active.disabled -= 1
