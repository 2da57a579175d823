"""Which arrays the kernels read and write."""

from __future__ import annotations

import torch
from torch import Tensor

_PLAIN_TYPES = (Tensor, torch.nn.Parameter)


def takes(arrays: tuple[Tensor | None, ...]) -> bool:
    """Whether all are plain CPU tensors with memory: subclasses, zero tensors and those of torch.func may lack it."""
    try:
        for x in arrays:
            if x is None:
                continue
            if type(x) not in _PLAIN_TYPES or not x.is_cpu or (x.data_ptr() == 0 and x.numel()):
                return False
    except RuntimeError:  # data_ptr() of a wrapper
        return False
    return True
