"""Integers between static bounds in a joint graph: codes of few bits keep them exactly.

Integers are the results of rounding that a fake quantizer clips, signs, and places that pooling and sorting return.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from brevact.compiler import aten as table
from brevact.compiler.aten import aten, packet_of

#: Bits of codes for floating-point integers.
_MOST_BITS = 8
_LEAST_NUMEL = 4096
_MOST_STEPS = 24
_ANY = (-math.inf, math.inf)
Range = tuple[float, float]

_ROUND = frozenset((aten.round, aten.floor, aten.ceil, aten.trunc))
#: From integers to the values that they stand for.
_TAIL = table.MOVES | table.CASTS | {aten.add, aten.sub, aten.mul, aten.div, aten.expand}
_CONSTANTS = {aten.scalar_tensor: 0, aten.full: 1, aten.full_like: 1}
_ABOVE, _BELOW = (aten.gt, aten.ge), (aten.lt, aten.le)
COMPARISONS = frozenset((*_ABOVE, *_BELOW))


class Codes(NamedTuple):
    """How codes represent integers: code 0 is the least; a spare code is NaN."""

    least: int
    width: int
    has_spare: bool


class Integers:
    """Ranges of the integers of a graph, floating point or not.

    Args:
        graph: the graph.
        constants: inputs that are constants, and their values.
    """

    def __init__(self, graph: fx.Graph, constants: Mapping[fx.Node, float]) -> None:
        self._ranges: dict[fx.Node, Range] = {
            node: (value, value) for node, value in constants.items() if float(value).is_integer()
        }
        for node in graph.nodes:
            value = node.meta.get("val")
            if node.op == "call_function" and isinstance(value, Tensor) and not value.is_complex():
                found = _range(node, self._of)
                if found is not None and _is_held(found, value.dtype):
                    self._ranges[node] = found

    def know(self, node: fx.Node, found: Range) -> None:
        self._ranges[node] = found

    def _of(self, x: Any) -> Range | None:
        if isinstance(x, fx.Node):
            return self._ranges.get(x)
        return (x, x) if isinstance(x, int | float) and (math.isinf(x) or float(x).is_integer()) else None

    def codes_of(self, node: fx.Node) -> Codes | None:
        """Codes for a tensor, None if it has no range, or is small, or has no more bits than its range."""
        value, found = node.meta.get("val"), self._ranges.get(node)
        if (
            found is None
            or value is None
            or math.isinf(found[1] - found[0])
            or value.dtype is torch.bool
            or _hint(value) < _LEAST_NUMEL
        ):
            return None
        count = int(found[1] - found[0]) + 1
        width = max(1, (count - 1).bit_length())
        most = _MOST_BITS if value.is_floating_point() else 8 * value.itemsize - 1
        return Codes(int(found[0]), width, value.is_floating_point() and count < 2**width) if width <= most else None


def ends_of(node: fx.Node, read: set[fx.Node], gradients: Container[fx.Node], integers: Integers) -> list[fx.Node]:
    """Masks and integers that are all that backward reads of a tensor; none if it reads more.

    Args:
        node: the tensor.
        read: nodes that backward computes.
        gradients: those among them that depend on the gradients that backward is given.
        integers: ranges of the graph's integers.
    """
    found, waiting, seen = [], [node], {node}
    while waiting:
        for user in waiting.pop().users:
            if user not in read or user in seen:
                continue
            seen.add(user)
            if user.op == "output" or user in gradients or len(seen) > _MOST_STEPS or packet_of(user) is None:
                return []
            if integers.codes_of(user) is not None or (_is_mask(user) and not _is_united(user, read)):
                found.append(user)
            else:
                waiting.append(user)
    return found


def _is_mask(node: fx.Node) -> bool:
    return getattr(node.meta.get("val"), "dtype", None) is torch.bool


def _is_united(mask: fx.Node, read: set[fx.Node]) -> bool:
    """Whether backward reads a mask in other masks alone."""
    users = [user for user in mask.users if user in read]
    return bool(users) and all(map(_is_mask, users))


def unite_clips(graph: fx.Graph, call: Any) -> set[fx.Node]:
    """Let gradients of ReLU read masks, and those that are zero by two masks their union; return new gradients."""
    found = set()
    for node in list(graph.nodes):
        if packet_of(node) is aten.threshold_backward:
            with graph.inserting_before(node):
                mask = call(aten.le.Scalar, *node.args[1:])
                gradient = call(aten.where.ScalarSelf, mask, 0.0, node.args[0])
            for each in (mask, gradient):
                each.meta.update({key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")})
            node.replace_all_uses_with(gradient)
            graph.erase_node(node)
            found.add(gradient)
            continue
        if packet_of(node) is not aten.where or packet_of(inner := node.args[2]) is not aten.where:
            continue
        (first, zero, _), (second, other, x) = node.args, inner.args
        if zero is not other or len(inner.users) > 1 or first.meta["val"].shape != second.meta["val"].shape:
            continue
        last = max(first, second)
        with graph.inserting_before(last.next):
            union = call(aten.bitwise_or.Tensor, first, second)
        union.meta.update({key: each for key, each in last.meta.items() if key not in ("val", "tensor_meta")})
        node.args = union, zero, x
        graph.erase_node(inner)
    return found


def root_of(node: fx.Node, integers: Integers) -> tuple[fx.Node, list[fx.Node]] | None:
    """The integers that a tensor is a function of, element by element, and smaller tensors that it depends on, too."""
    others: list[fx.Node] = []
    for _ in range(_MOST_STEPS):
        if integers.codes_of(node) is not None:
            return node, others
        if node.op != "call_function" or packet_of(node) not in _TAIL:
            return None
        size = _hint(node.meta["val"])
        args = [each for each in node.all_input_nodes if isinstance(each.meta["val"], Tensor)]
        large = [each for each in args if _hint(each.meta["val"]) * 8 > size]
        if len(large) != 1 or (packet_of(node) is aten.div and node.args[1] is large[0]):  # which a zero's sign decides
            return None
        others += [each for each in args if each is not large[0]]
        node = large[0]
    return None


def is_computable(node: fx.Node, available: Container[fx.Node], activations: Container[fx.Node]) -> bool:
    """Whether backward can compute a tensor, element by element, rounding included, from available ones."""
    size, waiting, steps = _hint(node.meta["val"]), [node], 0
    while waiting:
        each = waiting.pop()
        steps += 1
        is_small = isinstance(each.meta.get("val"), Tensor) and _hint(each.meta["val"]) * 8 <= size
        if each is not node and (
            each in available or each.op == "placeholder" or (is_small and each not in activations)
        ):
            continue
        is_mask = _is_mask(each) and packet_of(each) in (*_ABOVE, *_BELOW)
        if steps > _MOST_STEPS or not (is_mask or packet_of(each) in _TAIL | _ROUND | {aten.where}):
            return False
        waiting += each.all_input_nodes
    return True


def _hint(value: Tensor) -> int:
    size: Any = value.numel()
    return size if isinstance(size, int) else int(size.node.hint)


def _is_held(found: Range, dtype: torch.dtype) -> bool:
    """Whether a type holds the integers of a range."""
    if dtype.is_floating_point:
        return math.isinf(found[1] - found[0]) or max(map(abs, found)) <= 2 / torch.finfo(dtype).eps
    return dtype is torch.bool or torch.iinfo(dtype).min <= found[0] <= found[1] <= torch.iinfo(dtype).max


def _range(node: fx.Node, of: Any) -> Range | None:
    if (places := _places(node)) is not None:
        return 0, places - 1
    packet, value, x = packet_of(node), node.meta["val"], of(node.args[0]) if node.args else None
    if value.dtype is torch.bool:
        return 0, 1
    if node.kwargs and packet not in table.CASTS and packet not in _CONSTANTS:  # a sum's factor, digits, bounds
        return None
    if packet in _ROUND and len(node.args) == 1:
        return x or _ANY
    if packet is aten.sign:
        return -1, 1
    if packet in _CONSTANTS:
        return of(node.args[_CONSTANTS[packet]])
    if packet is aten.where:
        mask, *values = node.args
        return _selected(mask, *values, of)  # type: ignore[arg-type, call-arg]
    if packet in (aten.clamp_min, aten.clamp_max, aten.clamp, aten.minimum, aten.maximum, aten.relu):
        return _clamped(packet, x, list(node.args[1:]), of)
    if x is None:
        return None
    if packet in table.MOVES | table.CASTS or packet is aten.expand:
        return x
    if packet is aten.neg:
        return -x[1], -x[0]
    if packet is aten.abs:
        return max(0, x[0], -x[1]), max(map(abs, x))
    other = of(node.args[1]) if len(node.args) > 1 else None
    if other is None:
        return None
    if packet is aten.add:
        return x[0] + other[0], x[1] + other[1]
    if packet is aten.sub:
        return x[0] - other[1], x[1] - other[0]
    if packet is aten.mul and not any(map(math.isinf, (*x, *other))):
        products = [a * b for a in x for b in other]
        return min(products), max(products)
    if packet is aten.pow and x[0] == x[1] and other[0] == other[1] and 0 <= other[0] <= 64:
        return (x[0] ** other[0],) * 2
    return None


def _selected(mask: fx.Node, a: Any, b: Any, of: Any) -> Range | None:
    """The range of ``where(mask, a, b)``, in which ``b`` is bounded if the mask compares it."""
    first, second = of(a), of(b)
    if first is None or second is None:
        return None
    low, high = second
    if mask.args and mask.args[0] is b and (bound := of(mask.args[1])) is not None:
        if packet_of(mask) in _ABOVE:
            high = min(high, bound[1])
        elif packet_of(mask) in _BELOW:
            low = max(low, bound[0])
    return min(first[0], low), max(first[1], high)


def _clamped(packet: Any, x: Range | None, bounds: list[Any], of: Any) -> Range | None:
    if packet is aten.relu:
        bounds = [0]
    if packet in (aten.minimum, aten.clamp_max):
        bounds = [None, *bounds]
    low, high = (None if each is None else of(each) for each in (*bounds, None, None)[:2])
    given = [each for each in bounds if each is not None]
    if x is None or any(of(each) is None for each in given):
        return None
    if low is not None:
        x = max(x[0], low[0]), max(x[1], low[1])
    if high is not None:
        x = min(x[0], high[0]), min(x[1], high[1])
    return x


def _places(node: fx.Node) -> int | None:
    """Number of places among the results of pooling, sorting and the like."""
    value = node.meta["val"]
    if node.target is not operator.getitem or node.args[1] != 1 or value.is_floating_point():
        return None
    source: Any = node.args[0]
    count = table.PLACES.get(packet_of(source))
    most = None if count is None else count(source.args)
    return most if isinstance(most, int) else None
