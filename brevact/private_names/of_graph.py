"""The undocumented contents of autograd graph nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_SAVED = "_raw_saved_"
#: Prefix of the modules where torch.compile makes the functions that run its graphs.
COMPILED = "torch._functorch."


def saved_by(node: Any) -> Iterator[Any]:
    """Yield a graph node's saved values, not unpacked: tensors, and results of pack hooks."""
    for name in dir(node):
        if name.startswith(_SAVED):
            try:
                found = getattr(node, name)
                for each in found if isinstance(found, tuple | list) else (found,):
                    if each is not None:
                        yield each.data
            except (AttributeError, RuntimeError):  # a version without `data`; freed meanwhile
                continue


def function_of(node: Any) -> str:
    """Return the module of a node's ``autograd.Function``; "" for torch's own ops."""
    return getattr(getattr(type(node), "_forward_cls", None), "__module__", "")
