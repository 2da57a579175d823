"""The tensors among the arguments of a call, and the constants beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

#: Types of tensors that are no subclass which could mean something else.
PLAIN_TYPES = frozenset((Tensor, nn.Parameter))

#: Types of arguments that are no tensors and hold none.
CONSTANT_TYPES = frozenset(
    (
        *(bool, int, float, complex, str, type(None), slice, type(Ellipsis)),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)


def tensors_of_call(args: Sequence[Any], kwargs: dict[Any, Any]) -> list[Tensor]:
    """Return the tensors among arguments, and in the tuples, lists and dictionaries among them, in their order."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        kind = type(value)
        if kind in PLAIN_TYPES:
            found.append(value)
        elif kind in CONSTANT_TYPES:
            continue
        elif isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += tensors_of_call(value, {})
        elif isinstance(value, dict):
            found += tensors_of_call((), value)
    return found
