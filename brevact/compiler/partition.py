"""Choose which tensors a graph saves for backward, and pack them.

PyTorch's partitioner calls `choose_saved_values_set` for the nodes that forward hands to backward, and extracts both
graphs from the answer. :class:`Packing` takes PyTorch's choice, replaces tensors that may not be rounded by smaller
ones where it can, and adds nodes that pack and decode the others.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor, fx

from brevact.autograd.call_arguments import ACTIVATION_DTYPES
from brevact.autograd.deriving import derived
from brevact.autograd.region.seeds import seed_of_size, seeds_of_graph
from brevact.autograd.region.settings import BackwardSettings, SaveMode, bits_of, has_even_levels
from brevact.compiler import aten as table
from brevact.compiler.aten import Use, aten, packet_of, prims
from brevact.compiler.dependence import Dependence, Saved
from brevact.compiler.integers import Integers, ends_of, numel_of
from brevact.private_names.of_compiler import detect_fake_mode, make_fx, select_decomp_table
from brevact.quantizers import UniformQuantizer, to_text
from brevact.quantizers.formats.uniform import BIT_WIDTHS
from brevact.quantizers.normalizing import FUSED
from brevact.quantizers.traits import traits_of

ops = torch.ops.brevact
_library = torch.library.Library("brevact", "FRAGMENT")
_library.define(
    "draw_seeds(Device device, int count) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag),
)
_library.impl("draw_seeds", seeds_of_graph, "CompositeExplicitAutograd")
torch.library.register_fake(
    "brevact::draw_seeds", lambda device, count: torch.empty(count, dtype=torch.int64, device=device), lib=_library
)
_COMPARISONS = frozenset((aten.gt, aten.ge, aten.lt, aten.le))
_MOST_ROUNDS = 8
_MOST_STEPS = 12
#: A tensor that is read by broadcasting to as many times its elements, such as a norm's deviations, stays unpacked.
_BROADCAST = 8
#: Use of outputs that backward computes again.
RECOMPUTED = "recomputed"
#: Fewest bits of tensors from which layers are computed again, which take at least two bits more than others.
DEEP_BITS = 6
#: Elements from which masks are packed.
_LEAST_MASK = 4096
_BLOCK = 512
#: Bytes per element of minima and scales.
_METADATA = 6 / 512
#: Bit widths that a limit chooses among.
WIDTHS = (8, 7, 6, 5, 4, 3, 2)
#: Noise of sources of recomputed layers, as a multiple of other tensors'.
_DEEP_NOISE = 4.0

#: Settings of a tensor that some ops of backward read.
SettingsOf = Callable[[Iterable[fx.Node]], Any]  # settings, or None


class Row(NamedTuple):
    """A tensor that a graph saves for backward, or the output of a layer that backward computes again."""

    node: str
    op: str
    module: str
    shape: tuple[int, ...]
    use: str
    bits: int
    plain_bytes: int
    nbytes: int


@functools.cache
def with_bits(settings: BackwardSettings, bits: int) -> BackwardSettings:
    if bits_of(settings.quantizer) in (0, bits):
        return settings
    try:
        quantizer = dataclasses.replace(settings.quantizer, bit_width=bits)
    except (TypeError, ValueError):
        quantizer = _uniform(settings.quantizer, bits)
    return dataclasses.replace(settings, quantizer=quantizer, score_bit_width=max(bits, settings.score_bit_width))


def _uniform(quantizer: Any, bits: int) -> UniformQuantizer:
    return UniformQuantizer(bit_width=bits, rounding=traits_of(quantizer).rounding)


class Sizes(NamedTuple):
    """Kinds of results and inputs of a joint graph."""

    outputs: int  # number of results of the forward pass, the first ones
    static: frozenset[int]  # places of parameters and buffers among the inputs
    activations: frozenset[int]  # places of inputs that code before the graph computed
    is_inductor: bool
    channels_last: bool  # whether Inductor keeps what convolutions read and return so


def recomputed_layers(graph: fx.Graph, settings_of: SettingsOf) -> list[fx.Node]:
    """What backward computes again: layers whose settings say so, attention (see ``is_score``), and random numbers."""
    found = []
    for node in graph.nodes:
        cost = table.cost_of(node)
        is_wanted = table.is_attention(node) or table.is_score(node) or packet_of(node) is prims.inductor_random
        if not (cost or is_wanted) or (settings := settings_of([node])) is None:
            continue
        if (is_wanted and not settings.is_exact) or 0 < cost <= settings.recompute:
            found.append(node)
    return found


class Packing:
    """Saved nodes of a joint graph, which is changed: backward then reads decoded ones.

    ``widths`` are bits in place of the settings', by name of the tensor; the fewest hold for others.
    """

    def __init__(
        self,
        graph: fx.Graph,
        saved: list[fx.Node],
        sizes: Sizes,
        settings_of: SettingsOf,
        widths: Mapping[str, int] = {},
    ) -> None:
        self.graph, self.settings_of, self.outputs, self.widths = graph, settings_of, sizes.outputs, widths
        self.is_inductor, self.channels_last, self.images = *sizes[-2:], set[fx.Node]()
        self.output = next(node for node in reversed(graph.nodes) if node.op == "output")
        self.of_forward = [each for each in self.output.args[0][: sizes.outputs] if isinstance(each, fx.Node)]
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.last_input = inputs[-1]
        primals = [node for node in inputs if not node.name.startswith("tangents")]
        self.gradients = _reached(graph, (node for node in inputs if node.name.startswith("tangents")))
        wanted = zip(primals, self.output.args[0][sizes.outputs :], strict=False)
        self.of_forward += [  # changes of inputs, such as running statistics
            node for node in graph.nodes if node.op == "call_function" and not node.users and node not in self.gradients
        ]
        self.live = _reached(graph, (node for node, gradient in wanted if gradient is not None))
        data = [node for place, node in enumerate(primals) if place not in sizes.static]
        self.inputs = {node for place, node in enumerate(primals) if place in sizes.activations}
        random = [node for node in graph.nodes if is_random(node)]
        self.activations = _reached(graph, (*data, *random))
        self.saved = dict.fromkeys(saved)
        self.integers = Integers(graph)
        values = (node.meta.get("val") for node in graph.nodes)
        self.mode: Any = detect_fake_mode([value for value in values if isinstance(value, Tensor)])
        self.origins: dict[fx.Node, fx.Node] = {}  # of nodes that backward computes anew
        self.masks: dict[fx.Node, fx.Node] = {}  # of functions with a kink
        self.seeds: dict[torch.device, fx.Node] = {}
        self.count = 0
        self.changes = 0  # of the graph
        self.analysed: tuple[int, list[fx.Node]] | None = None
        self.dependence: Dependence
        self.unite_masks()
        self.unite_views()
        self.read_sizes_alone()
        self.factor_slopes()
        self.read_exponential_units()
        self.save_masks()
        self.avoid_exact()
        self.drop_computable()
        self.save_masks()
        self.save_statistics()
        for node in inputs[len(primals) :]:
            self.save_gradients_of_loss(node)
        self.save_what_lacks_to_one()
        self.save_distances_to_one()

    # --- which tensors to save

    def of_backward(self) -> list[fx.Node]:
        return [each for each in self.output.args[0][self.outputs :] if isinstance(each, fx.Node)]

    def backward_nodes(self, without: Container[fx.Node] = ()) -> list[fx.Node]:
        found, waiting = {self.output}, self.of_backward()
        while waiting:
            node = waiting.pop()
            if not (node in found or node in self.saved or node in without or node.op == "placeholder"):
                found.add(node)
                waiting += node.all_input_nodes
        return sorted(found)

    def may_round(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        return (
            (node.op == "call_function" or node in self.inputs)
            and not (table.is_steep(node) or table.is_decomposition(node) or table.is_attention(node))
            and isinstance(value, Tensor)
            and value.dtype in ACTIVATION_DTYPES
            and node in self.activations
        )

    def unite_views(self) -> None:
        """Save a tensor once in place of several views, or of a view with gaps, where that takes fewer bytes."""
        self.analyse()
        groups: dict[fx.Node, list[Saved]] = {}
        for each in self.dependence.saved:
            groups.setdefault(_root(each.node), []).append(each)
        for root, views in groups.items():
            if [each.node for each in views] == [root] or not self.may_round(root):
                continue
            bits = {each.node: self.bits(each) for each in views}
            if sum(numel_of(view) * width for view, width in bits.items()) >= numel_of(root) * max(bits.values()):
                for view in bits:
                    del self.saved[view]
                self.saved[root] = None

    def save_masks(self) -> None:
        """Save masks and places in place of the tensors that they come from."""
        self.read_kinks_by_masks()
        self.analyse()
        uses = {each.node: each for each in self.dependence.saved}
        for node in list(self.saved):
            value, use = node.meta.get("val"), uses.get(node)
            if not (isinstance(value, Tensor) and (node.op == "call_function" or node in self.inputs)):
                continue
            if self.settings_of(readers_of(node, self.read)) is None:
                continue
            if use is None or use.use is Use.EXACT or not self.packs(use):
                found = ends_of(node, self.read, self.gradients, self.integers)
                bits, plain = sum(map(self.bits_of, found)), self.bits_of(node)
                if found and (bits < plain or (bits == plain and value.dtype is torch.bool)):
                    del self.saved[node]
                    self.saved.update(dict.fromkeys(found))
        self.analyse()

    def read_kinks_by_masks(self) -> None:
        """Let gradients of ReLU read masks."""
        for node in list[Any](self.graph.nodes):
            if packet_of(node) is aten.threshold_backward:
                with self.graph.inserting_before(node):
                    mask = self._like(node, self.call(aten.le.Scalar, *node.args[1:]))
                    gradient = self._like(node, self.call(aten.where.ScalarSelf, mask, 0.0, node.args[0]))
                node.replace_all_uses_with(gradient)
                self.graph.erase_node(node)
                self.gradients.add(gradient)

    def bits_of(self, node: fx.Node) -> int:
        """Bits of a tensor that is saved without rounding."""
        value, width = node.meta["val"], self.integers.width_of(node)
        return numel_of(node) * (1 if value.dtype is torch.bool else width or 8 * value.itemsize)

    def avoid_exact(self) -> None:
        """Save the results of ops that read a tensor exactly, such as comparisons, in place of that tensor."""
        for _ in range(_MOST_ROUNDS):
            self.analyse()
            exact = [each for each in self.dependence.saved if each.use is Use.EXACT and self.packs(each)]
            found = dict.fromkeys(node for each in exact for node in self._instead(each) if node not in self.saved)
            found |= dict.fromkeys(node for each in self.dependence.saved for node in self._slope(each))
            found |= dict.fromkeys(node for each in self.dependence.saved for node in self._saturated(each))
            if not found:
                return
            kinks = [node for node in found if packet_of(node) in table.KINKS]
            self.saved |= {node: None for node in found if packet_of(node) not in table.KINKS}
            self.nodes = self.backward_nodes()
            for node in kinks:
                mask = self.split_at_kink(node)
                self.saved[node if mask is None else mask] = None

    def analyse(self) -> None:
        """Find how backward depends on the saved tensors, and drop those that it does not read."""
        if self.analysed == (self.changes, list(self.saved)):
            return
        self.nodes = self.backward_nodes()
        self.read = set(self.nodes)
        needed = {each for node in self.nodes if node is not self.output for each in node.all_input_nodes}
        needed.update(self.of_backward())
        self.saved = {
            node: None for node in self.saved if node in needed or not isinstance(node.meta.get("val"), Tensor)
        }
        inputs = (node for node in needed if node.op == "placeholder" and node not in self.gradients)
        self.saved.update(dict.fromkeys(sorted(inputs)))
        floats = [node for node in self.saved if self.may_round(node)]
        self.dependence = Dependence(self.nodes, floats, self.gradients)
        for each in self.dependence.saved:
            if each.node not in self.live and each.use is not Use.LINEAR:  # additive masks have infinities
                each.use = Use.EXACT
        self.analysed = self.changes, list(self.saved)

    def unite_masks(self) -> None:
        comparisons: dict[Any, fx.Node] = {}
        for node in list[Any](self.graph.nodes):
            if node.op != "call_function":
                continue
            if packet_of(node) is aten.mul and isinstance(node.args[1], int | float) and node.args[1] == 1:
                if node.meta["val"].dtype is node.args[0].meta["val"].dtype:
                    same = node.args[0]
                    node.replace_all_uses_with(same, delete_user_cb=lambda user: packet_of(user) in _COMPARISONS)
            if (mask := self.same_mask(node, comparisons)) is not None:  # results stay tensors of their own
                node.replace_all_uses_with(mask, delete_user_cb=lambda user: user is not self.output)
                if node in self.saved:
                    del self.saved[node]
                    self.saved[mask] = None

    def same_mask(self, node: fx.Node, comparisons: dict[Any, fx.Node]) -> fx.Node | None:
        """Return an equal comparison, also that of x with 0 for one of a leaky function of x that it made."""
        packet = packet_of(node)
        if packet in _COMPARISONS:  # integers become floats where they are compared with one
            found = comparisons.setdefault((packet, *node.args, *map(type, node.args)), node)
            if found is not node:
                return found
        value: Any = node.args[0] if node.args else None
        while isinstance(value, fx.Node) and packet_of(value) in table.SAME | {aten.view}:
            value = value.args[0]
        if packet is not aten.gt or node.args[1] != 0 or getattr(value, "op", "") != "call_function":
            return None
        if packet_of(value) is not aten.where:
            return None
        mask, x, scaled = value.args
        if packet_of(mask) is not aten.gt or mask.args != (x, 0):
            return None
        if mask.meta["val"].shape != node.meta["val"].shape:
            return None
        is_scaled = packet_of(scaled) is aten.mul and scaled.args[0] is x
        return mask if is_scaled and isinstance(scaled.args[1], int | float) and scaled.args[1] > 0 else None

    def split_at_kink(self, node: fx.Node) -> fx.Node | None:
        """Let backward compute a function with a kink from its argument and a mask, linear in it; return the mask."""
        kink = table.KINKS.get(packet_of(node))
        if kink is None:
            return None
        compare, x, bound = kink(node.args)
        if isinstance(bound, fx.Node):
            return None
        origin = self.origins.get(node, node)
        mask = self.masks.get(origin)
        if mask is None:
            with self.insert_after(origin):
                mask = self.masks[origin] = self._like(node, self.call(compare.Scalar, origin.args[0], bound))
            for user in [user for each in self._clamped(origin) for user in each.users if user > mask]:
                if packet_of(user) is compare and user.args[1] == bound:
                    user.replace_all_uses_with(mask)
        with self.insert_after(max(mask, node)):
            again = self._like(node, self.call(aten.where.ScalarSelf, mask, bound, x))
        self._redirect(self.nodes, {node: again})
        return mask

    def _clamped(self, node: fx.Node) -> list[fx.Node]:
        """A function with a kink, its argument, copies, and such functions of these: equal as to their bounds."""
        found, waiting = [], [node]
        while waiting:
            each = waiting.pop()
            if each in found:
                continue
            found.append(each)
            is_link = packet_of(each) in table.KINKS or packet_of(each) in table.SAME
            waiting += each.all_input_nodes if is_link else ()
            waiting += [user for user in each.users if packet_of(user) in table.KINKS or packet_of(user) in table.SAME]
        bounds = [
            (compare, bound)
            for compare, _, bound in (
                table.KINKS[packet_of(each)](each.args) for each in found if packet_of(each) in table.KINKS
            )
        ]
        lower = [bound for compare, bound in bounds if compare is aten.le]
        upper = [bound for compare, bound in bounds if compare is aten.ge]
        are_numbers = all(isinstance(bound, int | float) for _, bound in bounds)
        return found if are_numbers and (not lower or not upper or max(lower) < min(upper)) else [node]

    def read_sizes_alone(self) -> None:
        """Let ops that read the sizes of a tensor read an empty one."""
        for node in list[Any](self.graph.nodes):
            x = node.args[1] if packet_of(node) in table.OF_SIZES else None
            if not (isinstance(x, fx.Node) and self.may_round(x) and all(isinstance(n, int) for n in _shape(x))):
                continue
            with self.insert_after(node.args[0]):
                empty = self.call(aten.new_empty_strided.default, node.args[0], *self.sizes(x))
            self.gradients.add(self._like(node, empty))
            node.replace_input_with(x, empty)

    def factor_slopes(self) -> None:
        """Compute g * (a / b) in place of (g * a) / b, so that backward needs the quotient, if b is 1 or more."""
        for node in list[Any](self.graph.nodes):
            if node not in self.gradients or packet_of(node) is not aten.div or not table.is_at_least_one(node.args[1]):
                continue
            (grad, below), settings = node.args[:2], self.settings_of([node])
            if below in self.gradients or settings is None or settings.is_exact or _shape(below) != _shape(node):
                continue
            above = None
            if packet_of(grad) is aten.mul and isinstance(grad.args[1], fx.Node):
                above = next((each for each in grad.args if each not in self.gradients), None)
                if above is not None:
                    grad = next(each for each in grad.args if each is not above)
            with self.insert_after(node):
                made = (aten.reciprocal.default, below) if above is None else (aten.div.Tensor, above, below)
                slope = self._like(below, self.call(*made))
            with self.insert_after(slope):
                product = self._like(node, self.call(aten.mul.Tensor, grad, slope))
            for nodes in (self.live, self.activations):
                nodes |= {slope, product}
            self.gradients.add(product)
            node.replace_all_uses_with(product)
            self.graph.erase_node(node)

    def read_exponential_units(self) -> None:
        """Let the gradient of ELU and its kind read exp(x) from the result, a * (exp(x) - 1) where x is at most 0."""
        results: dict[Any, tuple[fx.Node, float]] = {}
        for node in list[Any](self.graph.nodes):
            if packet_of(node) is not aten.where or packet_of(node.args[0]) not in (aten.gt, aten.le):
                continue
            (x, bound), (_, above, below) = node.args[0].args, node.args
            if packet_of(node.args[0]) is aten.gt:
                unit, factor = table.scaled(below)
                if packet_of(unit) is aten.expm1 and factor and bound == 0 and self.may_round(node):
                    results[table.scaled(unit.args[0])] = node, factor
                continue
            exp: Any = next(
                (each for each in getattr(above, "all_input_nodes", ()) if packet_of(each) is aten.exp), None
            )
            argument = (None, 0.0) if exp is None else table.scaled(exp.args[0])
            settings = self.settings_of([node])
            if argument not in results or argument[0] is not table.scaled(x)[0] or bound != 0:
                continue
            if settings is None or settings.is_exact or above not in self.gradients:
                continue
            result, factor = results[argument]
            with self.insert_after(max(result, exp)):
                unit = self._like(exp, self.call(aten.div.Tensor, result, factor))
                again = self._like(exp, self.call(aten.add.Tensor, unit, 1))
            for nodes in (self.live, self.activations):
                nodes |= {unit, again}
            above.replace_input_with(exp, again)
            self.saved[result] = None

    def insert_after(self, node: fx.Node) -> Any:
        return self.graph.inserting_before((self.last_input if node.op == "placeholder" else node).next)

    def drop_computable(self) -> None:
        """Drop saved tensors that backward can compute elementwise from tensors that it reads anyway."""
        available = {*self.nodes, *self.saved}
        for node in sorted(self.saved):
            is_mask = node.op == "call_function" and getattr(node.meta["val"], "dtype", None) is torch.bool
            is_of_weights = node.op == "call_function" and _is_float(node) and node not in self.activations
            if not (is_mask or is_of_weights or self.may_round(node)):
                continue
            found = self._steps(node, available)
            if found is not None and sum(map(numel_of, found[1])) < numel_of(node):
                del self.saved[node]
                self.saved.update(dict.fromkeys(found[1]))
                available |= found[0] | found[1]
        self.avoid_exact()

    def _steps(self, node: fx.Node, available: set[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]] | None:
        """Nodes by which backward computes a node, element by element, and others to save for it; None if it cannot."""
        steps: set[fx.Node] = set()
        missing: set[fx.Node] = set()
        waiting = [node]
        while waiting:
            each = waiting.pop()
            if each in steps or (each is not node and (each in available or each.op != "call_function")):
                continue
            if table.is_cheap(each):
                steps.add(each)
                waiting += each.all_input_nodes
            elif self.may_round(each) or (isinstance(each.meta.get("val"), Tensor) and each not in self.activations):
                missing.add(each)
            if node in missing or not (each in steps or each in missing):
                return None
            if sum(packet_of(step) not in table.MOVES for step in steps) > _MOST_STEPS:
                return None
        return steps, missing

    def _instead(self, saved: Saved) -> Iterable[fx.Node]:
        for node, arg in saved.exact:
            if table.is_steep(node):
                continue
            if node not in self.gradients:
                is_tensor = isinstance(node.meta["val"], Tensor)
                ends = ends_of(node, self.read, self.gradients, self.integers)
                yield from ends or ((node,) if is_tensor else readers_of(node, self.read))
            elif arg is not saved.node and arg not in self.gradients:
                yield arg

    def _slope(self, saved: Saved) -> Iterable[fx.Node]:
        """The slope to save in place of a smooth function's argument, if that is all that backward needs of it."""
        if saved.use in (Use.LINEAR, Use.EXACT) or saved.is_factor or len(saved.slopes) != 1 or not self.packs(saved):
            return
        (node,) = saved.slopes
        if self.may_round(node) and node not in self.saved and nbytes_of(node) <= nbytes_of(saved.node):
            yield node

    def _saturated(self, saved: Saved) -> list[fx.Node]:
        """The results to save in place of an argument of tanh or sigmoid, whose range may exceed theirs.

        Parts of it that other ops read are saved, too; if these read all of it, it stays.
        """
        found: dict[fx.Node, None] = {}
        waiting = [saved.node] if saved.use is Use.SMOOTH and self.packs(saved) else []
        while waiting:
            node = waiting.pop()
            for reader in readers_of(node, self.read):
                if packet_of(reader) in table.SATURATING:
                    found[reader] = None
                elif reader not in self.gradients and _call_of(reader) in table.AFFINE:
                    waiting.append(reader)
                elif node is saved.node or len(found) > _MOST_STEPS:
                    return []
                else:
                    found[node] = None
        is_small = sum(map(nbytes_of, found)) <= nbytes_of(saved.node)
        return list(found) if is_small and all(map(self.may_round, found)) else []

    def save_statistics(self) -> None:
        """Save means and deviations of norms whose inputs are packed normalized, rather than compute them again.

        Where a norm alone reads a tensor, in another order, the moved copy is saved: its rows are what the norm scales.
        So is it where attention alone reads it as keys.
        """
        found: dict[fx.Node, None] = {}
        for each in self.dependence.saved:
            if each.use is Use.EXACT or not self.packs(each):
                continue
            node, settings = each.node, self.settings_of(each.readers)
            while (statistics := self.statistics(node, settings)) is None and not self.is_key(node):
                reader, *others = readers_of(node, self.read)
                if others or packet_of(reader) not in table.MOVES or nbytes_of(reader) != nbytes_of(node):
                    break
                node = reader
            if node is not each.node and (statistics is not None or self.is_key(node)):
                del self.saved[each.node]
                found[node] = None
            found.update((x, None) for x in (statistics or ())[1:] if x is not None and self.dependence.is_read(x))
        if found:
            self.saved.update(found)
            self.analyse()

    def save_gradients_of_loss(self, tangent: fx.Node) -> None:
        """Save the gradients of a scalar's own ops, computed in forward for a tangent of 1, if that takes no more bits.

        They are linear in the tangent. Rounded, their errors are of their own size; where the tensors that they are
        computed from are near each other, as student and teacher, errors of these are larger than their difference.
        """
        value = tangent.meta.get("val")
        if not isinstance(value, Tensor) or value.dim() or not value.is_floating_point():
            return
        inside: dict[fx.Node, bool] = {}  # whether a gradient depends on activations
        for node in self.nodes:
            above = [each for each in node.all_input_nodes if each in self.gradients]
            if above and all(each is tangent or each in inside for each in above) and self._is_of_loss(node):
                own = any(each in self.activations for each in node.all_input_nodes)
                inside[node] = own or any(inside.get(each, False) for each in above)
        ends: list[fx.Node] = []
        for node in reversed(inside):  # users come before the nodes that they read
            if not inside[node] or all(inside.get(user, False) for user in node.users):
                continue
            inputs = node.all_input_nodes
            if all(each in inside for each in inputs) and sum(map(numel_of, inputs)) <= numel_of(node):
                inside[node] = False  # a move, or a broadcast sum: backward does it
            else:
                ends.append(node)
        loss = {node for node in inside if inside[node]}
        others = (node for node in self.backward_nodes(loss) if node is not self.output)
        freed = set(self.saved).difference(self.of_backward(), *(node.all_input_nodes for node in others))
        uses = {each.node: each for each in self.dependence.saved}
        floats = [node for node in freed if isinstance(node.meta.get("val"), Tensor) and node.op == "call_function"]
        before = sum(numel_of(each) * self.bits(uses[each]) if each in uses else self.bits_of(each) for each in floats)
        after = sum(numel_of(each) * bits_of(self.settings_of([each]).quantizer) for each in ends)
        if not ends or after > before or any(map(table.is_steep, ends)):
            return
        with self.insert_after(self.last_input):
            unit = self.call(aten.full.default, [], 1.0, dtype=value.dtype, device=value.device)
        copies = {tangent: unit}
        for node in inside:
            with self.graph.inserting_before(node):
                copies[node] = self.graph.node_copy(node, lambda each: copies.get(each, each))
        for node in ends:
            with self.insert_after(node):
                product = self._like(node, self.call(aten.mul.Tensor, copies[node], tangent))
            readers = node.users.keys() - loss - {product}
            node.replace_all_uses_with(product, delete_user_cb=readers.__contains__)
            self.gradients.add(product)
            self.saved[copies[node]] = None
        for nodes in (self.live, self.activations):
            nodes |= {copies[node] for node in loss}
        self.changes += 1
        self.analyse()

    def _is_of_loss(self, node: fx.Node) -> bool:
        value, settings = node.meta.get("val"), self.settings_of([node])
        if settings is None or settings.is_exact or settings.is_lossless or not isinstance(value, Tensor):
            return False
        is_linear = packet_of(node) in table.ADDITIVE or packet_of(node) in (aten.mul, aten.div)
        return is_linear and value.dtype in (torch.float32, torch.bfloat16, torch.float64)

    def save_what_lacks_to_one(self) -> None:
        """Save 1 - p for a row's probability p above 1/2, and its place: sure networks' gradients are of that size.

        A softmax saves the place alone; p is what the others' sum lacks to 1.
        """
        cast = prims.convert_element_type.default
        options = {"start": 1, "step": 1, "dtype": torch.int64, "requires_grad": False}
        for each in self.dependence.saved:
            p, dim = each.node, table.classes_of(each.node)
            if dim is None or not self.is_lossy(p, each):
                continue
            count, shape = _shape(p)[dim], [-1 if axis == dim else 1 for axis in range(len(_shape(p)))]

            def turn(x: fx.Node, lacks: fx.Node, place: fx.Node, places: fx.Node, p: fx.Node = p) -> fx.Node:
                is_sure = self._like(p, self.call(aten.eq.Tensor, places, place))
                left = self.call(aten.add.Tensor, self.call(aten.neg.default, lacks), 1)
                return self._like(p, self.call(aten.where.self, is_sure, left, x))

            with self.insert_after(p):
                places = self.call(prims.iota.default, count, **options, device=p.meta["val"].device)
                places = self.call(aten.view.default, places, shape)
                sure = self.call(aten.where.ScalarOther, self.call(aten.gt.Scalar, p, 0.5), places, 0)
                place = self.call(aten.amax.default, self.call(cast, sure, torch.float32), [dim], True)
                place = self.call(cast, place, torch.uint8 if count < 256 else torch.int32)
                if table.dim_of_softmax(p) is None:
                    lacks = left = turn(p, p, place, places)
                else:  # offsets of its gradient cancel where the sum is 1
                    is_other = self._like(p, self.call(aten.ne.Tensor, places, place))
                    left = self._like(p, self.call(aten.where.ScalarOther, is_other, p, 0))
                    lacks = self._like(p, self.call(aten.sum.dim_IntList, left, [dim], True))
                again = turn(left, lacks, place, places)
            self.integers.know(place, (0, count))
            for nodes in (self.live, self.activations):
                nodes.add(left)
            self._redirect(self.nodes, {p: again})
            del self.saved[p]
            self.saved |= {left: None, place: None}
            self.nodes = self.backward_nodes()
        self.analyse()

    def save_distances_to_one(self) -> None:
        """Save 1 - p for a sigmoid p above 1/2, and a mask: sure elements' gradients are of that size."""
        for each in self.dependence.saved:
            p = each.node
            if packet_of(p) is not aten.sigmoid or not self.is_lossy(p, each):
                continue

            def turn(x: fx.Node, is_above: fx.Node) -> fx.Node:
                return self.call(
                    aten.where.self, is_above, self.call(aten.add.Tensor, self.call(aten.neg.default, x), 1), x
                )

            with self.insert_after(p):
                is_above = self._like(p, self.call(aten.gt.Scalar, p, 0.5))
                left = self._like(p, turn(p, is_above))
                again = self._like(p, turn(left, is_above))
            for nodes in (self.live, self.activations):
                nodes.add(left)
            self._redirect(self.nodes, {p: again})
            del self.saved[p]
            self.saved |= {left: None, is_above: None}
            self.nodes = self.backward_nodes()
        self.analyse()

    def packs(self, saved: Saved) -> bool:
        settings = self.settings_of(saved.readers)
        if settings is None or settings.is_exact or numel_of(saved.node) < settings.min_numel:
            return False
        return not self.is_spread(saved.node)

    def settings_for(self, saved: Saved, width: int | None = None) -> BackwardSettings:
        settings: BackwardSettings = self.settings_of(saved.readers)
        if width is None and self.widths:
            width = self.widths.get(saved.node.name) or min(self.widths.values())
        return settings if width is None else with_bits(settings, width)

    def bits(self, saved: Saved) -> float:
        if saved.use is Use.EXACT or not self.packs(saved):
            return 8.0 * saved.node.meta["val"].itemsize
        return bits_of(self.quantizer_of(saved)) + 8 * _METADATA

    def quantizer_of(self, saved: Saved, width: int | None = None) -> Any:
        """The settings' quantizer, or a finer one for a tensor that backward reads in another way than linearly."""
        settings = self.settings_for(saved, width)
        quantizer, least = settings.quantizer, 0
        if saved.use is Use.SCORES:
            least = settings.score_bit_width
        elif saved.use is Use.SMOOTH or (saved.use is Use.AVERAGED and not self.statistics(saved.node, settings)):
            least = settings.derive_min_bits or 4
        if saved.is_deep and not settings.recompute:
            least = max(least, DEEP_BITS, next((each for each in BIT_WIDTHS if each >= bits_of(quantizer) + 2), 0))
        if not 0 < bits_of(quantizer) < least:
            return quantizer
        return _uniform(quantizer, least)

    def is_spread(self, node: fx.Node) -> bool:
        """Whether backward reads a tensor, and functions of its elements, only by broadcasting."""
        size, found, waiting = numel_of(node), {node}, [node]
        is_spread = False
        while waiting:
            for user in waiting.pop().users:
                if user not in self.read or user in found or not isinstance(user.meta.get("val"), Tensor):
                    continue
                found.add(user)
                if numel_of(user) >= _BROADCAST * size:
                    is_spread = True
                elif numel_of(user) == size and packet_of(user) not in table.PRODUCTS - {aten.mul}:
                    waiting.append(user)
                else:
                    return False
        return is_spread

    @property
    def nbytes(self) -> float:
        return sum(nbytes for _, nbytes, _ in self.costs())

    def costs(self, width: int | None = None) -> Iterator[tuple[fx.Node, float, float]]:
        """Saved tensors, their bytes, and a figure for their noise: variances in units of squared ranges."""
        uses = {each.node: each for each in self.dependence.saved}
        for node in self.saved:
            value, use = node.meta.get("val"), uses.get(node)
            if not isinstance(value, Tensor) or node.op == "placeholder":
                continue
            if self.is_lossy(node, use):
                bits, size = bits_of(self.quantizer_of(use, width)), numel_of(node)  # type: ignore[arg-type]
                noise = size * 4.0**-bits * (_DEEP_NOISE if use.is_deep else 1.0)  # type: ignore[union-attr]
                yield node, size * (bits / 8 + _METADATA), noise
            else:
                yield node, self.bits_of(node) / 8, 0.0

    def is_lossy(self, node: fx.Node, use: Saved | None) -> bool:
        return use is not None and use.use is not Use.EXACT and self.packs(use)

    def widths_within(self, limit: float) -> tuple[dict[str, int], float]:
        """Bit widths of tensors by name, of least noise within a limit or else the least ones, and their bytes."""
        lossy = [each for each in self.dependence.saved if self.is_lossy(each.node, each)]
        widths = {each.node.name: bits_of(self.settings_of(each.readers).quantizer) for each in lossy}
        steps: list[tuple[float, str, int, float]] = []  # noise per byte
        before, total = dict[str, tuple[float, float]](), 0.0
        for width in (None, *WIDTHS):
            for node, nbytes, noise in self.costs(width):
                more, less = before.get(node.name, (noise, nbytes))
                if width is None:
                    total += nbytes
                elif nbytes < less:
                    steps.append(((noise - more) / (less - nbytes), node.name, width, less - nbytes))
                if nbytes <= less:
                    before[node.name] = noise, nbytes
        for _, name, width, nbytes in sorted(steps):
            if total <= limit:
                break
            widths[name], total = width, total - nbytes
        return widths, total

    # --- packing

    def pack(self) -> tuple[list[fx.Node], list[Row]]:
        """Add the nodes that pack and decode; return those to save, and a description of each tensor among them."""
        uses = {each.node: each for each in self.dependence.saved}
        nodes, self.images = self.nodes, _images(self.graph) if self.channels_last else set()
        self.forward = _needed(self.of_forward)
        kept: dict[fx.Node, None] = {}
        decoded: dict[fx.Node, fx.Node] = {}
        rows = []
        for node in self.saved:
            value, use = node.meta.get("val"), uses.get(node)
            stored: tuple[fx.Node, ...] = (node,)
            bits = 0
            if isinstance(value, Tensor) and value.dtype is torch.bool and numel_of(node) >= _LEAST_MASK:
                if node.op == "call_function" and self.settings_of(readers_of(node, self.read)) is not None:
                    stored, bits = self.pack_mask(node, decoded), 1
            elif isinstance(value, Tensor) and (width := self.integers.width_of(node)) is not None:
                if self.settings_of(readers_of(node, self.read)) is not None:
                    stored, bits = self.pack_integers(node, width, decoded), width
            elif use is not None and use.use is not Use.EXACT and self.packs(use):
                settings, quantizer = self.settings_for(use), self.quantizer_of(use)
                if traits_of(quantizer).draws_size:
                    self.count += 1
                    quantizer = quantizer.with_drawn_size(numel_of(node), seed_of_size() + self.count)
                is_smooth = use.use is Use.SMOOTH
                stored, bits = self.pack_activation(node, settings, quantizer, decoded, is_smooth), bits_of(quantizer)
            kept.update(dict.fromkeys(stored))
            if isinstance(value, Tensor) and (node.op != "placeholder" or bits):
                rows.append(_row(node, "" if use is None else use.text, bits, stored))
        again = (node for node in nodes if packet_of(node) in table.MATRIX_PRODUCTS and node not in self.gradients)
        rows += [_row(node, RECOMPUTED, 0, ()) for node in again]
        self._redirect(nodes, decoded)
        rows += [_row(copy, "", 0, (copy,)) for copy in self._copy_overwritten(kept)]
        self.delay_products(kept)
        behind_products = [node.next for node in self.graph.nodes if packet_of(node) in table.MATRIX_PRODUCTS]
        for seeds in self.seeds.values():  # not between kernels
            min((*behind_products, *seeds.users)).prepend(seeds)
        return list(kept), rows

    def delay_products(self, kept: Container[fx.Node]) -> None:
        """Let a weight's gradient wait for the next reader of an activation that backward computes for it.

        One kernel computes both that and the activation. Inductor compiles the kernels between other calls as one
        source, and the C++ compiler takes a second for each.
        """
        calls = table.MATRIX_PRODUCTS | table.OUTPUT.keys()
        for product in list[Any](self.graph.nodes):
            if packet_of(product) not in table.MATRIX_PRODUCTS or not (chain := self._leaf(product)):
                continue
            made: set[fx.Node] = set()
            waiting = [each for each in product.all_input_nodes if each not in self.gradients]
            while waiting:
                each = waiting.pop()
                if each.op == "call_function" and each not in kept and each not in made:
                    made.add(each)
                    waiting += () if packet_of(each) in table.MATRIX_PRODUCTS else each.all_input_nodes
            readers = self.gradients & {user for each in made for user in each.users if user > product}
            place = min((each for each in readers if packet_of(each) not in table.MATRIX_PRODUCTS), default=None)
            if place is not None:
                place = place.next
                while place is not self.output and packet_of(place) not in calls:
                    place = place.next
                for each in chain:
                    place.prepend(each)

    def _leaf(self, product: fx.Node) -> list[fx.Node]:
        """A product that backward alone returns, and its views; nothing if other nodes read it."""
        chain = [product] if product in self.gradients else []
        while chain and (users := list(chain[-1].users)) != [self.output]:
            chain += users
            if len(users) != 1 or packet_of(users[0]) not in table.MOVES:
                return []
        return chain

    def _copy_overwritten(self, kept: dict[fx.Node, None]) -> Iterator[fx.Node]:
        """Let the graph read copies of inputs that it overwrites, if backward reads these."""
        values = [node.meta.get("val") for node in kept]
        storages = {value.untyped_storage()._cdata for value in values if isinstance(value, Tensor)}
        for write in [node for node in self.graph.nodes if packet_of(node) is aten.copy_]:
            read: Any = write.args[0]
            if read.op != "placeholder" or read.meta["val"].untyped_storage()._cdata not in storages:
                continue
            with self.graph.inserting_before(self.last_input.next):
                copy = self._like(read, self.call(aten.clone.default, read))
            others = (copy, write, self.output)
            read.replace_all_uses_with(copy, delete_user_cb=lambda user, others=others: user not in others)
            if read in kept:
                del kept[read]
                kept[copy] = None
                yield copy

    def call(self, target: Any, *args: Any, **options: Any) -> fx.Node:
        self.changes += 1
        node = self.graph.call_function(target, args, options)
        with self.mode:
            node.meta["val"] = target(*(fx.map_arg(args, lambda each: each.meta["val"])), **options)
        return node

    def seed(self, x: fx.Node) -> fx.Node:
        """A seed as a view, for which the compiler makes no kernel."""
        device = x.meta["val"].device
        if device not in self.seeds:
            with self.graph.inserting_before(self.last_input.next):
                self.seeds[device] = self.last_input = self.call(ops.draw_seeds.default, device, 2 * len(self.saved))
        self.count += 1
        return self.call(aten.select.int, self.seeds[device], 0, self.count - 1)

    def sizes(self, node: fx.Node) -> tuple[list[Any], list[Any]]:
        """Sizes and strides as arguments: symbols are nodes, which backward needs as well."""

        def argument(value: Any, target: Any, dim: int) -> Any:
            return self.call(target, node, dim) if isinstance(value, SymInt) else value

        x = node.meta["val"]
        return (
            [argument(size, aten.sym_size.int, dim) for dim, size in enumerate(x.shape)],
            [argument(step, aten.sym_stride.int, dim) for dim, step in enumerate(x.stride())],
        )

    def placed(self, node: fx.Node, x: fx.Node) -> tuple[fx.Node, list[Any], list[Any]]:
        """The values ``x`` of a node in the memory order that the compiler gives it, its sizes and strides."""
        if node not in self.images:
            return x, *self.sizes(node)
        with self.mode:
            stride = list(torch.empty_like(node.meta["val"], memory_format=torch.channels_last).stride())
        return self.call(prims.inductor_force_stride_order.default, x, stride), list(_shape(node)), stride

    def pack_mask(self, node: fx.Node, decoded: dict[fx.Node, fx.Node]) -> tuple[fx.Node, ...]:
        """Pack a mask; Inductor's vectors store and load bool on a CPU at a tenth of the speed of floats and bytes."""
        is_slow = self.is_inductor and node.meta["val"].device.type == "cpu"
        cast, dtype = prims.convert_element_type.default, torch.uint8 if is_slow else torch.bool
        with self.insert_after(node):
            x = self.call(cast, self.call(cast, node, torch.float32), dtype) if is_slow else node
            x, size, stride = self.placed(node, x)
            packed = self.call(ops.pack_mask.default, x, stride)
            made = self.call(ops.unpack_mask.default, packed, size, stride, dtype)
            if is_slow:
                made = self.call(aten.ne.Scalar, self.call(cast, made, torch.float32), 0)
            decoded[node] = self._like(node, made)
        return packed, *_symbols(size, stride)

    def pack_activation(
        self,
        node: fx.Node,
        settings: BackwardSettings,
        quantizer: Any,
        decoded: dict[fx.Node, fx.Node],
        is_smooth: bool,
    ) -> tuple[fx.Node, ...]:
        dtype = node.meta["val"].dtype
        viewed, *statistics = self.statistics(node, settings) or (node,)
        if statistics and settings.for_normalized is not None:
            quantizer = settings.for_normalized.quantizer
        spreads = is_smooth and has_even_levels(quantizer) and not statistics
        text, x, after = to_text(quantizer), node, max(each for each in (node, viewed, *statistics) if each is not None)
        place = self.reader_behind(after, node)
        if self.is_key(node):
            with self.insert_after(node):
                x = self.less_mean(node)
            place = max(x, after).next
        with self.graph.inserting_before(place):
            seed = self.seed(node) if quantizer.is_stochastic else None
            shape = [] if _shape(viewed) == _shape(node) else self.sizes(node)[0]
            x = self.call(aten.reshape.default, x, self.sizes(viewed)[0]) if shape else x
            x = self.inlined(derived.spread, x) if spreads else x
            x, size, stride = self.placed(x, x)
            if not statistics:
                packed = self.call(ops.quantize.default, x, seed, text, stride)
                made = self.call(ops.dequantize.default, packed, text, size, stride, dtype)
                made = self.inlined(derived.gathered, made) if spreads else made
            else:
                packed = self.call(ops.quantize_normalized.default, x, *statistics, seed, text, stride)
                made = self.call(ops.denormalize.default, packed, *statistics, text, size, stride, dtype)
            if shape:
                made = self.call(aten.reshape.default, made, shape)
            decoded[node] = self._like(node, made)
        symbols = [*_symbols(size, stride, shape), *(each for each in statistics if each is not None)]
        if settings.save_mode is SaveMode.SAVE_QUANTIZED:
            return packed, *symbols
        return node, *([] if seed is None else [seed]), *symbols

    def inlined(self, function: Callable[[Tensor], Tensor], x: fx.Node) -> fx.Node:
        """The result of a function of a tensor, by nodes of its ops."""
        with self.mode:
            traced = make_fx(function, select_decomp_table())(x.meta["val"]).graph
        found: dict[fx.Node, fx.Node] = {}
        for node in traced.nodes:
            if node.op == "call_function":
                args, options = fx.map_arg((node.args, node.kwargs), found.__getitem__)
                found[node] = self.call(node.target, *args, **options)
            elif node.op == "placeholder":
                found[node] = x
        (result,) = traced.output_node().args
        return found[result]

    def reader_behind(self, place: fx.Node, node: fx.Node) -> fx.Node:
        """Forward's next reader of a tensor: kernels up to it, without a call between them, are compiled as one."""
        same, found = [node], list[fx.Node]()
        for each in same:  # which grows
            for user in self.forward & each.users.keys():
                (same if packet_of(user) in table.MOVES else found).append(user)
        behind = (self.last_input if place.op == "placeholder" else place).next
        return min((user for user in found if user > place), default=behind)

    def is_key(self, node: fx.Node) -> bool:
        """Whether attention alone reads a tensor, as its keys, of which it does not read the mean."""
        readers = readers_of(node, self.read)
        places = [table.KEYS.get(packet_of(each), (-1, -1)) for each in readers]
        return bool(readers) and all(
            key > 0 and each.args[key] is node and each.args[query] is not node
            for each, (query, key) in zip(readers, places, strict=True)
        )

    def less_mean(self, node: fx.Node) -> fx.Node:
        """Keys less their mean, where it exceeds their mean deviation: not of a few far keys, such as masked ones."""
        mean = self.call(aten.mean.dim, node, [-2], True)
        rest = self.call(aten.sub.Tensor, node, mean)
        deviation = self.call(aten.mean.dim, self.call(aten.abs.default, rest), [-2], True)
        is_common = self.call(aten.gt.Tensor, self.call(aten.abs.default, mean), deviation)
        return self.call(aten.where.self, is_common, rest, node)

    def pack_integers(self, node: fx.Node, width: int, decoded: dict[fx.Node, fx.Node]) -> tuple[fx.Node, ...]:
        x = node.meta["val"]
        steps = [step if isinstance(step, int) else int(step.node.hint) for step in x.stride()]
        order = sorted(range(x.dim()), key=lambda dim: (-steps[dim], dim))
        with self.insert_after(node):
            sizes, _ = self.sizes(node)
            numel = math.prod(x.shape) if isinstance(x.numel(), int) else self.call(aten.sym_numel.default, node)
            flat = self.call(aten.reshape.default, self.call(aten.permute.default, node, order), [-1])
            packed = self.call(ops.pack_codes.default, flat, width, _BLOCK)
            found = self.call(ops.unpack_codes.default, packed, width, numel, _BLOCK)
            found = self.call(prims.convert_element_type.default, found, x.dtype)
            found = self.call(aten.view.default, found, [sizes[dim] for dim in order])
            back = [order.index(dim) for dim in range(x.dim())]
            decoded[node] = self._like(node, self.call(aten.permute.default, found, back))
        return packed, *_symbols(sizes, [numel])

    def statistics(self, node: fx.Node, settings: BackwardSettings) -> tuple[fx.Node, fx.Node | None, fx.Node] | None:
        """A view that a norm reads of a tensor that is packed normalized, and the means and inverse deviations."""
        if settings.is_lossless or node.meta["val"].dtype not in FUSED:
            return None
        same = [node]
        for each in same:  # which grows
            same += [user for user in each.users if packet_of(user) in table.CASTS | {aten.view} and user not in same]
        for each in same:
            for user in each.users:
                packet = packet_of(user)
                if packet not in (aten.sub, aten.mul) or _shape(user) != _shape(each):
                    continue
                if packet is aten.sub and user.args[0] is each and _is_broadcast(user.args[1], user):
                    for scaled in user.users:
                        if (invstd := _deviation(scaled, user)) is not None:
                            return each, user.args[1], invstd  # type: ignore[return-value]
                elif (invstd := _deviation(user, *same)) is not None:
                    return each, None, invstd
        return None

    def _like(self, node: fx.Node, made: fx.Node) -> fx.Node:
        made.meta.update({key: each for key, each in node.meta.items() if key not in ("val", "tensor_meta")})
        return made

    def _redirect(self, nodes: list[fx.Node], decoded: dict[fx.Node, fx.Node]) -> None:
        """Let backward read the decoded nodes; it recomputes values that forward computes, too, by nodes of its own."""
        self.changes += 1
        forward = _needed(self.of_forward, *decoded)
        for node in nodes:
            if node is self.output:
                results: Any = self.output.args[0]
                new = [decoded.get(each, each) for each in results[self.outputs :]]
                self.output.args = ((*results[: self.outputs], *new), *self.output.args[1:])
                continue
            given = [decoded.get(each, each) for each in node.all_input_nodes]
            last = max((node, *given))
            if given == node.all_input_nodes:
                if last is not node:
                    last.append(node)
            elif node in forward:
                with self.insert_after(last):
                    again = self.graph.node_copy(node, lambda each: decoded.get(each, each))
                decoded[node] = again
                self.origins[again] = self.origins.get(node, node)
            else:
                for each, other in zip(node.all_input_nodes, given, strict=True):
                    node.replace_input_with(each, other)
                if last is not node:
                    last.append(node)


def _reached(graph: fx.Graph, sources: Iterable[fx.Node]) -> set[fx.Node]:
    found = set(sources)
    for node in graph.nodes:
        if node.op == "call_function" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _images(graph: fx.Graph) -> set[fx.Node]:
    """Contiguous tensors that convolutions read and return, and others of their sizes that are computed beside them."""
    found: set[fx.Node] = set()
    layers = (node for node in graph.nodes if packet_of(node) is aten.convolution)
    waiting: list[Any] = [each for node in layers for each in (node, node.args[0])]
    for node in waiting:  # which grows
        value = node.meta.get("val")
        if node in found or node.op != "call_function" or not isinstance(value, Tensor) or value.dim() != 4:
            continue
        if all(isinstance(size, int) for size in value.shape) and value.is_contiguous():
            found.add(node)
            near = (*node.users, *node.all_input_nodes)
            waiting += [each for each in near if getattr(each.meta.get("val"), "shape", None) == value.shape]
    return found


def _needed(outputs: Iterable[fx.Node], *more: fx.Node) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = [*outputs, *more]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def readers_of(node: fx.Node, nodes: set[fx.Node]) -> list[fx.Node]:
    return [each for each in node.users if each in nodes]


def _root(node: Any) -> fx.Node:
    """The tensor that a node is a view of, or a part, or a copy in another memory order."""
    while True:
        before = node.args[0] if node.target is operator.getitem else node
        if packet_of(before) not in table.MOVES:
            return node
        node = before.args[0]


def _call_of(node: Any) -> Any:
    """The op of a node, of one of several results that of the call that returns them."""
    return packet_of(node.args[0] if node.target is operator.getitem else node)


def _shape(node: fx.Node) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape)


def nbytes_of(node: fx.Node) -> int:
    value = node.meta.get("val")
    return numel_of(node) * value.itemsize if isinstance(value, Tensor) else 0


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()


def is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_broadcast(node: Any, user: fx.Node) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and numel_of(node) * _BROADCAST <= numel_of(user)


def _deviation(node: fx.Node, *of: fx.Node) -> fx.Node | None:
    """The inverse deviations that a node multiplies a tensor with."""
    if packet_of(node) is not aten.mul:
        return None
    found: list[Any] = [each for each in node.args if each not in of and _is_broadcast(each, node)]
    if len(found) != 1 or packet_of(_root(found[0])) is not aten.rsqrt:
        return None
    return found[0]


def _symbols(*sizes: list[Any]) -> list[fx.Node]:
    return [each for size in sizes for each in size if isinstance(each, fx.Node)]


def _row(node: fx.Node, use: str, bits: int, stored: tuple[fx.Node, ...]) -> Row:
    value = node.meta["val"]
    modules = list((node.meta.get("nn_module_stack") or {"": ("", None)}).values())
    shape = tuple(value.shape)
    source: Any = node.args[0] if node.target is operator.getitem else node
    return Row(
        node.name,
        str(packet_of(source) or source.target),
        modules[-1][0],
        shape,
        use,
        bits,
        nbytes_of(node),
        sum(map(nbytes_of, stored)),
    )
