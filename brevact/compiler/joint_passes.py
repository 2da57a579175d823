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
from brevact.compiler.nodes import behind, packet_of, shape_of, value_of

_COMPARISONS = frozenset((aten.gt, aten.ge, aten.lt, aten.le))


def unite_equal(joint: JointGraph) -> None:
    comparisons: dict[Any, fx.Node] = {}
    for node in list[Any](joint.graph.nodes):
        if node.op != "call_function":
            continue
        if packet_of(node) is aten.mul and isinstance(node.args[1], int | float) and node.args[1] == 1:
            if node.meta["val"].dtype is node.args[0].meta["val"].dtype:
                node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: packet_of(user) in _COMPARISONS)
        same: Any = node.args[0] if packet_of(node) in table.ALIASES else _same_mask(node, comparisons)
        if same is not None:  # results stay tensors of their own
            node.replace_all_uses_with(same, delete_user_cb=lambda user: user is not joint.output)
            if node in joint.saved:
                del joint.saved[node]
                joint.saved[same] = None


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
    """Multiply a gradient once by the slope of a function that several ops write out: backward may need it alone.

    g * a / b becomes g * (a / b), and g * a + g * b becomes g * (a + b); so does g / b, if b is 1 or more.
    """
    parts: dict[Any, tuple[Any, Any, Any]] = {}
    for node in list[Any](joint.graph.nodes):
        settings = joint.settings_of([node]) if node in joint.gradients and packet_of(node) in _OF_SLOPES else None
        if settings is None or settings.is_exact:
            continue
        while (found := _slope_of(joint, node, parts)) is not None:
            grad, *made = found
            given = [each for each in made if isinstance(each, fx.Node)]
            with joint.insert_after(max(given)):
                slope = joint.like(given[-1], joint.call(*made))
            if not joint.activations.isdisjoint(given):
                joint.add_activations(slope)
            with joint.insert_after(node):
                product = joint.like(node, joint.call(aten.mul.Tensor, grad, slope))
            joint.gradients.add(product)
            node.replace_all_uses_with(product)
            inputs, node = [node, *node.all_input_nodes], product
            for each in inputs:
                if not each.users and each in joint.gradients:
                    joint.graph.erase_node(each)


_OF_SLOPES = frozenset((aten.mul, aten.div, aten.neg, aten.add, aten.sub))
_NO_PARTS = None, None, None


def _slope_of(joint: JointGraph, node: fx.Node, parts: dict[Any, tuple[Any, Any, Any]]) -> Any:
    """The gradient that a node is a product of, and op and arguments of the slope; None where the node stays.

    ``parts`` gets the gradient, op and other argument of products and quotients that stay.
    """
    packet, args = packet_of(node), list(node.args)
    if args[0] not in joint.gradients:
        args.reverse()
    if node.kwargs or not all(_is_alike(node, each) for each in args):
        return None
    found = [parts.get(x, _NO_PARTS) if len(getattr(x, "users", ())) == 1 else _NO_PARTS for x in args]
    grad, op, factor = found[0]
    if packet in (aten.add, aten.sub):
        is_sum = op is aten.mul and found[1][:2] == (grad, op)
        return (grad, node.target, factor, found[1][2]) if is_sum else None
    if not joint.gradients.isdisjoint(args[1:]):
        return None
    if op is aten.mul:
        return grad, node.target, factor, *args[1:]
    if isinstance(args[-1], fx.Node):
        if packet is aten.mul and op is not None:
            return (grad, aten.neg.default, args[1]) if op is aten.neg else (grad, aten.div.Tensor, args[1], factor)
        if packet is aten.div and table.is_at_least_one(args[1]):
            return args[0], aten.reciprocal.default, args[1]
        parts[node] = args[0], packet, args[-1]
    return None


def _is_alike(node: fx.Node, x: Any) -> bool:
    one, other = value_of(node), value_of(x)
    return other is None or (one is not None and shape_of(node) == shape_of(x) and one.dtype is other.dtype)


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
