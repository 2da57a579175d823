"""Masks, and places that pooling and sorting return, in a joint graph: few bits keep them exactly."""

from __future__ import annotations

import operator
from collections.abc import Container
from typing import Any

from torch import fx

from brevact.compiler import aten as table
from brevact.compiler.nodes import is_mask, numel_of, packet_of, readers_of, value_of

_LEAST_NUMEL = 4096
_MOST_STEPS = 24


class Integers:
    """Bit widths of the places in a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self._widths: dict[fx.Node, int] = {}
        for node in graph.nodes:
            if (places := _places(node)) is not None:
                self.know(node, places - 1)
            elif packet_of(node) in table.MOVES and (width := self._widths.get(node.args[0])) is not None:
                self._widths[node] = width

    def know(self, node: fx.Node, most: int) -> None:
        """Note the largest of a tensor's integers, none of which is negative."""
        self._widths[node] = max(1, most.bit_length())

    def width_of(self, node: fx.Node) -> int | None:
        """Bits of a place, None if the tensor has no range, or is small, or has no more bits than its range."""
        value, width = value_of(node), self._widths.get(node)
        if width is None or value is None or numel_of(node) < _LEAST_NUMEL:
            return None
        return width if width < 8 * value.itemsize else None


def ends_of(node: fx.Node, read: set[fx.Node], gradients: Container[fx.Node], integers: Integers) -> list[fx.Node]:
    """Masks and places that are all that backward reads of a tensor; none if it reads more."""
    found, waiting, seen = [], [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if user not in read or user in seen:
                continue
            seen.add(user)
            if user.op == "output" or user in gradients or len(seen) > _MOST_STEPS or packet_of(user) is None:
                return []
            if integers.width_of(user) is not None or (is_mask(user) and not _is_united(user, read)):
                found.append(user)
            else:
                waiting.append(user)
    return found


def _is_united(mask: fx.Node, read: set[fx.Node]) -> bool:
    """Whether backward reads a mask in other masks alone."""
    users = readers_of(mask, read)
    return bool(users) and all(map(is_mask, users))


def _places(node: fx.Node) -> int | None:
    """Number of places among the results of pooling, sorting and the like."""
    if node.target is not operator.getitem or node.args[1] != 1:
        return None
    source: Any = node.args[0]
    count = table.PLACES.get(packet_of(source))
    most = None if count is None else count(source.args)
    return most if isinstance(most, int) else None
