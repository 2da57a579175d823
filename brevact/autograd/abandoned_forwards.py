"""Forwards that an interrupt has ended: PyTorch calls no hooks when a KeyboardInterrupt leaves a forward.

The regions of such forwards stay entered. Ops that run in them then pack nothing, until the next region of the
thread clears it away. Whether a forward still runs is seen from the frames below the caller.
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


class _Running(threading.local):
    def __init__(self) -> None:
        # Forwards that entered a region: module, region, and the frame that called the module's pre-hook.
        self.forwards: list[tuple[nn.Module, Any, FrameType]] = []


#: The forwards of this thread that entered a region and have not left it, outermost first.
running = _Running()


def is_alive(frame: FrameType | None) -> bool:
    """Return whether the last forward that entered a region still runs below ``frame``."""
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

    After an interrupt the region's hooks and mode need not be the innermost ones. Those that somebody has entered since
    stand above them, and stay. Where others stood around the interrupted forward, their end took ours away in place of
    theirs, which are taken away now; and a backward pass that raises takes away all that it recomputed in.
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
    """Take off the saved-tensor hooks above those that a region takes off, the innermost first."""
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
    """Take off the modes above the one that a region takes off, the innermost first; inner regions take off none."""
    if region.parent is not None:
        return []
    modes = function_modes()  # the innermost last
    if not modes:  # the region's own is gone
        push_function_mode(region.mode)
    above = modes[modes.index(region.mode) + 1 :] if region.mode in modes else []
    return [pop_function_mode() for _ in above]


def leave_abandoned(frame: FrameType | None) -> None:
    """Leave regions whose forward does not run below ``frame`` any more."""
    while not is_alive(frame):
        leave_last()


def leave_forward(module: nn.Module, caller: FrameType) -> None:
    """Leave the region of the forward of ``module`` that this frame called, and those abandoned inside it."""
    for forward in running.forwards:
        if forward[0] is module and _runs_in(forward[2], caller):
            while leave_last() is not forward[2]:
                pass
            return


def _runs_in(frame: FrameType, caller: FrameType | None) -> bool:
    """Whether a forward hook's caller is the frame that called the pre-hook, or the one around it after an error."""
    return caller is frame or caller is frame.f_back
