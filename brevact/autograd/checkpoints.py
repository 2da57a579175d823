"""Detect the tensors that ``torch.utils.checkpoint`` saves: the inputs from which it recomputes a function.

Saved in full precision: decoded values may change the function's branches, and nonlinear functions of them are biased.
A rule with the key ``torch.utils.checkpoint.checkpoint`` packs them; no mode sees that function.
"""

from __future__ import annotations

from types import FrameType

from torch.utils.checkpoint import checkpoint

from brevact.private_names.of_torch import function_apply_code

#: Name of the op whose rule applies to checkpoint inputs.
CHECKPOINT = "checkpoint"
#: Why an input is saved in full precision.
INPUT_OF_CHECKPOINT = "input of a checkpoint: a rule with the key torch.utils.checkpoint.checkpoint packs it"


def saves_input(frame: FrameType) -> bool:
    """Return whether a tensor that this innermost frame saves is a checkpoint's input."""
    if frame.f_code is function_apply_code:  # a reentrant checkpoint is a Function
        return bool(frame.f_locals["cls"].__module__ == checkpoint.__module__)
    return bool(frame.f_globals.get("__name__") == checkpoint.__module__)
