"""The undocumented contents of autograd graph nodes."""

from __future__ import annotations

from typing import Any

#: Prefix of the modules where torch.compile makes the functions that run its graphs.
COMPILED = "torch._functorch."


def function_of(node: Any) -> str:
    """Return the module of a node's ``autograd.Function``; "" for torch's own ops."""
    return getattr(getattr(type(node), "_forward_cls", None), "__module__", "")
