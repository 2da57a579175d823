"""The joint graph of forward and backward: what backward reads of it, and how to change it.

PyTorch's partitioner hands it over with the nodes that its minimum cut saves. Passes change nodes and the saved ones
until what is saved may be packed; after each, ``analyse`` finds how backward depends on the saved tensors. The graph
that is left, with nodes that pack and decode, is split by PyTorch into forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

from torch import SymInt, Tensor, fx

from brevact.autograd.call_arguments import ACTIVATION_DTYPES
from brevact.compiler import aten as table
from brevact.compiler.aten import Use, aten
from brevact.compiler.dependence import Dependence, Saved
from brevact.compiler.integers import Integers
from brevact.compiler.nodes import closure, is_random, numel_of, packet_of, value_of
from brevact.private_names.of_compiler import detect_fake_mode

#: A tensor that is read by broadcasting to as many times its elements, such as a norm's deviations, stays unpacked.
BROADCAST = 8
#: Settings of a tensor that some ops of backward read.
SettingsOf = Callable[[Iterable[fx.Node]], Any]  # settings, or None


class Signature(NamedTuple):
    """Kinds of a joint graph's results and inputs."""

    outputs: int  # number of results of the forward pass, the first ones
    static: frozenset[int]  # places of parameters and buffers among the inputs
    activations: frozenset[int]  # places of inputs that code before the graph computed
    is_inductor: bool
    channels_last: bool  # whether Inductor keeps what convolutions read and return so


class JointGraph:
    """A joint graph and its saved nodes.

    ``widths`` are bits in place of the settings', by name of the tensor; the fewest hold for others.
    """

    def __init__(
        self,
        graph: fx.Graph,
        saved: Iterable[fx.Node],
        signature: Signature,
        settings_of: SettingsOf,
        widths: Mapping[str, int] = {},
    ) -> None:
        self.graph, self.signature, self.settings_of, self.widths = graph, signature, settings_of, widths
        self.saved, self.output = dict.fromkeys(saved), graph.output_node()
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.last_input = inputs[-1]
        self.tangents = [node for node in inputs if node.name.startswith("tangents")]
        primals = [node for node in inputs if node not in self.tangents]
        self.gradients = _functions_of(self.tangents)
        results: Any = self.output.args[0]
        self.of_forward = [each for each in results[: signature.outputs] if isinstance(each, fx.Node)]
        self.of_forward += [  # changes of inputs, such as running statistics
            node for node in graph.nodes if node.op == "call_function" and not node.users and node not in self.gradients
        ]
        wanted = zip(primals, results[signature.outputs :], strict=False)
        self.live = _functions_of(node for node, gradient in wanted if gradient is not None)
        self.inputs = {node for place, node in enumerate(primals) if place in signature.activations}
        data = [node for place, node in enumerate(primals) if place not in signature.static]
        self.activations = _functions_of((*data, *filter(is_random, graph.nodes)))
        self.integers = Integers(graph)
        self.mode: Any = detect_fake_mode([value for value in map(value_of, graph.nodes) if value is not None])
        self.origins: dict[fx.Node, fx.Node] = {}  # of nodes that backward computes anew
        self.masks: dict[fx.Node, fx.Node] = {}  # of functions with a kink
        self.exact: set[fx.Node] = set()  # saved as they are: norms' statistics, or inputs of few elements
        self.changes = 0
        self.analysed: tuple[int, list[fx.Node]] | None = None

    def adds(self, node: fx.Node) -> bool:
        """Whether a saved node is a tensor that nobody else need hold."""
        return value_of(node) is not None and (node.op != "placeholder" or node in self.inputs)

    def of_backward(self) -> list[fx.Node]:
        results: Any = self.output.args[0]
        return [each for each in results[self.signature.outputs :] if isinstance(each, fx.Node)]

    def backward_nodes(self, without: Container[fx.Node] = ()) -> list[fx.Node]:
        def inputs(node: fx.Node) -> list[fx.Node]:
            found = self.of_backward() if node is self.output else node.all_input_nodes
            return [x for x in found if not (x in self.saved or x in without or x.op == "placeholder")]

        return sorted(closure([self.output], inputs))

    def analyse(self) -> None:
        """Find how backward depends on the saved tensors, and drop those that it does not read."""
        if self.analysed == (self.changes, list(self.saved)):
            return
        self.nodes = self.backward_nodes()
        self.read = set(self.nodes)
        needed = {each for node in self.nodes if node is not self.output for each in node.all_input_nodes}
        needed.update(self.of_backward())
        self.saved = {node: None for node in self.saved if node in needed or value_of(node) is None}
        inputs = (node for node in needed if node.op == "placeholder" and node not in self.gradients)
        self.saved.update(dict.fromkeys(sorted(inputs)))
        self.dependence = Dependence(self.nodes, filter(self._is_float, self.saved), self.gradients)
        self.uses = {each.node: each for each in self.dependence.saved}
        for each in self.dependence.saved:
            is_live = each.node in self.live or each.use is Use.LINEAR  # additive masks have infinities
            if not is_live or each.node in self.exact or table.is_steep(each.node):
                each.use = Use.EXACT
        self.analysed = self.changes, list(self.saved)

    # --- which tensors may be packed

    def may_round(self, node: fx.Node) -> bool:
        return self._is_float(node) and not table.is_steep(node)

    def _is_float(self, node: fx.Node) -> bool:
        value = value_of(node)
        return (
            (node.op == "call_function" or node in self.inputs)
            and not (table.is_decomposition(node) or table.is_attention(node))
            and value is not None
            and value.dtype in ACTIVATION_DTYPES
            and node in self.activations
        )

    def packs(self, saved: Saved) -> bool:
        """Whether settings pack a tensor, unless backward reads it exactly."""
        settings = self.settings_of(saved.readers)
        if settings is None or settings.is_exact or numel_of(saved.node) < settings.min_numel:
            return False
        return packet_of(saved.node) is not aten.rsqrt and not self._is_spread(saved.node)

    def is_lossy(self, saved: Saved | None) -> bool:
        return saved is not None and saved.use is not Use.EXACT and self.packs(saved)

    def _is_spread(self, node: fx.Node) -> bool:
        """Whether backward reads a tensor, and functions of its elements, only by broadcasting."""
        size, of_matrices = numel_of(node), table.PRODUCTS - {aten.mul}

        def is_alike(user: fx.Node) -> bool:
            return user in self.read and numel_of(user) == size > 0 and packet_of(user) not in of_matrices

        alike = closure([node], lambda each: filter(is_alike, each.users))
        others = {user for each in alike for user in each.users if user in self.read and value_of(user) is not None}
        others -= alike.keys()
        return bool(others) and all(numel_of(user) >= BROADCAST * size for user in others)

    # --- changes

    def call(self, target: Any, *args: Any, **options: Any) -> fx.Node:
        self.changes += 1
        node = self.graph.call_function(target, args, options)
        with self.mode:
            node.meta["val"] = target(*(fx.map_arg(args, lambda each: each.meta["val"])), **options)
        return node

    def like(self, node: fx.Node, made: fx.Node) -> fx.Node:
        """A new node, with the module, the mark and the like of another."""
        made.meta.update({key: each for key, each in node.meta.items() if key not in ("val", "tensor_meta")})
        return made

    def insert_after(self, node: fx.Node) -> Any:
        return self.graph.inserting_before((self.last_input if node.op == "placeholder" else node).next)

    def layout_of(self, node: fx.Node) -> tuple[list[Any], list[Any]]:
        """Sizes and strides as arguments: symbols are nodes, which backward needs as well."""

        def argument(value: Any, target: Any, dim: int) -> Any:
            return self.call(target, node, dim) if isinstance(value, SymInt) else value

        x: Tensor = node.meta["val"]
        return (
            [argument(size, aten.sym_size.int, dim) for dim, size in enumerate(x.shape)],
            [argument(step, aten.sym_stride.int, dim) for dim, step in enumerate(x.stride())],
        )

    def add_activations(self, *nodes: fx.Node) -> None:
        """Note that new nodes are functions of activations, and that gradients depend on them."""
        self.live.update(nodes)
        self.activations.update(nodes)

    def replace_saved(self, node: fx.Node, again: fx.Node, *saved: fx.Node) -> None:
        """Save other nodes in place of one, which backward then computes from them by a new node."""
        self.redirect(self.nodes, {node: again})
        del self.saved[node]
        self.saved.update(dict.fromkeys(saved))
        self.nodes = self.backward_nodes()

    def redirect(self, nodes: list[fx.Node], decoded: dict[fx.Node, fx.Node]) -> None:
        """Let backward read the decoded nodes; it recomputes values that forward computes, too, by nodes of its own."""
        self.changes += 1
        forward = closure((*self.of_forward, *decoded), lambda node: node.all_input_nodes)
        for node in nodes:
            if node is self.output:
                results, count = self.output.args[0], self.signature.outputs
                new = [decoded.get(each, each) for each in results[count:]]  # type: ignore
                self.output.args = ((*results[:count], *new), *self.output.args[1:])  # type: ignore
                continue
            given = [decoded.get(each, each) for each in node.all_input_nodes]
            last = max((node, *given))
            if given != node.all_input_nodes and node in forward:
                with self.insert_after(last):
                    again = self.graph.node_copy(node, lambda each: decoded.get(each, each))
                decoded[node] = again
                self.origins[again] = self.origins.get(node, node)
                continue
            for each, other in zip(node.all_input_nodes, given, strict=True):
                if each is not other:
                    node.replace_input_with(each, other)
            if last is not node:
                last.append(node)


def _functions_of(sources: Iterable[fx.Node]) -> set[fx.Node]:
    return set(closure(sources, lambda node: (user for user in node.users if user.op == "call_function")))
