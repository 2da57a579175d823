"""Choose which tensors a joint graph saves, from those of PyTorch's minimum cut.

Tensors that may not be rounded are replaced by smaller ones where that can be: comparisons by masks, pooling by places,
arguments of steep functions by results. Then those that backward can compute from the others are dropped. What is left
is packed (``packing``), or weighed against a budget first (``recomputation``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import fx

from brevact.compiler import aten as table
from brevact.compiler import joint_passes, losses
from brevact.compiler.aten import Use, aten, root_of
from brevact.compiler.bits import exact_bits, stored_bits
from brevact.compiler.dependence import Saved
from brevact.compiler.integers import ends_of
from brevact.compiler.joint_graph import JointGraph
from brevact.compiler.nodes import call_of, closure, is_mask, nbytes_of, numel_of, packet_of, readers_of, value_of
from brevact.compiler.norms import save_statistics

_MOST_ROUNDS = 8
_MOST_STEPS = 12


def choose_saved_values(joint: JointGraph) -> JointGraph:
    for run in (joint_passes.unite_equal, _unite_views, *joint_passes.OF_GRADIENTS):
        run(joint)
    for run in (_save_masks, _avoid_exact, _drop_computable, _save_masks, save_statistics, *losses.PASSES):
        run(joint)
    return joint


def _unite_views(joint: JointGraph) -> None:
    """Save a tensor once in place of several views, or of a view with gaps, where that takes fewer bytes."""
    joint.analyse()
    groups: dict[fx.Node, list[fx.Node]] = {}
    for node in joint.uses:
        groups.setdefault(root_of(node), []).append(node)
    for root, views in groups.items():
        if views == [root] or not joint.may_round(root):
            continue
        bits = {view: stored_bits(joint, view) for view in views}
        if sum(numel_of(view) * width for view, width in bits.items()) >= numel_of(root) * max(bits.values()):
            for view in views:
                del joint.saved[view]
            joint.saved[root] = None


def _save_masks(joint: JointGraph) -> None:
    """Save masks and places in place of the tensors that they come from."""
    joint.analyse()

    def bits_of(*nodes: fx.Node) -> int:
        return sum(numel_of(each) * exact_bits(joint, each) for each in nodes)

    for node in list(joint.saved):
        if value_of(node) is None or not (node.op == "call_function" or node in joint.inputs):
            continue
        if joint.is_lossy(joint.uses.get(node)) or joint.settings_of(readers_of(node, joint.read)) is None:
            continue
        found = ends_of(node, joint.read, joint.gradients, joint.integers)
        if found and bits_of(*found) < bits_of(node) + is_mask(node):  # of two masks the last one
            del joint.saved[node]
            joint.saved.update(dict.fromkeys(found))
    joint.analyse()


def _avoid_exact(joint: JointGraph) -> None:
    """Save the results of ops that read a tensor exactly, such as comparisons, in place of that tensor."""
    for _ in range(_MOST_ROUNDS):
        joint.analyse()
        packed = [each for each in joint.dependence.saved if joint.packs(each)]
        all_found = [node for find in (_instead, _slope, _saturated) for each in packed for node in find(joint, each)]
        found = dict.fromkeys(node for node in all_found if node not in joint.saved)
        if not found:
            return
        kinks = [node for node in found if packet_of(node) in table.KINKS]
        joint.saved |= {node: None for node in found if packet_of(node) not in table.KINKS}
        joint.nodes = joint.backward_nodes()
        for node in kinks:
            mask = _split_at_kink(joint, node)
            joint.saved[node if mask is None else mask] = None


def _instead(joint: JointGraph, saved: Saved) -> Iterable[fx.Node]:
    for node, arg in saved.exact if saved.use is Use.EXACT and joint.may_round(saved.node) else ():
        if table.is_steep(node) and 2 * numel_of(node) > numel_of(saved.node):
            continue
        if node not in joint.gradients:
            ends = ends_of(node, joint.read, joint.gradients, joint.integers)
            yield from ends or ((node,) if value_of(node) is not None else readers_of(node, joint.read))
        elif arg is not saved.node and arg not in joint.gradients:
            yield arg


def _slope(joint: JointGraph, saved: Saved) -> Iterable[fx.Node]:
    """The slope to save in place of a smooth function's argument, if that is all that backward needs of it."""
    if saved.use is not Use.LINEAR and not saved.is_factor and len(saved.slopes) == 1:
        yield from (x for x in saved.slopes if joint.may_round(x) and nbytes_of(x) <= nbytes_of(saved.node))


def _saturated(joint: JointGraph, saved: Saved) -> Iterable[fx.Node]:
    """The results to save in place of an argument of tanh or sigmoid, whose range may exceed theirs.

    Parts of it that other ops read are saved, too; if these read all of it, it stays.
    """
    found: dict[fx.Node, None] = {}
    waiting = [saved.node] if saved.use is Use.SMOOTH else []
    while waiting:
        node = waiting.pop()
        for reader in readers_of(node, joint.read):
            if packet_of(reader) in table.SATURATING:
                found[reader] = None
            elif reader not in joint.gradients and packet_of(call_of(reader)) in table.AFFINE:
                waiting.append(reader)
            elif node is saved.node or len(found) > _MOST_STEPS:
                return ()
            else:
                found[node] = None
    is_small = sum(map(nbytes_of, found)) <= nbytes_of(saved.node)
    return found if is_small and all(map(joint.may_round, found)) else ()


def _split_at_kink(joint: JointGraph, node: fx.Node) -> fx.Node | None:
    """Let backward compute a function with a kink from its argument and a mask, linear in it; return the mask."""
    compare, x, bound = table.KINKS[packet_of(node)](node.args)
    if isinstance(bound, fx.Node):
        return None
    origin = joint.origins.get(node, node)
    mask = joint.masks.get(origin)
    if mask is None:
        with joint.insert_after(origin):
            mask = joint.masks[origin] = joint.like(node, joint.call(compare.Scalar, origin.args[0], bound))
        for user in [user for each in _clamped(origin) for user in each.users if user > mask]:
            if packet_of(user) is compare and user.args[1] == bound:
                user.replace_all_uses_with(mask)
    with joint.insert_after(max(mask, node)):
        again = joint.like(node, joint.call(aten.where.ScalarSelf, mask, bound, x))
    joint.redirect(joint.nodes, {node: again})
    return mask


def _clamped(node: fx.Node) -> Iterable[fx.Node]:
    """A function with a kink, its argument, copies, and such functions of these: equal as to their bounds."""
    links = table.KINKS.keys() | table.SAME

    def neighbours(each: fx.Node) -> list[fx.Node]:
        inputs = each.all_input_nodes if packet_of(each) in links else []
        return [*inputs, *(user for user in each.users if packet_of(user) in links)]

    found = closure([node], neighbours)
    kinks = [table.KINKS[packet_of(each)](each.args) for each in found if packet_of(each) in table.KINKS]
    if not all(isinstance(bound, int | float) for *_, bound in kinks):
        return [node]
    lower = max((bound for compare, _, bound in kinks if compare is aten.le), default=-math.inf)
    upper = min((bound for compare, _, bound in kinks if compare is aten.ge), default=math.inf)
    return found if lower < upper or len({compare for compare, *_ in kinks}) == 1 else [node]


def _drop_computable(joint: JointGraph) -> None:
    """Drop saved tensors that backward can compute elementwise from tensors that it reads anyway."""
    available = {*joint.nodes, *joint.saved}
    for node in sorted(joint.saved):
        value = value_of(node)
        is_of_weights = value is not None and value.is_floating_point() and node not in joint.activations
        is_made = node.op == "call_function" and (is_mask(node) or is_of_weights)
        found = _steps(joint, node, available) if is_made or joint.may_round(node) else None
        if found is not None and sum(map(numel_of, found[1])) < numel_of(node):
            del joint.saved[node]
            joint.saved.update(dict.fromkeys(found[1]))
            available |= found[0] | found[1]
    _avoid_exact(joint)


def _steps(joint: JointGraph, node: fx.Node, available: set[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]] | None:
    """Nodes by which backward computes a node, element by element, and others to save for it; None if it cannot."""
    steps: set[fx.Node] = set()
    missing: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each in steps or (each is not node and (each in available or each.op != "call_function")):
            continue
        is_of_weights = value_of(each) is not None and each not in joint.activations
        if table.is_cheap(each):
            steps.add(each)
            waiting += each.all_input_nodes
        elif each is not node and (is_of_weights or joint.may_round(each)):
            missing.add(each)
        else:
            return None
        if sum(packet_of(step) not in table.MOVES for step in steps) > _MOST_STEPS:
            return None
    return steps, missing
