"""Norms and keys of attention: saved tensors that forward centres before it packs them.

What a norm reads is packed normalized, by means and deviations that forward computes anyway, and what attention reads
as keys less its mean. Where one of these alone reads a copy in another order, the joint graph saves that copy. The
nodes that pack (``packing``) then look for the same statistics and keys.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import fx

from brevact.autograd.region.settings import BackwardSettings
from brevact.compiler import aten as table
from brevact.compiler.aten import aten, root_of
from brevact.compiler.joint_graph import BROADCAST, JointGraph
from brevact.compiler.nodes import closure, nbytes_of, numel_of, packet_of, readers_of, shape_of, value_of
from brevact.quantizers.normalizing import FUSED


def statistics_of(node: fx.Node, settings: BackwardSettings) -> tuple[fx.Node, fx.Node | None, fx.Node] | None:
    """A view that a norm reads of a tensor that is packed normalized, and the means and inverse deviations."""
    if settings.is_lossless or node.meta["val"].dtype not in FUSED:
        return None
    same = closure([node], lambda each: (x for x in each.users if packet_of(x) in table.CASTS | {aten.view}))
    for each in same:
        for user in each.users:
            packet = packet_of(user)
            if packet not in (aten.sub, aten.mul) or shape_of(user) != shape_of(each):
                continue
            if packet is aten.sub and user.args[0] is each and _is_broadcast(user.args[1], user):
                for scaled in user.users:
                    if (invstd := _deviation(scaled, user)) is not None:
                        return each, user.args[1], invstd  # type: ignore[return-value]
            elif (invstd := _deviation(user, *same)) is not None:
                return each, None, invstd
    return None


def _deviation(node: fx.Node, *of: fx.Node) -> fx.Node | None:
    """The inverse deviations that a node multiplies a tensor with."""
    found: list[Any] = [each for each in node.args if each not in of and _is_broadcast(each, node)]
    is_one = packet_of(node) is aten.mul and len(found) == 1 and packet_of(root_of(found[0])) is aten.rsqrt
    return found[0] if is_one else None


def _is_broadcast(node: Any, user: fx.Node) -> bool:
    return value_of(node) is not None and numel_of(node) * BROADCAST <= numel_of(user)


def is_key(node: fx.Node, read: Container[fx.Node]) -> bool:
    """Whether attention alone reads a tensor, as its keys, of which it does not read the mean."""
    readers = readers_of(node, read)
    places = [table.KEYS.get(packet_of(each), (-1, -1)) for each in readers]
    return bool(readers) and all(
        key > 0 and each.args[key] is node and each.args[query] is not node
        for each, (query, key) in zip(readers, places, strict=True)
    )


def save_statistics(joint: JointGraph) -> None:
    """Save means and deviations of norms whose inputs are packed normalized, rather than compute them again.

    Where a norm alone reads a tensor, in another order, the moved copy is saved: its rows are what the norm scales.
    So is it where attention alone reads it as keys.
    """
    found: dict[fx.Node, None] = {}
    for each in filter(joint.is_lossy, joint.dependence.saved):
        node, settings = each.node, joint.settings_of(each.readers)
        while (statistics := statistics_of(node, settings)) is None and not is_key(node, joint.read):
            reader, *others = readers_of(node, joint.read)
            if others or packet_of(reader) not in table.MOVES or nbytes_of(reader) != nbytes_of(node):
                break
            node = reader
        if node is not each.node and (statistics is not None or is_key(node, joint.read)):
            del joint.saved[each.node]
            found[node] = None
        found.update((x, None) for x in (statistics or ())[1:] if x is not None and joint.dependence.is_read(x))
    if found:
        joint.saved.update(found)
        joint.analyse()
