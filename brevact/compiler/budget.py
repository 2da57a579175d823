"""Choose which layers backward computes again, so that the packed tensors fit in a budget.

PyTorch's own solver weighs each layer's output by the bytes that it takes unpacked, and does not know which outputs are
needed anyway. Here, plans of what packing saves, with all layers' outputs at hand and with none, tell for each tensor
how many bytes it takes, and whether computing layers again saves them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from brevact.compiler.partition import Packing, is_random, numel_of
from brevact.private_names.of_compiler import OrderedSet, functorch_config, partitioners

#: Parts of the bytes that are saved where no layer is computed again, and bit widths, among which a limit chooses.
_PARTS = (1.0, 0.7, 0.5, 0.35, 0.2, 0.1)
BITS = (8, 7, 6, 5, 4, 3, 2)
_MOST_CUTS = 3
_FAR = 10**9  # PyTorch's distance of nodes that backward does not need


class Plan(NamedTuple):
    """What packing makes of saved nodes, in a copy of a graph; ``marks.bits`` are bits in place of the settings'."""

    packing: Packing
    copies: dict[fx.Node, fx.Node]
    marks: Any

    @property
    def nbytes(self) -> float:
        return sum(nbytes for _, nbytes, _ in self.packing.costs())

    @property
    def noise(self) -> float:
        return sum(noise for *_, noise in self.packing.costs())


class Recomputation:
    """Sets of saved tensors of a joint graph, which differ by the layers that backward computes again.

    Args:
        graph: joint graph.
        node_info: PyTorch's description of its nodes.
        plan: makes a plan of saved nodes.
    """

    def __init__(self, graph: fx.Graph, node_info: Any, plan: Callable[[Iterable[fx.Node]], Plan]) -> None:
        self._graph, self._node_info, self._plan = graph, node_info, plan
        self._usual, banned = self._cut(())
        self._times = {node: _time_of(node) for node in banned if _is_layer(node)}
        packing, copies, _ = plan(self._usual)
        costs = {node: nbytes for node, nbytes, _ in packing.costs()}
        least = {node.name: nbytes for node, nbytes, _ in plan(self._cut(self._times)[0]).packing.costs()}
        #: Bytes that are saved where no layer is computed again.
        self.most = sum(costs.values())
        layers = {copies[node]: node for node in self._times}
        self._tensors: dict[frozenset[fx.Node], float] = {}
        for node, nbytes in costs.items():
            gain, behind = nbytes - least.get(node.name, 0), _layers_behind(node, packing.saved, layers)
            if gain > 0 and behind:
                self._tensors[behind] = self._tensors.get(behind, 0) + gain

    def within(self, nbytes: float, most_cuts: int = _MOST_CUTS) -> list[fx.Node]:
        """Nodes to save, whose plan takes at most ``nbytes`` where that can be, in little time of backward."""
        again: set[fx.Node] = set()
        tensors, excess, saved = dict(self._tensors), self.most - nbytes, self._usual
        for cut in range(most_cuts):
            if excess <= 0 or not tensors:
                break
            while excess > 0 and tensors:
                best = max(tensors, key=lambda layers: tensors[layers] / self._time(layers - again))
                excess -= tensors.pop(best)
                again |= best
            saved = self._cut(again)[0]
            excess = self._plan(saved).nbytes - nbytes if cut < most_cuts - 1 else 0
        return saved

    def least_noise(self, usual: list[fx.Node], limit: float) -> tuple[list[fx.Node], int]:
        """Nodes to save within ``limit`` bytes, and bits, by which the estimated noise is least.

        Args:
            usual: nodes that PyTorch saves.
            limit: bytes.

        Raises:
            ValueError: none are within the limit.
        """
        least, best, before = math.inf, (math.inf, usual, 0), None
        for part in (None, *_PARTS, 0.0):
            if part == 0 and best[0] < math.inf:
                break  # computing all layers again is for limits that nothing else meets
            saved = usual if part is None else self.within(part * self.most, most_cuts=1)
            if saved == before:
                continue
            plan, before = self._plan(saved), saved
            for plan.marks.bits in BITS:
                nbytes, noise = plan.nbytes, plan.noise
                least = min(least, nbytes)
                if nbytes <= limit and noise < best[0]:
                    best = noise, saved, plan.marks.bits
        if math.isinf(best[0]):
            raise ValueError(
                f"budget: a graph saves {least:,.0f} bytes at least, more than {limit:,.0f}; accepted is a budget of "
                "at least that, or settings that pack more (min_numel=0)"
            )
        return best[1:]

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
    """Multiplications and elements of an op."""
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
