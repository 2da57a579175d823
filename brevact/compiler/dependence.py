"""How a backward graph depends on its saved tensors."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, fx

from brevact.compiler import aten as table
from brevact.compiler.aten import Use
from brevact.compiler.nodes import packet_of

#: Elements of a sum from which a product of it and one of its terms is nearly linear in that term.
_MANY = 64


class _Value(NamedTuple):
    """Saved tensors that a node depends on, as bits of integers by kind of dependence."""

    linear: int = 0
    smooth: int = 0
    mixed: int = 0  # through a product of matrices
    averaged: int = 0  # linear in a sum over many elements
    exp: int = 0  # linear in the exponential of these
    is_shifted: bool = False  # 1 + exp
    is_gradient: bool = False  # depends on the tangents

    @property
    def all(self) -> int:
        return self.linear | self.smooth | self.exp


_NOTHING = _Value()


@dataclass
class Saved:
    """A saved tensor's uses: the strictest, and the nodes that demand it exactly or are its readers.

    ``slopes`` are the smooth functions of it that gradients are multiplied with, ``is_factor`` whether they are
    multiplied with linear ones, too.
    """

    node: fx.Node
    use: Use = Use.LINEAR
    is_deep: bool = False  # a smooth function of products of it
    exact: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)  # nodes and arguments
    readers: set[fx.Node] = field(default_factory=set)
    slopes: set[fx.Node] = field(default_factory=set)
    is_factor: bool = False

    @property
    def text(self) -> str:
        found = self.use.name.lower() + " deep" * self.is_deep
        return f"{found}: {packet_of(self.exact[0][0])} reads it" if self.exact else found


class Dependence:
    """How the nodes that backward computes, in order, depend on each of the saved float tensors given."""

    def __init__(self, nodes: Iterable[fx.Node], saved: Iterable[fx.Node], gradients: Container[fx.Node]) -> None:
        self.saved = [Saved(node) for node in saved]
        self._values = {each.node: _Value(linear=1 << place) for place, each in enumerate(self.saved)}
        self.gradients = gradients
        for node in nodes:
            if node.op == "output":
                for each in node.all_input_nodes:
                    if each not in gradients:
                        self._read(each, node)
            else:
                self._values[node] = self._call(node)
        for found in self.saved:
            if found.use in (Use.AVERAGED, Use.SMOOTH) and table.is_softmax(found.node):
                found.use = Use.SCORES  # its squared errors have one sign for all samples

    def _value(self, node: fx.Node) -> _Value:
        found = self._values.get(node)
        return _Value(is_gradient=node in self.gradients) if found is None else found

    def is_read(self, node: fx.Node) -> bool:
        """Whether a node is a function of saved tensors."""
        return bool(self._value(node).all)

    def _bits(self, mask: int) -> Iterable[Saved]:
        while mask:
            low = mask & -mask
            yield self.saved[low.bit_length() - 1]
            mask ^= low

    def _mark(self, mask: int, use: Use, node: fx.Node, arg: fx.Node, mixed: int = 0) -> None:
        for each in self._bits(mask):
            each.use = max(each.use, use)
            if use is Use.EXACT:
                each.exact.append((node, arg))
        for each in self._bits(mask & mixed):
            each.is_deep = each.is_deep or use >= Use.AVERAGED

    def _read(self, arg: fx.Node, node: fx.Node) -> None:
        value = self._value(arg)
        for each in self._bits(value.all):
            each.readers.add(node)
            if node.op != "output":  # which has results of the forward pass, too
                each.slopes.add(arg)
        for each in self._bits(value.linear | value.exp):
            each.is_factor |= node.op != "output"

    def _call(self, node: fx.Node, without: tuple[int, ...] = ()) -> _Value:
        target = node.target
        if target is operator.getitem:
            call: Any = node.args[0]
            without = table.independent_of(call, node.args[1])
            return self._call(call, without) if without else self._value(call)
        packet = getattr(target, "overloadpacket", target)
        values = [(place, each, self._value(each)) for place, each in _tensors(node) if place not in without]
        values = [(place, each, value) for place, each, value in values if value.all or value.is_gradient]
        if not values or packet in table.SIZES or not isinstance(node.meta.get("val"), Tensor | tuple | list):
            return _NOTHING
        is_of_attention = table.is_of_attention(node)
        if is_of_attention and packet is table.aten.amax:  # on which the softmax does not depend
            return _NOTHING
        is_gradient = any(value.is_gradient for *_, value in values)
        if is_gradient:
            for _, arg, value in values:
                if not value.is_gradient:
                    self._read(arg, node)
        if (found := self._of_exp(node, packet, values)) is not None:
            return found
        result = _NOTHING
        is_product = packet not in table.ADDITIVE
        is_quotient = is_of_attention and packet is table.aten.div
        uses = {0: Use.LINEAR, 1: Use.SCORES} if is_quotient else table.BY_PLACE.get(packet)
        for place, arg, value in values:
            use = Use.LINEAR if value.is_gradient else _use(node, arg, packet, uses, place)
            linear, smooth, mixed = value.linear, value.smooth, value.mixed
            averaged = linear if _sums_many(node, arg) else value.averaged
            if value.exp:
                self._mark(value.exp, Use.EXACT, node, arg)
                smooth |= value.exp
            if use >= Use.SMOOTH:
                self._mark(linear | smooth, use, node, arg, mixed)
                linear, smooth = 0, linear | smooth
            if is_product and place != table.OUTPUT.get(packet):  # dP - rowsum(dO O) is linear in V, as its terms are
                both = result.all & (linear | smooth)
                nearly = result.linear & linear & (result.averaged ^ averaged)
                self._mark(nearly, Use.AVERAGED, node, arg, result.mixed | mixed)
                both &= ~nearly
                self._mark(both, Use.SMOOTH, node, arg, result.mixed | mixed)
                linear, smooth = linear & ~both, smooth | both
            averaged &= ~result.all | result.averaged
            averaged |= result.averaged & ~(linear | smooth)
            smooth |= result.smooth
            linear = (result.linear | linear) & ~smooth
            result = _Value(linear, smooth, result.mixed | mixed, averaged & linear)
        if not is_gradient and packet in table.MATRIX_PRODUCTS and not table.is_score(node):
            result = result._replace(mixed=result.all)
        return result._replace(is_gradient=is_gradient)

    def _of_exp(self, node: fx.Node, packet: Any, values: list[tuple[int, fx.Node, _Value]]) -> _Value | None:
        """Follow an exponential as far as the functions of 1 + exp(x), which are smooth."""
        place, arg, value = values[0]
        if packet is table.aten.exp and len(values) == 1 and not value.is_gradient and not value.exp:
            if _is_negative_square(node.args[0]):
                return self._smooth(node, value)
            if table.is_of_attention(node):
                return self._smooth(node, value, Use.SCORES)
            return _Value(exp=value.all, mixed=value.mixed)
        if len(values) == 1 and value.exp and not value.linear | value.smooth:
            if packet is table.aten.add and place == 0 and node.args[1] == 1:
                return value._replace(is_shifted=True)
            if packet is table.aten.log1p or (value.is_shifted and packet in table.OF_ONE_PLUS_EXP):
                return self._smooth(node, value)
            if packet in table.CASTS:
                return value
        if len(values) == 2 and packet in table.OF_ONE_PLUS_EXP and values[1][2].is_shifted and values[1][2].exp:
            top, below = value, values[1][2]
            self._mark(below.exp, Use.SMOOTH, node, arg, below.mixed)
            if top.exp and packet is table.aten.div and values[1][1].args[0] is arg:  # exp(x) / (exp(x) + 1)
                return self._smooth(node, top)
            if top.exp:
                return None
            smooth = top.smooth | below.exp
            return _Value(top.linear & ~smooth, smooth, top.mixed | below.mixed, is_gradient=top.is_gradient)
        return None

    def _smooth(self, node: fx.Node, value: _Value, use: Use = Use.SMOOTH) -> _Value:
        self._mark(value.all, use, node, node, value.mixed)
        return _Value(smooth=value.all, mixed=value.mixed)


def _sums_many(node: fx.Node, arg: fx.Node) -> bool:
    if packet_of(node) not in table.SUMS:
        return False
    many, few = (each.meta["val"].numel() for each in (arg, node))
    return isinstance(many, int) and isinstance(few, int) and many >= _MANY * few


def _tensors(node: fx.Node) -> Iterable[tuple[int, fx.Node]]:
    for place, arg in enumerate((*node.args, *node.kwargs.values())):
        if isinstance(arg, fx.Node):
            yield place, arg
        elif isinstance(arg, list | tuple):
            for each in arg:
                if isinstance(each, fx.Node):
                    yield place, each


def _use(node: fx.Node, arg: fx.Node, packet: Any, uses: dict[int, Use] | None, place: int) -> Use:
    if (_is_float(arg) and not _is_float(node)) or node.kwargs.get("rounding_mode") is not None:
        return Use.EXACT
    if uses is not None:
        return uses.get(place, Use.EXACT)
    if packet in table.ADDITIVE or packet in table.PRODUCTS or packet in table.OF_SIZES:
        return Use.LINEAR
    if packet in table.SMOOTH or (packet is table.aten.pow and table.powers_are_smooth(node.args[1])):
        return Use.SMOOTH
    if packet is table.aten.rsqrt and table.is_at_least_one(arg):
        return Use.SMOOTH
    return Use.EXACT


def _is_float(node: fx.Node) -> bool:
    value = node.meta["val"]
    return not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()


def _is_negative_square(node: Any) -> bool:
    """Whether the argument of an exponential is a negative multiple of a square."""
    if packet_of(node) is not table.aten.mul:
        return False
    inner, factor = node.args[:2]
    return isinstance(factor, float | int) and factor < 0 and table.is_square(inner)
