"""Regions of this thread, the forwards that entered them, and transforms in which nothing is packed.

PyTorch calls no hooks when a KeyboardInterrupt leaves a forward. Its regions stay entered, and ops in them pack
nothing, until the thread enters its next region, which leaves them. A forward still runs if its frame is among the
caller's.

Program transforms:

* ``torch.func.grad``, ``vjp``, ``jacrev``, ``hessian`` allow no saved-tensor hooks: entering a region raises. If one is
  called inside a region, the region steps aside (:func:`_step_aside`): the transformed function saves unpacked tensors.
* ``torch.func.vmap``, ``jvp``, forward-mode AD: saved tensors have batch dimensions or tangents that codes would lose.
  They stay unpacked: results are those of the model without backward quantization.
* ``torch.jit.trace``: a traced program has no regions, like ``torch.export``'s; it saves torch's tensors.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from brevact.private_names.of_torch import (
    contexts_in_graphs,
    frame_callback,
    function_modes,
    functorch_interpreter,
    is_jit_tracing,
    pop_function_mode,
    pop_hooks,
    push_function_mode,
    push_hooks,
    states_of_modules,
    top_hooks,
)


class _Active(threading.local):
    """This thread's regions and its forwards in them: module, region, and the frame that called the pre-hook."""

    def __init__(self) -> None:
        self.regions: list[Any] = []  # outermost first
        self.forwards: list[tuple[nn.Module, Any, FrameType]] = []
        self.disabled = 0
        self.measuring: list[tuple[Callable, Callable]] = []  # saved-tensor hooks of reports


active = _Active()


def current_region() -> Any:
    return active.regions[-1] if active.regions else None


def is_alive(frame: FrameType | None) -> bool:
    if not active.forwards:
        return True
    last = active.forwards[-1][2]
    while frame is not None:
        if frame is last:
            return True
        frame = frame.f_back
    return False


def packing_region() -> Any:
    """Return the caller's region, if its Functions save packed tensors."""
    if not active.regions or not torch.is_grad_enabled() or frame_callback() is not None:
        return None
    region = active.regions[-1]
    if not region.packs or region.settings.double_backward:
        return None
    if top_hooks(True) != region.hooks.pair or not is_alive(sys._getframe(1)):
        return None
    return region


def leave_last() -> FrameType:
    """Leave the region of the last forward that entered one; return the frame that called its pre-hook.

    After an interrupt, hooks and modes entered since may lie above the region's; they stay. If other hooks were active
    around the forward, leaving them popped ours instead, so theirs are popped now. A backward pass that raises pops
    all hooks that it recomputed in.
    """
    _, region, frame = active.forwards.pop()
    hooks, modes = _hooks_above(region.hooks), _modes_above(region)
    try:
        region.__exit__(None, None, None)
    finally:
        for pair in reversed(hooks):
            push_hooks(*pair)
        for mode in reversed(modes):
            push_function_mode(mode)
    return frame


def _hooks_above(hooks: Any) -> list[Any]:
    found: list[Any] = []
    while not hooks.is_empty and not hooks.are_innermost():
        top = top_hooks(True)
        if top is None:  # the region's own are gone
            for pair in reversed(found or [hooks.pair]):
                push_hooks(*pair)
            return []
        found.append(top)
        pop_hooks()
    return found


def _modes_above(region: Any) -> list[Any]:
    """Pop the modes above an outermost region's mode; return them innermost first. Inner regions pop none."""
    if region.parent is not None:
        return []
    modes = function_modes()  # the innermost last
    if not modes:  # the region's own is gone
        push_function_mode(region.mode)
    above = modes[modes.index(region.mode) + 1 :] if region.mode in modes else []
    return [pop_function_mode() for _ in above]


def leave_abandoned(frame: FrameType | None) -> None:
    while not is_alive(frame):
        leave_last()


def leave_forward(module: nn.Module, caller: FrameType) -> None:
    """Leave the region of the forward of ``module`` called by ``caller``, and regions abandoned inside it."""
    for forward in active.forwards:
        if forward[0] is module and (caller is forward[2] or caller is forward[2].f_back):  # its parent after an error
            while leave_last() is not forward[2]:
                pass
            return


#: Functions still to run, by the module that they wait for, each with a name in the module.
waiting: dict[str, list[tuple[str, Callable[[], None]]]] = {}
_lock = threading.Lock()


def before_first_region(function: Callable[[], None]) -> None:
    """Run a function once in this process, before the next region that packs is entered."""
    when_imported("torch", "Tensor", function)


def when_imported(module: str, name: str, function: Callable[[], None]) -> None:
    """Run a function once, before the first packing region after ``module`` is imported and has attribute ``name``."""
    waiting.setdefault(module, []).append((name, function))


def prepare() -> None:
    with _lock:
        for module in waiting.keys() & sys.modules.keys():
            for each in list(waiting[module]):
                if hasattr(sys.modules[module], each[0]):
                    each[1]()
                    waiting[module].remove(each)
            if not waiting[module]:
                del waiting[module]


NO_TRANSFORMS = (
    "torch.func.grad, vjp, jacrev and hessian do not support saved tensor hooks, by which a model with backward "
    "quantization stores packed activations. Differentiate by torch.autograd.grad, put the model in eval mode "
    "(model.eval()), where it packs nothing, or call brevact.restore_backward(model) first. "
    "torch.autograd.graph.disable_saved_tensors_hooks forbids these hooks, too: leave it"
)
NO_ROUNDED_NORMS = (
    "quantize_forward: norms go on with rounded values neither under torch.func transforms and forward-mode AD, nor in "
    "torch.jit.trace, torch.export and compiled graphs. Compile without fullgraph=True, which runs them uncompiled, or "
    "call brevact.restore_backward(model) first, which changes what the model computes"
)


def is_distributed() -> bool:
    """Return whether several processes train a model, each perhaps with a part of its parameters."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def may_free_weights(weight: torch.Tensor) -> bool:
    """Return whether a weight's memory may be freed between the forward and the backward pass, as FSDP does."""
    return is_distributed() and (type(weight) is not torch.nn.Parameter or bool(states_of_modules))


def nodes_behind(roots: Iterable[Any], seen: set[Any] | None = None) -> Iterator[Any]:
    """Yield each node of autograd's graph from these on, once; those ``seen`` before, and None, end a path."""
    seen, pending = set() if seen is None else seen, [*roots]
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [parent for parent, _ in node.next_functions]
            yield node


def is_transformed() -> bool:
    return forward_ad._current_level >= 0 or functorch_interpreter() is not None


def check_rounding() -> None:
    if is_transformed() or is_tracing():
        raise NotImplementedError(NO_ROUNDED_NORMS)


def is_tracing(settings: Any = None) -> bool:
    """Return whether `torch.jit.trace` or `torch.export` records a program, which has no backward pass or no regions.

    Raises:
        NotImplementedError: and by these settings norms go on with rounded values.
    """
    found = is_jit_tracing() or torch.compiler.is_exporting()
    if found and settings is not None and settings.changes_forward:
        raise NotImplementedError(NO_ROUNDED_NORMS)
    return found


@contextmanager
def measuring_hooks(pack: Callable, unpack: Callable) -> Iterator[None]:
    """Enter saved-tensor hooks that measure, and step aside where nothing is saved, in transforms, too."""
    prepare()
    active.measuring.append((pack, unpack))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        active.measuring.pop()


@contextmanager
def hooks_aside() -> Iterator[None]:
    """Suspend the current region's hooks, if they are the innermost ones, and without gradients those that measure."""
    region, aside = current_region(), [] if torch.is_grad_enabled() else list(active.measuring)
    if region is not None and not region.hooks.is_empty:
        aside.append(region.hooks.pair)
    popped: list[Any] = []
    while (top := top_hooks(True)) is not None and top in aside:
        popped.append(top)
        pop_hooks()
    try:
        yield
    finally:
        for pair in reversed(popped):
            push_hooks(*pair)


def _step_aside() -> None:
    """Make ``disable_saved_tensors_hooks``, which transforms enter, suspend the region's hooks."""
    disable = torch.autograd.graph.disable_saved_tensors_hooks

    @contextmanager
    @functools.wraps(disable)
    def disable_saved_tensors_hooks(error_message: str) -> Iterator[None]:
        with hooks_aside(), disable(error_message):
            yield

    torch.autograd.graph.disable_saved_tensors_hooks = disable_saved_tensors_hooks
    contexts_in_graphs[disable_saved_tensors_hooks] = None


before_first_region(_step_aside)
