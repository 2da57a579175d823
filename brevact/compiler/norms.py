"""Norms and keys of attention: saved tensors that forward centres before it packs them.

What a norm reads is packed normalized, by means and deviations that forward computes anyway, and what attention reads
as keys less its mean. Where one of these alone reads a copy in another order, the joint graph saves that copy. The
nodes that pack (``packing``) then look for the same statistics and keys.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from brevact.autograd.region.settings import BackwardSettings, bits_of
from brevact.compiler import aten as table
from brevact.compiler.aten import aten, root_of
from brevact.compiler.joint_graph import JointGraph
from brevact.compiler.nodes import call_of, closure, nbytes_of, numel_of, packet_of, readers_of, shape_of, value_of
from brevact.quantizers.normalizing import FUSED


def statistics_of(node: fx.Node, settings: BackwardSettings) -> tuple[fx.Node, fx.Node | None, fx.Node] | None:
    """A view that a norm reads of a tensor that is packed normalized, and the means and inverse deviations.

    A quotient has those that ``save_statistics`` has computed.
    """
    if settings.is_lossless or node.meta["val"].dtype not in FUSED:
        return None
    mean = root_of(node.args[1]) if packet_of(node) is aten.sub and value_of(node.args[1]) is not None else None
    if mean is not None and (found := _of_variance(call_of(mean), node)) is not None:
        return node, None, found[1]
    same = closure([node], lambda each: (x for x in each.users if packet_of(x) in table.CASTS | {aten.view}))
    for each in same:
        for user in each.users:
            if (found := _of_variance(user, each)) is not None:
                return each, *found
            if shape_of(user) != shape_of(each):
                continue
            if packet_of(user) is aten.sub and user.args[0] is each and _is_broadcast(user.args[1], user):
                for scaled in user.users:
                    if (invstd := _inverse(scaled, user)) is not None:
                        return each, user.args[1], invstd  # type: ignore[return-value]
            elif (invstd := _inverse(user, *same)) is not None:
                return each, None, invstd
    return None


def _of_variance(node: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The means that a node computes of a tensor of the shape of ``x``, beside variances, and inverse deviations."""
    if packet_of(node) is not aten.var_mean or shape_of(node.args[0]) != shape_of(x):
        return None
    results = {each.args[1]: each for each in node.users}
    variance, mean = results.get(0), results.get(1)
    above = [x for each in variance.users for x in (each, *each.users)] if variance is not None else []
    invstd = next((each for each in above if packet_of(each) is aten.rsqrt), None)
    if mean is None or invstd is None or shape_of(mean) != shape_of(invstd):
        return None
    return (mean, invstd) if len(shape_of(mean)) == len(shape_of(x)) else None


def _inverse(node: fx.Node, *of: fx.Node) -> fx.Node | None:
    """The inverse deviations that a node multiplies a tensor with, or those that are computed of its divisors."""
    if (norms := _divisor(node)) is not None:
        inverses = (each for least in getattr(norms, "users", ()) for each in least.users)
        return next((each for each in inverses if packet_of(each) is aten.reciprocal), None)
    found = [each for each in node.all_input_nodes if each not in of and _is_broadcast(each, node)]
    is_one = packet_of(node) is aten.mul and len(found) == 1 and packet_of(root_of(found[0])) is aten.rsqrt
    return found[0] if is_one else None


def _is_broadcast(node: Any, user: fx.Node) -> bool:
    return value_of(node) is not None and 2 * numel_of(node) <= numel_of(user)


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

    Where a norm alone reads a tensor, in another order or plus others, that is saved: its rows are what the norm
    scales. So is what attention alone reads as keys. An input whose statistics take as many bytes stays unpacked.
    """
    found: dict[fx.Node, None] = {}
    inverses = [each for node in list[Any](joint.graph.nodes) for each in _invert(joint, node)]
    for each in filter(joint.is_lossy, joint.dependence.saved):
        node, settings = each.node, joint.settings_of(each.readers)
        while (statistics := statistics_of(node, settings)) is None and not is_key(node, joint.read):
            reader, *others = readers_of(node, joint.read)
            if others or packet_of(reader) not in table.AFFINE or nbytes_of(reader) != nbytes_of(node):
                break
            node = reader
        if node is not each.node and (statistics is not None or is_key(node, joint.read)):
            del joint.saved[each.node]
            found[node] = None
        of_norm = [
            x for x in (statistics or ())[1:] if x in inverses or (x is not None and joint.dependence.is_read(x))
        ]
        codes = numel_of(node) * bits_of(settings.quantizer) // 8
        if sum(map(nbytes_of, of_norm)) + codes < nbytes_of(node):
            found.update(dict.fromkeys(of_norm))
            joint.exact.update(_views(of_norm))
        else:
            joint.exact.add(node)
            joint.saved = {x: None for x in joint.saved if x not in _views(of_norm)}
    for node in inverses:
        if not (node.users or node in found):
            joint.graph.erase_node(node)
    if found or joint.exact:
        joint.saved.update(found)
        joint.changes += 1
        joint.analyse()


def _views(nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    return closure(nodes, lambda node: (user for user in node.users if packet_of(user) in table.MOVES))


def _invert(joint: JointGraph, node: fx.Node) -> Iterator[fx.Node]:
    """Compute the inverses of the norms of rows that a node divides these by; a row of zeros is divided by 1 / tiny."""
    norms = _divisor(node) if node not in joint.gradients else None
    if norms is not None and _is_broadcast(norms, node) and _root(norms) is not None and _inverse(node) is None:
        with joint.insert_after(norms):
            least = joint.call(aten.clamp_min.default, norms, torch.finfo(norms.meta["val"].dtype).tiny)
            yield joint.like(norms, joint.call(aten.reciprocal.default, joint.like(norms, least)))


def _divisor(node: fx.Node) -> Any:
    below: Any = node.args[1] if packet_of(node) is aten.div else None
    return below.args[0] if packet_of(below) is aten.expand else below


def is_embedding(node: fx.Node) -> bool:
    """Whether a matrix's rows are divided by their norms, or are such quotients."""
    roots = (_root(_divisor(each)) for each in (node, *node.users) if len(shape_of(each)) == 2)
    return any(root is not None and packet_of(root.args[0]) is aten.sum for root in roots)


def _root(node: Any) -> fx.Node | None:
    """A root, such as of a sum of squares, of which a node is the larger of it and a number, or their sum."""
    while packet_of(node) in table.MOVES | table.CASTS | {aten.clamp_min, aten.add}:
        if packet_of(node) is aten.add and not (isinstance(node.args[1], float | int) and node.args[1] >= 0):
            return None
        node = node.args[0]
    is_root = packet_of(node) is aten.sqrt or (packet_of(node) is aten.pow and 0 < node.args[1] < 1)
    return node if is_root else None
