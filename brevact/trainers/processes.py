"""A text that all processes of a run agree on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed


def in_one_process(make: Callable[[], str], device: torch.device) -> str:
    """Return what the first process makes, in all of them; where it fails, it raises there, and here an error says so.

    Args:
        make: called in the process of rank 0.
        device: of the model, on which bytes travel.

    Raises:
        RuntimeError: it failed in the process of rank 0.
    """
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
        return make()
    text, error = "", None
    if distributed.get_rank() == 0:
        try:
            text = make()
        except Exception as failure:  # told to the others before it goes on, which would wait for ever
            error = failure
    content = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8).to(device)
    size = torch.tensor([-1 if error is not None else len(text.encode())], device=device)
    distributed.broadcast(size, src=0)
    if error is not None:
        raise error
    if size.item() < 0:
        raise RuntimeError("the policy could not be fitted in the process of rank 0; its error says why")
    if distributed.get_rank() != 0:
        content = torch.empty(max(int(size.item()), 1), dtype=torch.uint8, device=device)
    distributed.broadcast(content, src=0)
    return bytes(content[: int(size.item())].cpu().tolist()).decode()
