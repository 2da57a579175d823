"""What the nodes of an autograd graph hold, which PyTorch does not document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_SAVED = "_raw_saved_"
#: How the names of the modules begin in which torch.compile makes the functions that run its graphs.
COMPILED = "torch._functorch."


def saved_by(node: Any) -> Iterator[Any]:
    """Yield the saved values of a node of a graph, not unpacked: tensors, and results of pack hooks."""
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
    """Return the module of the ``autograd.Function`` whose node this is; "" for torch's own ops."""
    return getattr(getattr(type(node), "_forward_cls", None), "__module__", "")
