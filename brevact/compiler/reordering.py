"""Order the nodes of a packed joint graph, whose backward half PyTorch keeps in the order that it finds.

A node between two others may cost a kernel of its own. After packing, products of matrices wait until what they were
to interrupt is computed, and seeds are drawn beside calls that are kernels anyway.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from torch import fx

from brevact.compiler import aten as table
from brevact.compiler.joint_graph import JointGraph
from brevact.compiler.nodes import closure, packet_of

_PRODUCTS = table.MATRIX_PRODUCTS


def draw_seeds_between_kernels(joint: JointGraph, draws: Iterable[fx.Node]) -> None:
    behind_products = [node.next for node in joint.graph.nodes if packet_of(node) in _PRODUCTS]
    for seeds in draws:
        min((*behind_products, *seeds.users)).prepend(seeds)


def delay_products(joint: JointGraph, kept: Container[fx.Node]) -> None:
    """Let a weight's gradient wait for the next reader of an activation that backward computes for it.

    One kernel computes both that and the activation. Inductor compiles the kernels between other calls as one
    source, and the C++ compiler takes a second for each.
    """
    calls = _PRODUCTS | table.OUTPUT.keys()

    def sources(node: fx.Node) -> list[fx.Node]:
        return [each for each in node.all_input_nodes if each.op == "call_function" and each not in kept]

    for product in list[Any](joint.graph.nodes):
        if packet_of(product) not in _PRODUCTS or not (chain := _leaf(joint, product)):
            continue
        of_product = (each for each in sources(product) if each not in joint.gradients)
        made = closure(of_product, lambda each: () if packet_of(each) in _PRODUCTS else sources(each))
        readers = joint.gradients & {user for each in made for user in each.users if user > product}
        place = min((each for each in readers if packet_of(each) not in _PRODUCTS), default=None)
        if place is not None:
            place = place.next
            while place is not joint.output and packet_of(place) not in calls:
                place = place.next
            for each in chain:
                place.prepend(each)


def _leaf(joint: JointGraph, product: fx.Node) -> list[fx.Node]:
    """A product that backward alone returns, and its views; nothing if other nodes read it."""
    chain = [product] if product in joint.gradients else []
    while chain and (users := list(chain[-1].users)) != [joint.output]:
        chain += users
        if len(users) != 1 or packet_of(users[0]) not in table.MOVES:
            return []
    return chain
