"""Rewrite a joint graph by its formulas, so that backward reads fewer tensors, or more of them linearly.

These passes run before saved tensors are chosen, for graphs that PyTorch's cut has seen as they were. Equal masks
become one, ops that read sizes read an empty tensor, and gradients read results in place of arguments. Forward's
results stay the same bits.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from brevact.compiler import aten as table
from brevact.compiler.aten import aten
from brevact.compiler.joint_graph import JointGraph
from brevact.compiler.nodes import behind, packet_of, shape_of

_COMPARISONS = frozenset((aten.gt, aten.ge, aten.lt, aten.le))


def unite_masks(joint: JointGraph) -> None:
    comparisons: dict[Any, fx.Node] = {}
    for node in list[Any](joint.graph.nodes):
        if node.op != "call_function":
            continue
        if packet_of(node) is aten.mul and isinstance(node.args[1], int | float) and node.args[1] == 1:
            if node.meta["val"].dtype is node.args[0].meta["val"].dtype:
                node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: packet_of(user) in _COMPARISONS)
        if (mask := _same_mask(node, comparisons)) is not None:  # results stay tensors of their own
            node.replace_all_uses_with(mask, delete_user_cb=lambda user: user is not joint.output)
            if node in joint.saved:
                del joint.saved[node]
                joint.saved[mask] = None


def _same_mask(node: fx.Node, comparisons: dict[Any, fx.Node]) -> fx.Node | None:
    """Return an equal comparison, also that of x with 0 for one of a leaky function of x that it made."""
    packet = packet_of(node)
    if packet in _COMPARISONS:  # integers become floats where they are compared with one
        found = comparisons.setdefault((packet, *node.args, *map(type, node.args)), node)
        if found is not node:
            return found
    if packet is not aten.gt or node.args[1] != 0:
        return None
    value = behind(node.args[0], table.SAME | {aten.view})
    if packet_of(value) is not aten.where:
        return None
    mask, x, scaled = value.args
    if packet_of(mask) is not aten.gt or mask.args != (x, 0) or shape_of(mask) != shape_of(node):
        return None
    is_scaled = packet_of(scaled) is aten.mul and scaled.args[0] is x
    return mask if is_scaled and isinstance(scaled.args[1], int | float) and scaled.args[1] > 0 else None


def read_sizes_alone(joint: JointGraph) -> None:
    """Let ops that read the sizes of a tensor read an empty one."""
    for node in list[Any](joint.graph.nodes):
        x = node.args[1] if packet_of(node) in table.OF_SIZES else None
        if not (isinstance(x, fx.Node) and joint.may_round(x) and all(isinstance(n, int) for n in shape_of(x))):
            continue
        with joint.insert_after(node.args[0]):
            empty = joint.call(aten.new_empty_strided.default, node.args[0], *joint.layout_of(x))
        joint.gradients.add(joint.like(node, empty))
        node.replace_input_with(x, empty)


def factor_slopes(joint: JointGraph) -> None:
    """Compute g * (a / b) in place of (g * a) / b, so that backward needs the quotient, if b is 1 or more."""
    for node in list[Any](joint.graph.nodes):
        if node not in joint.gradients or packet_of(node) is not aten.div or not table.is_at_least_one(node.args[1]):
            continue
        (grad, below), settings = node.args[:2], joint.settings_of([node])
        if below in joint.gradients or settings is None or settings.is_exact or shape_of(below) != shape_of(node):
            continue
        above = None
        if packet_of(grad) is aten.mul and isinstance(grad.args[1], fx.Node):
            above = next((each for each in grad.args if each not in joint.gradients), None)
            if above is not None:
                grad = next(each for each in grad.args if each is not above)
        with joint.insert_after(node):
            made = (aten.reciprocal.default, below) if above is None else (aten.div.Tensor, above, below)
            slope = joint.like(below, joint.call(*made))
            product = joint.like(node, joint.call(aten.mul.Tensor, grad, slope))
        joint.add_activations(slope, product)
        joint.gradients.add(product)
        node.replace_all_uses_with(product)
        joint.graph.erase_node(node)


def read_exponential_units(joint: JointGraph) -> None:
    """Let the gradient of ELU and its kind read exp(x) from the result, a * (exp(x) - 1) where x is at most 0."""
    results: dict[Any, tuple[fx.Node, float]] = {}
    for node in list[Any](joint.graph.nodes):
        if packet_of(node) is not aten.where or packet_of(node.args[0]) not in (aten.gt, aten.le):
            continue
        (x, bound), (_, above, below), settings = node.args[0].args, node.args, joint.settings_of([node])
        if packet_of(node.args[0]) is aten.gt:
            unit, factor = table.scaled(below)
            if packet_of(unit) is aten.expm1 and factor and bound == 0 and joint.may_round(node):
                results[table.scaled(unit.args[0])] = node, factor
            continue
        if above not in joint.gradients or bound != 0 or settings is None or settings.is_exact:
            continue
        exp = next((each for each in above.all_input_nodes if packet_of(each) is aten.exp), None)
        if (
            exp is None
            or (argument := table.scaled(exp.args[0])) not in results
            or argument[0] is not table.scaled(x)[0]
        ):
            continue
        result, factor = results[argument]
        with joint.insert_after(max(result, exp)):
            unit = joint.like(exp, joint.call(aten.div.Tensor, result, factor))
            again = joint.like(exp, joint.call(aten.add.Tensor, unit, 1))
        joint.add_activations(unit, again)
        above.replace_input_with(exp, again)
        joint.saved[result] = None


def read_kinks_by_masks(joint: JointGraph) -> None:
    """Let gradients of ReLU read masks."""
    for node in list[Any](joint.graph.nodes):
        if packet_of(node) is aten.threshold_backward:
            with joint.graph.inserting_before(node):
                mask = joint.like(node, joint.call(aten.le.Scalar, *node.args[1:]))
                gradient = joint.like(node, joint.call(aten.where.ScalarSelf, mask, 0.0, node.args[0]))
            node.replace_all_uses_with(gradient)
            joint.graph.erase_node(node)
            joint.gradients.add(gradient)


#: Passes by which gradients read other tensors.
OF_GRADIENTS = read_sizes_alone, factor_slopes, read_exponential_units, read_kinks_by_masks
