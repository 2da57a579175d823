"""Losses, whose gradients are small beside the tensors that they are computed from.

After the saved tensors are chosen, those of a scalar's own ops give way to its gradients, which forward computes for a
tangent of 1. Probabilities near 1 are saved as distances to 1. What is packed then has errors of a gradient's own size.
"""

from __future__ import annotations

import torch
from torch import fx

from brevact.autograd.region.settings import bits_of
from brevact.compiler import MARK
from brevact.compiler import aten as table
from brevact.compiler.aten import aten, prims
from brevact.compiler.bits import stored_bits
from brevact.compiler.joint_graph import JointGraph
from brevact.compiler.nodes import behind, call_of, numel_of, packet_of, shape_of, value_of

_MOST_COLORS = 3
_LINEAR = table.ADDITIVE | table.OF_SIZES | {aten.mul, aten.div, prims.fma, aten.new_empty_strided}


def save_gradients_of_loss(joint: JointGraph) -> None:
    for tangent in joint.tangents:
        _save_gradients(joint, tangent)


def _save_gradients(joint: JointGraph, tangent: fx.Node) -> None:
    """Save the gradients of a scalar's own ops, computed in forward for a tangent of 1, if that takes no more bits.

    They are linear in the tangent. Rounded, their errors are of their own size; where the tensors that they are
    computed from are near each other, as student and teacher, errors of these are larger than their difference.
    """
    value = value_of(tangent)
    if value is None or value.dim() or not value.is_floating_point():
        return
    inside: dict[fx.Node, bool] = {}  # whether a gradient depends on activations
    for node in joint.nodes:
        above = [each for each in node.all_input_nodes if each in joint.gradients]
        if above and all(each is tangent or each in inside for each in above) and _is_of_loss(joint, node):
            own = any(each in joint.activations for each in node.all_input_nodes)
            inside[node] = own or any(inside.get(each, False) for each in above)
    ends: list[fx.Node] = []
    for node in reversed(inside):  # users come before the nodes that they read
        if not inside[node] or all(inside.get(user, False) for user in node.users):
            continue
        inputs = node.all_input_nodes
        is_read = any(not inside.get(user, False) for each in inputs for user in each.users if user is not node)
        if all(each in inside for each in inputs) and (is_read or sum(map(numel_of, inputs)) <= numel_of(node)):
            inside[node] = False  # a move, or a broadcast sum, or a sum of what is saved: backward does it
        else:
            ends.append(node)
    loss = {node for node in inside if inside[node]}
    others = (node for node in joint.backward_nodes(loss) if node is not joint.output)
    freed = set(joint.saved).difference(joint.of_backward(), *(node.all_input_nodes for node in others))
    floats = [node for node in freed if value_of(node) is not None and node.op == "call_function"]
    before = sum(numel_of(each) * stored_bits(joint, each) for each in floats)
    after = sum(numel_of(each) * bits_of(joint.settings_of([_marked(joint, each)]).quantizer) for each in ends)
    if not ends or after > before or any(map(table.is_steep, ends)):
        return
    with joint.insert_after(joint.last_input):
        unit = joint.call(aten.full.default, [], 1.0, dtype=value.dtype, device=value.device)
    copies = {tangent: unit}
    for node in inside:
        with joint.graph.inserting_before(node):
            copies[node] = joint.graph.node_copy(node, lambda each: copies.get(each, each))
    for node in ends:
        with joint.insert_after(node):
            product = joint.like(_marked(joint, node), joint.call(aten.mul.Tensor, copies[node], tangent))
        readers = node.users.keys() - loss - {product}
        node.replace_all_uses_with(product, delete_user_cb=readers.__contains__)
        joint.gradients.add(product)
        joint.saved[copies[node]] = None
    joint.add_activations(*(copies[node] for node in loss))
    joint.changes += 1
    joint.analyse()


def _marked(joint: JointGraph, node: fx.Node) -> fx.Node:
    """The node, or for a move or a sum of gradients, which autograd may add without a mark, one that it reads."""
    while packet_of(node) in table.ADDITIVE and MARK not in (node.meta.get("custom") or {}) and node.all_input_nodes:
        if joint.settings_of([node]) is not None:
            break
        node = node.all_input_nodes[0]
    return node


def _is_of_loss(joint: JointGraph, node: fx.Node) -> bool:
    value, settings = value_of(node), joint.settings_of([_marked(joint, node)])
    if settings is None or settings.is_exact or settings.is_lossless:
        return False
    if packet_of(node) is aten.eq:
        return bool(node.args[1] == 0)  # which a tangent other than 0 leaves
    if packet_of(call_of(node)) is aten.convolution_backward:  # by a window of images
        _, image, weight, *_, wanted = call_of(node).args
        return list(wanted) == [True, False, False] and shape_of(image)[1] <= _MOST_COLORS and weight not in joint.live
    others = [behind(each, table.MOVES) for each in node.all_input_nodes if each not in joint.gradients]
    weights = {each for each in others if each.op == "placeholder" and each in joint.live - joint.inputs}
    is_data = joint.activations.issuperset(others) and not weights  # the loss ends behind the layers
    is_of_rows = is_data and packet_of(node) in (aten.mm, aten.bmm) and joint.output not in node.users  # no weight's
    is_linear = is_of_rows or packet_of(node) in _LINEAR
    return is_linear and value is not None and value.dtype in (torch.float32, torch.bfloat16, torch.float64)


def save_what_lacks_to_one(joint: JointGraph) -> None:
    """Save 1 - p for a row's probability p above 1/2, and its place: sure networks' gradients are of that size.

    A softmax saves the place alone; p is what the others' sum lacks to 1.
    """
    cast, call, like = prims.convert_element_type.default, joint.call, joint.like
    options = {"start": 1, "step": 1, "dtype": torch.int64, "requires_grad": False}
    for each in joint.dependence.saved:
        p, dim = each.node, table.classes_of(each.node)
        if dim is None or not joint.is_lossy(each):
            continue
        count, shape = shape_of(p)[dim], [-1 if axis == dim else 1 for axis in range(len(shape_of(p)))]
        with joint.insert_after(p):
            places = call(prims.iota.default, count, **options, device=p.meta["val"].device)
            places = call(aten.view.default, places, shape)
            sure = call(aten.where.ScalarOther, call(aten.gt.Scalar, p, 0.5), places, 0)
            place = call(aten.amax.default, call(cast, sure, torch.float32), [dim], True)
            place = call(cast, place, torch.uint8 if count < 256 else torch.int32)
            if table.dim_of_softmax(p) is None:
                lacks = left = _turn(joint, p, like(p, call(aten.eq.Tensor, places, place)), p, p)
            else:  # offsets of its gradient cancel where the sum is 1
                is_other = like(p, call(aten.ne.Tensor, places, place))
                left = like(p, call(aten.where.ScalarOther, is_other, p, 0))
                lacks = like(p, call(aten.sum.dim_IntList, left, [dim], True))
            again = _turn(joint, p, like(p, call(aten.eq.Tensor, places, place)), lacks, left)
        joint.integers.know(place, count)
        joint.add_activations(left)
        joint.replace_saved(p, again, left, place)
    joint.analyse()


def save_distances_to_one(joint: JointGraph) -> None:
    """Save 1 - p for a sigmoid p above 1/2, and a mask: sure elements' gradients are of that size."""
    for each in joint.dependence.saved:
        p = each.node
        if packet_of(p) is not aten.sigmoid or not joint.is_lossy(each):
            continue
        with joint.insert_after(p):
            is_above = joint.like(p, joint.call(aten.gt.Scalar, p, 0.5))
            left = _turn(joint, p, is_above, p, p)
            again = _turn(joint, p, is_above, left, left)
        joint.add_activations(left)
        joint.replace_saved(p, again, left, is_above)
    joint.analyse()


def _turn(joint: JointGraph, p: fx.Node, is_sure: fx.Node, lacks: fx.Node, x: fx.Node) -> fx.Node:
    """1 less what a sure probability lacks, which is that probability or its distance to 1; other elements stay."""
    left = joint.call(aten.add.Tensor, joint.call(aten.neg.default, lacks), 1)
    return joint.like(p, joint.call(aten.where.self, is_sure, left, x))


PASSES = save_gradients_of_loss, save_what_lacks_to_one, save_distances_to_one
