"""Compute a text on rank 0 and share it with all processes of a run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed


def has_others() -> bool:
    """Return whether there are other processes in this run."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def in_one_process(make: Callable[[], str], device: torch.device) -> str:
    """Return rank 0's result on all ranks, sent through `device`; its error raises a RuntimeError on the others."""
    if not has_others():
        return make()
    found: list[str | None] = [None]
    error = None
    if distributed.get_rank() == 0:
        try:
            found = [make()]
        except Exception as failure:  # raised after the broadcast, for which the others wait
            error = failure
    distributed.broadcast_object_list(found, src=0, device=device)
    if error is not None:
        raise error
    if found[0] is None:
        raise RuntimeError("the policy could not be fitted in the process of rank 0; its error says why")
    return found[0]
