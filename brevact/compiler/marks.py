"""Modes that represent regions to Dynamo, and what keeps Dynamo out of ours: eager regions around compiled graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from torch.overrides import TorchFunctionMode

from brevact.autograd.region.rows import ROWS
from brevact.autograd.region.running import NO_ROUNDED_NORMS, active, before_first_region
from brevact.private_names.of_torch import (
    CheckpointHooks,
    dynamo_config,
    function_apply_code,
    get_overridable_functions,
    skip_code,
)

F = TypeVar("F", bound=Callable[..., Any])
PLAIN = "plain"  #: In place of settings: nothing enters a region.


def skipped_by_dynamo(function: F) -> F:
    """Let Dynamo skip a function that Python calls, and what it calls, and trace it if traced code calls it."""
    skip_code(function.__code__)
    return function


def is_compiled_graph(frame: FrameType) -> bool:
    """Return whether the Function applied in this frame, which autograd saves tensors for, is a compiled graph."""
    if function_apply_code is not None:
        if frame.f_code is not function_apply_code:
            return False
        frame = frame.f_back or frame
    return frame.f_globals.get("__name__", "").startswith("torch._functorch._aot_autograd.")


# A policy's hooks tell models of one class apart: without guards on hooks, Dynamo runs the graph of another model.
dynamo_config.skip_nnmodule_hook_guards = False


get_overridable_functions().update(ROWS)  # PyTorch's list lacks some that modes see, such as `hardswish`


def _watch_checkpoints() -> None:
    """Let Dynamo detect a non-reentrant checkpoint in a region, which recomputes graphs outside as they ran inside."""

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        @skipped_by_dynamo
        def run(*args: Any) -> Any:
            result = function(*args)
            if active.regions:
                active.regions[-1].describe()
            return result

        return functools.wraps(function)(run)

    CheckpointHooks.__enter__ = watched(CheckpointHooks.__enter__)
    CheckpointHooks.__exit__ = watched(CheckpointHooks.__exit__)


before_first_region(_watch_checkpoints)


class RegionMode(TorchFunctionMode):
    """A mode that represents a region, with the innermost region's settings as text."""

    text: str | None
    norms_only: bool = False


class PlainMode(RegionMode):
    """A mode under which Dynamo traces as if without regions, to graphs of their own: it guards on the modes around."""

    text = PLAIN

    @skipped_by_dynamo
    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*args, **(kwargs or {}))


def changes_forward(text: str | None) -> bool:
    """Whether, by these settings, norms return rounded values, also in eval mode and without gradients."""
    return text is not None and '"quantize_forward": true' in text


def refuse(text: str | None) -> None:
    """Raise in traced code, of a region that marks do not describe."""
    if text is not None:
        raise NotImplementedError(NO_ROUNDED_NORMS)
    raise TypeError(
        "the backward quantizer of this region cannot be compiled: it has no text form. Make it a dataclass at the "
        "top level of a module, with fields that are numbers, strings, None, enums or dtypes; or, for one that keeps "
        "statistics, as those of Brevitas do, compile without fullgraph=True, so that its layers run as they are"
    )
