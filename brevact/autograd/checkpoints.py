"""The tensors that ``torch.utils.checkpoint`` saves: the inputs from which it recomputes a function.

They are kept as they are: decoded values would choose other branches in the function, and a curved function of them is
biased. A rule whose key is ``torch.utils.checkpoint.checkpoint`` says otherwise; no mode sees that function.
"""

from __future__ import annotations

from types import FrameType

from torch.utils.checkpoint import checkpoint

from brevact.private_names.of_torch import function_apply_code

#: Name of the op whose rule is for the inputs of checkpoints.
CHECKPOINT = "checkpoint"
#: Why one is kept as it is.
INPUT_OF_CHECKPOINT = "input of a checkpoint: a rule with the key torch.utils.checkpoint.checkpoint packs it"


def saves_input(frame: FrameType) -> bool:
    """Return whether a tensor that is saved in this frame, the innermost one, is an input of a checkpoint."""
    if frame.f_code is function_apply_code:  # of the reentrant kind, a Function
        return bool(frame.f_locals["cls"].__module__ == checkpoint.__module__)
    return bool(frame.f_globals.get("__name__") == checkpoint.__module__)
