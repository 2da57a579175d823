"""Leave the regions of interrupted forwards: PyTorch calls no hooks when a KeyboardInterrupt leaves a forward.

Such regions stay entered, and ops in them pack nothing, until the thread enters its next region, which leaves them.
A forward still runs if its frame is among the caller's frames.
"""

from __future__ import annotations

import threading
from types import FrameType
from typing import Any

from torch import nn

from brevact.private_names.of_torch import (
    function_modes,
    pop_function_mode,
    pop_hooks,
    push_function_mode,
    push_hooks,
    top_hooks,
)


class _Active(threading.local):
    def __init__(self) -> None:
        self.regions: list[Any] = []  # outermost first
        self.disabled = 0


active = _Active()


def current_region() -> Any:
    """Return the innermost ``Region`` of this thread, or None."""
    return active.regions[-1] if active.regions else None


class _Running(threading.local):
    def __init__(self) -> None:
        self.forwards: list[tuple[nn.Module, Any, FrameType]] = []


#: This thread's forwards in regions, outermost first: module, region, and the frame that called the module's pre-hook.
running = _Running()


def is_alive(frame: FrameType | None) -> bool:
    if not running.forwards:
        return True
    last = running.forwards[-1][2]
    while frame is not None:
        if frame is last:
            return True
        frame = frame.f_back
    return False


def leave_last() -> FrameType:
    """Leave the region of the last forward that entered one; return the frame that called its pre-hook.

    After an interrupt, hooks and modes entered since may lie above the region's; they stay. If other hooks were active
    around the forward, leaving them popped ours instead, so theirs are popped now. A backward pass that raises pops
    all hooks that it recomputed in.
    """
    _, region, frame = running.forwards.pop()
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
    """Pop the saved-tensor hooks above the region's; return them innermost first."""
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
    for forward in running.forwards:
        if forward[0] is module and _runs_in(forward[2], caller):
            while leave_last() is not forward[2]:
                pass
            return


def _runs_in(frame: FrameType, caller: FrameType | None) -> bool:
    """Whether a forward hook's caller is the frame that called the pre-hook, or its parent after an error."""
    return caller is frame or caller is frame.f_back
