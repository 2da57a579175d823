"""Regions that Dynamo traces as code: where marks on the nodes of its graph (``tracing``) do not do.

Regions whose norms go on with rounded values, and those whose quantizers have no text form, raise: Dynamo then runs the
code around as it is. Dynamo executes Python symbolically: :func:`traced_call` for torch functions, :func:`enter` and
:func:`leave` for modules. These therefore use only code that Dynamo traces, and have no state but the stack of modes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from brevact.autograd.region.rows import ROWS
from brevact.autograd.region.running import NO_ROUNDED_NORMS, active, before_first_region
from brevact.autograd.region.settings import BackwardSettings
from brevact.compiler import FULL_PRECISION
from brevact.compiler.results import is_recomputed
from brevact.private_names.of_torch import (
    CheckpointHooks,
    current_translator,
    dynamo_config,
    frame_callback,
    function_apply_code,
    function_stack_at,
    get_overridable_functions,
    len_function_stack,
    skip_code,
)
from brevact.quantizers import from_text

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


out_of_dynamo = torch.compiler.disable
# A policy's hooks tell models of one class apart: without guards on hooks, Dynamo runs the graph of another model.
dynamo_config.skip_nnmodule_hook_guards = False
_is_compiling = torch.compiler.is_dynamo_compiling


def is_exporting() -> bool:
    """Whether `torch.export` runs: an exported program has no backward pass, so it packs nothing."""
    return _is_traced_for_export() if _is_compiling() else torch.compiler.is_exporting()


@torch.compiler.assume_constant_result
def _is_traced_for_export() -> bool:  # in Dynamo of PyTorch 2.11, `torch.compiler.is_exporting` is always true
    return bool(current_translator().output.export)


@skipped_by_dynamo
def run_outside_dynamo(function: Callable[..., Any], *args: Any) -> None:
    """Call a function of ours without letting Dynamo compile it."""
    if frame_callback() is not None:
        function = out_of_dynamo(function)
    function(*args)


get_overridable_functions().update(ROWS)  # PyTorch's list lacks some that modes see, such as `hardswish`


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
    eager: Any  # class of eager regions


class PlainMode(RegionMode):
    """A mode under which Dynamo traces as if without regions, to graphs of their own: it guards on the modes around."""

    text = FULL_PRECISION

    @skipped_by_dynamo
    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **(kwargs or {}))


class TracingMode(RegionMode):
    """Region of a module (``owner``) that Dynamo inlines, or of a ``with`` block."""

    def __init__(self, text: str | None, owner: nn.Module | None = None) -> None:
        super().__init__()
        if changes_forward(text):
            raise NotImplementedError(NO_ROUNDED_NORMS)
        self.text = FULL_PRECISION if type(_innermost()) is PlainMode else text
        self.owner = owner

    @skipped_by_dynamo
    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return traced_call(self, func, types, args, kwargs or {})


def text_of(settings: BackwardSettings | None) -> str | None:
    """Return a region's settings as text: empty for full precision, None if the quantizer has no text form."""
    return FULL_PRECISION if settings is None else settings.text


def changes_forward(text: str | None) -> bool:
    """Whether, by these settings, norms return rounded values, also in eval mode and without gradients."""
    return text is not None and '"quantize_forward": true' in text


@skipped_by_dynamo
def traced_call(mode: RegionMode, func: Callable, types: tuple[Any, ...], args: tuple, kwargs: dict[str, Any]) -> Any:
    for kind in types:
        if not issubclass(kind, Tensor):  # a Brevitas QuantTensor runs its own rule; the mode sees the ops inside
            with mode:
                return kind.__torch_function__(func, types, args, kwargs)
    text = mode.text
    if changes_forward(text):
        raise NotImplementedError(NO_ROUNDED_NORMS)
    if mode.norms_only or not torch.is_grad_enabled() or is_exporting():
        return func(*args, **kwargs)
    if text is None:
        raise TypeError(
            "the backward quantizer of this region cannot be compiled: it has no text form. Make it a dataclass at the "
            "top level of a module, with fields that are numbers, strings, None, enums or dtypes; or, for one that "
            "keeps statistics, as those of Brevitas do, compile without fullgraph=True, so that its layers run as "
            "they are"
        )
    return _call_outside(text, func, args, kwargs)


@torch.compiler.disable
def _call_outside(text: str, func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a function between graphs, in an eager region."""
    with RegionMode.eager(None if text == FULL_PRECISION else from_text(text)):
        return func(*args, **kwargs)


@torch.compiler.assume_constant_result
def _is_recomputed() -> bool:
    return is_recomputed(current_translator())


def enter(settings: BackwardSettings | None, module: nn.Module, *, inherits: bool = False) -> None:
    """Enter a module's region, unless the one around has the same settings, or it ``inherits`` any around it."""
    around, text = _innermost(), text_of(settings)
    if type(around) is PlainMode:
        return
    if changes_forward(text) or (around is not None and changes_forward(around.text)):
        raise NotImplementedError(NO_ROUNDED_NORMS)
    if (_is_compiling() and _is_recomputed()) or not torch.is_grad_enabled() or is_exporting():
        return
    if around is None or around.norms_only:  # a checkpoint, recomputed outside the region
        if text == FULL_PRECISION or not module.training:
            return
    elif (inherits or around.text == text) and not _belongs_to(around, module):
        return
    TracingMode(text, module).__enter__()


def is_covered(module: nn.Module) -> bool:
    """Return whether a module without its own rule runs in the region around it, whatever its settings."""
    around = _innermost()
    if around is None or _is_recomputed() or _belongs_to(around, module):
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
