"""A text that all processes of a run agree on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed


def has_others() -> bool:
    """Return whether there are other processes in this run."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def in_one_process(make: Callable[[], str], device: torch.device) -> str:
    """Return the result of the process of rank 0, in all of them; bytes travel on the device.

    Where it fails, it raises there, and a RuntimeError in the others.
    """
    if not has_others():
        return make()
    found: list[str | None] = [None]
    error = None
    if distributed.get_rank() == 0:
        try:
            found = [make()]
        except Exception as failure:  # told to the others before it goes on, which would wait for ever
            error = failure
    distributed.broadcast_object_list(found, src=0, device=device)
    if error is not None:
        raise error
    if found[0] is None:
        raise RuntimeError("the policy could not be fitted in the process of rank 0; its error says why")
    return found[0]
