"""Read nodes of a graph: their ops, the sizes of their results, their readers.

All steps in the life of a joint graph read its nodes by these functions. None knows what an op means (see ``aten``),
and none changes a node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import Tensor, fx


def packet_of(node: Any) -> Any:
    """The op of a node without its overload; None for a node that calls none."""
    return getattr(getattr(node, "target", None), "overloadpacket", None)


def call_of(node: Any) -> Any:
    """The call that a node is a result of: itself, or for one of several results the node before."""
    return node.args[0] if node.target is operator.getitem else node


def behind(node: Any, packets: Container[Any]) -> Any:
    """The tensor that some ops, such as casts, are applied to, one after another."""
    while packet_of(node) in packets:
        node = node.args[0]
    return node


def value_of(node: Any) -> Tensor | None:
    """The fake tensor that a node returns; None for other arguments, and for nodes that return none or several."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def shape_of(node: Any) -> tuple[Any, ...]:
    """Sizes, of symbols as expressions: to compare symbols would fix one at a size where the two are equal."""
    value = value_of(node)
    return () if value is None else tuple(size if isinstance(size, int) else size.node.expr for size in value.shape)


def numel_of(node: fx.Node) -> int:
    value = value_of(node)
    size: Any = 0 if value is None else value.numel()
    return size if isinstance(size, int) else int(size.node.hint)


def nbytes_of(node: fx.Node) -> int:
    value = value_of(node)
    return 0 if value is None else numel_of(node) * value.itemsize


def is_mask(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and value.dtype is torch.bool


def is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def readers_of(node: fx.Node, nodes: Container[fx.Node]) -> list[fx.Node]:
    return [each for each in node.users if each in nodes]


def closure(sources: Iterable[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]) -> dict[fx.Node, None]:
    """The sources and all nodes that steps from them reach, in this order."""
    found = dict.fromkeys(sources)
    waiting = list(found)
    for node in waiting:  # which grows
        new = dict.fromkeys(each for each in step(node) if each not in found)
        found |= new
        waiting += new
    return found
