"""Choose which layers backward computes again, so that the packed tensors fit in a budget.

PyTorch's own solver weighs each layer's output by the bytes that it takes unpacked, and does not know which outputs are
needed anyway. Here, plans of what packing saves, with all layers' outputs at hand and with none, tell for each tensor
how many bytes it takes, and whether computing layers again saves them.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from brevact.compiler.partition import Packing, is_random, numel_of
from brevact.private_names.of_compiler import OrderedSet, functorch_config, partitioners

_MOST_CUTS = 3
#: Bytes of codes of 8 bits, as a multiple of a limit, up to which codes of fewer bits meet it, not another layer.
_NARROWED = 4 / 3
_FAR = 10**9  # PyTorch's distance of nodes that backward does not need
Plan = tuple[Packing, dict[fx.Node, fx.Node]]


class Recomputation:
    """Sets of saved tensors of a joint graph, which differ by the layers that backward computes again.

    ``plan`` packs saved nodes in a copy of the graph, and returns the nodes' copies, too.
    """

    def __init__(self, graph: fx.Graph, node_info: Any, plan: Callable[[Iterable[fx.Node]], Plan]) -> None:
        self._graph, self._node_info, self._plan = graph, node_info, plan
        self._usual, banned = self._cut(())
        self._times = {node: _time_of(node) for node in banned if _is_layer(node)}
        packing, copies = plan(self._usual)
        costs = {node: nbytes for node, nbytes, _ in packing.costs()}
        least = {node.name: nbytes for node, nbytes, _ in plan(self._cut(self._times)[0])[0].costs()}
        #: Bytes that are saved where no layer is computed again.
        self.most = sum(costs.values())
        layers = {copies[node]: node for node in self._times}
        tensors: dict[frozenset[fx.Node], float] = {}
        for node, nbytes in costs.items():
            gain, behind = nbytes - least.get(node.name, 0), _layers_behind(node, packing.saved, layers)
            if gain > 0 and behind:
                tensors[behind] = tensors.get(behind, 0) + gain
        self._order: list[tuple[frozenset[fx.Node], float]] = []  # layers and the bytes that they free, the best first
        again: frozenset[fx.Node] = frozenset()
        while tensors:
            best = max(tensors, key=lambda layers: tensors[layers] / self._time(layers - again))
            self._order.append((best, tensors.pop(best)))
            again |= best

    def within(self, nbytes: float) -> list[fx.Node]:
        """Nodes to save, whose plan takes at most ``nbytes`` where that can be, in little time of backward."""
        count, excess, saved = 0, self.most - nbytes, self._usual
        for cut in range(_MOST_CUTS):
            if excess <= 0 or count == len(self._order):
                break
            while excess > 0 and count < len(self._order):
                excess -= self._order[count][1]
                count += 1
            saved = self._cut(self._layers(count))[0]
            excess = self._plan(saved)[0].nbytes - nbytes if cut < _MOST_CUTS - 1 else 0
        return saved

    def least_noise(self, usual: list[fx.Node], limit: float) -> tuple[list[fx.Node], dict[str, int]]:
        """Nodes to save within ``limit`` bytes in place of the ``usual`` ones, and bit widths of tensors by name.

        As few layers are computed again as codes of 8 bits, or of the settings' if they have more, allow. Where all
        layers do not suffice, codes of fewer bits are those that add least noise.
        """
        packing = self._plan(usual)[0]
        if packing.nbytes > limit:
            fits = bisect_left(range(len(self._order)), True, key=lambda count: self._first(count)[1].nbytes <= limit)
            before = self._first(max(fits - 1, 0))
            usual, packing = before if before[1].nbytes <= _NARROWED * limit else self._first(fits)
        widths, least = packing.widths_within(limit)
        if least > limit:
            raise ValueError(
                f"budget: a graph saves {least:,.0f} bytes at least, more than {limit:,.0f}; accepted is a budget of "
                "at least that, or settings that pack more (min_numel=0)"
            )
        return usual, widths

    @functools.cache  # noqa: B019 - of a graph that is compiled
    def _first(self, count: int) -> tuple[list[fx.Node], Packing]:
        saved = self._cut(self._layers(count))[0]
        return saved, self._plan(saved)[0]

    def _layers(self, count: int) -> frozenset[fx.Node]:
        return frozenset[fx.Node]().union(*(layers for layers, _ in self._order[:count]))

    def _time(self, layers: Iterable[fx.Node]) -> float:
        return 1 + sum(self._times[each] for each in layers)

    def _cut(self, again: Collection[fx.Node]) -> tuple[list[fx.Node], Collection[fx.Node]]:
        """PyTorch's minimum cut where these layers may be computed again, and all that it does not compute again."""
        options = partitioners.MinCutOptions(False, False, False, False, functorch_config.ban_recompute_reductions)
        saved, banned = partitioners.solve_min_cut(self._graph, self._node_info, options, OrderedSet(sorted(again)))
        return saved, banned


def _is_layer(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and node.dist_from_bw < _FAR  # type: ignore[attr-defined]
        and not is_random(node)
        and node.meta.get("recompute") is not CheckpointPolicy.MUST_SAVE
    )


def _time_of(node: fx.Node) -> float:
    value = node.meta.get("val")
    size = numel_of(node) if isinstance(value, Tensor) else 0
    return float(partitioners.estimate_runtime(node) + size)


def _layers_behind(node: fx.Node, saved: Collection[fx.Node], layers: dict[fx.Node, fx.Node]) -> frozenset[fx.Node]:
    """Layers from which backward computes a tensor, beside other saved ones."""
    found, seen, waiting = set(), {node}, [node]
    while waiting:
        each = waiting.pop()
        if each in layers:
            found.add(layers[each])
            continue
        new = [x for x in each.all_input_nodes if x not in seen and x not in saved]
        seen.update(new)
        waiting += new
    return frozenset(found)
