"""Regions in code that Dynamo traces for `torch.compile`.

Dynamo executes Python symbolically: :func:`traced_call` for each torch function, :func:`enter` and :func:`leave` for
each module. These therefore use only code that Dynamo traces, and have no state but the stack of modes. A function with
a counterpart becomes a graph node (``nodes.call_in_graph``); the compiler handles the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from brevact.autograd.abandoned_forwards import active
from brevact.autograd.compiled.graphs import show_losses, watch_graph
from brevact.autograd.compiled.nodes import DERIVING, FULL_PRECISION, NAMES, call_in_graph, rounds_norm
from brevact.autograd.first_region import before_first_region
from brevact.autograd.settings import BackwardSettings
from brevact.private_names.of_torch import (
    CheckpointHooks,
    HigherOrderOperator,
    frame_callback,
    function_apply_code,
    function_stack_at,
    get_overridable_functions,
    len_function_stack,
    skip_code,
)

F = TypeVar("F", bound=Callable[..., Any])


def skipped_by_dynamo(function: F) -> F:
    """Let Dynamo skip a function that Python calls, and trace it if traced code calls it."""
    skip_code(function.__code__)
    return function


def is_compiled_graph(frame: FrameType) -> bool:
    """Return whether the Function applied in this frame, which autograd saves tensors for, is a compiled graph."""
    if function_apply_code is not None:
        if frame.f_code is not function_apply_code:
            return False
        frame = frame.f_back or frame
    return frame.f_globals.get("__name__", "").startswith("torch._functorch._aot_autograd.")


#: Whether `torch.export` runs: an exported program has no backward pass, so it packs nothing; norms that return rounded
#: values do so there, too.
is_exporting = torch.compiler.is_exporting
out_of_dynamo = torch.compiler.disable
_is_compiling = torch.compiler.is_dynamo_compiling


@skipped_by_dynamo
def run_outside_dynamo(function: Callable[..., Any], *args: Any) -> None:
    """Call a function of ours without letting Dynamo compile it."""
    if frame_callback() is not None:
        function = out_of_dynamo(function)
    function(*args)


# Dynamo passes only this set's functions to modes; F.hardswish and torch.relu_ are missing from it.
get_overridable_functions().update(NAMES)
before_first_region(show_losses)


def _watch_checkpoints() -> None:
    """Let Dynamo detect a non-reentrant checkpoint in a region, which recomputes graphs outside as they ran inside."""

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        @skipped_by_dynamo
        def run(*args: Any) -> Any:
            result = function(*args)
            if active.regions:
                run_outside_dynamo(active.regions[-1].describe)
            return result

        return functools.wraps(function)(run)

    CheckpointHooks.__enter__ = watched(CheckpointHooks.__enter__)
    CheckpointHooks.__exit__ = watched(CheckpointHooks.__exit__)


before_first_region(_watch_checkpoints)


class RegionMode(TorchFunctionMode):
    """A mode that represents a region, with the innermost region's settings as text (:func:`text_of`)."""

    text: str | None
    norms_only: bool = False
    is_region = True


class TracingMode(RegionMode):
    """Region of a module (``owner``) that Dynamo inlines, or of a ``with`` block; ``norms_only``: see ``Region``."""

    def __init__(self, text: str | None, owner: nn.Module | None = None, norms_only: bool = False) -> None:
        super().__init__()
        if _is_compiling():
            watch_graph()
        self.text = text
        self.owner = owner
        self.norms_only = norms_only

    def __torch_function__(
        self, func: Callable, types: tuple[Any, ...], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return traced_call(self, func, types, args, kwargs or {})


def text_of(settings: BackwardSettings | None) -> str | None:
    """Return a region's settings as text: empty for full precision, None if the quantizer has no text form."""
    return FULL_PRECISION if settings is None else settings.text


def _changes_forward(text: str | None) -> bool:
    """Whether, by these settings, norms return rounded values, also in eval mode and without gradients."""
    return text is not None and '"quantize_forward": true' in text


def traced_call(mode: RegionMode, func: Callable, types: tuple[Any, ...], args: tuple, kwargs: dict[str, Any]) -> Any:
    for kind in types:
        if not issubclass(kind, Tensor):  # a Brevitas QuantTensor runs its own rule; the mode sees the ops inside
            with mode:
                return kind.__torch_function__(func, types, args, kwargs)
    if _is_compiling():  # not if a mode of traced code is active between graphs
        watch_graph()
    if isinstance(func, HigherOrderOperator):
        return _call_higher_order(func, args, kwargs)
    if func is Tensor.unflatten:  # it calls super(), which Dynamo does not follow here
        func = torch.unflatten
    elif func is Tensor.__pow__:  # Dynamo does not find a class's Python functions in a table
        func = torch.pow
    elif func is Tensor.__rsub__:
        func = torch.rsub
    elif func is Tensor.norm:
        func = torch.norm
    name = NAMES.get(func)
    if name is None:
        return func(*args, **kwargs)
    if mode.norms_only or not torch.is_grad_enabled() or is_exporting():  # only rounded norms apply
        if not _changes_forward(mode.text) or not rounds_norm(name, mode.text):
            return func(*args, **kwargs)
    if mode.text is None:
        if func in DERIVING:
            return func(*args, **kwargs)
        raise TypeError(
            "the backward quantizer of this region cannot be compiled: it has no text form. Make it a dataclass at the "
            "top level of a module, with fields that are numbers, strings, None, enums or dtypes; or, for one that "
            "keeps statistics, as those of Brevitas do, compile without fullgraph=True, so that its layers run as "
            "they are"
        )
    # At full precision, too: inside the graph, a region around this one does not see the function.
    named = tuple(key for key, value in kwargs.items() if isinstance(value, nn.Parameter))
    parameters = (*(i for i, arg in enumerate(args) if isinstance(arg, nn.Parameter)), *named)
    return call_in_graph(name, mode.text, parameters, args, kwargs)


def _call_higher_order(func: HigherOrderOperator, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a higher-order op, which traces its own function, without regions: a checkpoint recomputes saved tensors."""
    _inside.higher_order += 1
    result = func(*args, **kwargs)
    _inside.higher_order -= 1
    return result


class _Inside:
    higher_order = 0


_inside = _Inside()


def enter(settings: BackwardSettings | None, module: nn.Module, *, inherits: bool = False) -> None:
    """Enter a module's region, unless the one around has the same settings, or it ``inherits`` any around it."""
    around, text = _innermost(), text_of(settings)
    rounds = _changes_forward(text)
    if around is not None and around.norms_only and not _changes_forward(around.text):
        around = None  # a checkpoint, recomputed outside the region
    if _inside.higher_order:
        if rounds:
            raise NotImplementedError(
                "quantize_forward: norms in a compiled checkpoint cannot go on with rounded values; compile the "
                "modules that are checkpointed, and checkpoint them outside compiled code"
            )
        return
    if not torch.is_grad_enabled() or is_exporting():
        if not rounds and (around is None or not _changes_forward(around.text)):
            return
    if around is None:
        if text == FULL_PRECISION or not (module.training or rounds):
            return
    elif (
        (inherits or around.text == text)
        and not _belongs_to(around, module)
        and not (around.norms_only and module.training)
    ):
        return
    TracingMode(text, module, not module.training and (around is None or around.norms_only)).__enter__()


def is_covered(module: nn.Module) -> bool:
    """Return whether a module without its own rule runs in the region around it, whatever its settings."""
    around = _innermost()
    if around is None or _inside.higher_order or _belongs_to(around, module):
        return False
    return not (around.norms_only and module.training)


def leave(module: nn.Module | None) -> None:
    around = _innermost()
    if _belongs_to(around, module):
        around.__exit__(None, None, None)


def _belongs_to(mode: Any, module: nn.Module | None) -> bool:
    return type(mode) is TracingMode and mode.owner is module


def _innermost() -> Any:
    for depth in reversed(range(len_function_stack())):
        mode = function_stack_at(depth)
        if isinstance(mode, RegionMode):
            return mode
    return None
