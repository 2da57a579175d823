"""Choose what backward computes again: by settings, and so that the packed tensors fit in a budget.

Before PyTorch's minimum cut, nodes of the joint graph are marked that it shall compute again or save. PyTorch's own
solver of budgets weighs outputs by their unpacked bytes, and does not know which are needed anyway. Here, plans of
packing, with all layers' outputs at hand and with none, give each tensor's bytes, and those that a layer saves.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from brevact.compiler import aten as table
from brevact.compiler.aten import prims
from brevact.compiler.bits import costs, nbytes_of_saved, widths_within
from brevact.compiler.joint_graph import JointGraph, SettingsOf
from brevact.compiler.nodes import closure, is_random, numel_of, packet_of
from brevact.private_names.of_compiler import OrderedSet, functorch_config, partitioners

#: Bytes of codes of 8 bits, as a multiple of a limit, up to which codes of fewer bits meet it, not another layer.
_NARROWED = 4 / 3
_FAR = 10**9  # PyTorch's distance of nodes that backward does not need
Plan = tuple[JointGraph, dict[fx.Node, fx.Node]]


@contextmanager
def recomputing(graph: fx.Graph, settings_of: SettingsOf, *, is_exact: bool) -> Iterator[None]:
    """Let PyTorch compute again what settings name, and what its kernels would read once, unless all are exact.

    Random numbers are not drawn again; PyTorch's own list of random ops lacks some.
    """
    random = (node for node in graph.nodes if is_random(node) and "recompute" not in node.meta)  # not of checkpoints
    marked = dict.fromkeys(random, CheckpointPolicy.MUST_SAVE)
    wanted = (node for node in graph.nodes if _is_recomputed(node, settings_of))
    marked |= dict.fromkeys(wanted, CheckpointPolicy.PREFER_RECOMPUTE)
    before = {node: node.meta.get("recompute") for node in marked}
    for node, policy in marked.items():
        node.meta["recompute"] = policy
    try:
        with functorch_config.patch({} if is_exact else {"ban_recompute_materialized_backward": False}):
            yield
    finally:
        for node, policy in before.items():
            node.meta["recompute"] = policy
            if policy is None:
                del node.meta["recompute"]


def _is_recomputed(node: fx.Node, settings_of: SettingsOf) -> bool:
    """Whether backward computes a layer again, by its settings, or attention (see ``is_score``), or random numbers."""
    cost = table.cost_of(node)
    is_wanted = table.is_attention(node) or table.is_score(node) or packet_of(node) is prims.inductor_random
    settings = settings_of([node]) if cost or is_wanted else None
    return settings is not None and ((is_wanted and not settings.is_exact) or 0 < cost <= settings.recompute)


class Recomputation:
    """Sets of saved tensors of a joint graph, which differ by the layers that backward computes again.

    ``plan`` packs saved nodes in a copy of the graph, and returns the nodes' copies, too.
    """

    def __init__(self, graph: fx.Graph, node_info: Any, plan: Callable[[Iterable[fx.Node]], Plan]) -> None:
        self._graph, self._node_info, self._plan = graph, node_info, plan
        self._usual, banned = self._cut(())
        times = {node: partitioners.estimate_runtime(node) + numel_of(node) for node in banned if _is_layer(node)}
        joint, copies = plan(self._usual)
        nbytes_of = {node: nbytes for node, nbytes, _ in costs(joint)}
        least = {node.name: nbytes for node, nbytes, _ in costs(plan(self._cut(times)[0])[0])}
        #: Bytes that are saved where no layer is computed again.
        self.most = sum(nbytes_of.values())
        layers = {copies[node]: node for node in times}
        tensors: dict[frozenset[fx.Node], float] = {}
        for node, nbytes in nbytes_of.items():
            gain, behind = nbytes - least.get(node.name, 0), _layers_behind(node, joint.saved, layers)
            if gain > 0 and behind:
                tensors[behind] = tensors.get(behind, 0) + gain
        self._order: list[frozenset[fx.Node]] = []  # layers, those that free most bytes in little time first
        again: frozenset[fx.Node] = frozenset()
        while tensors:
            best = max(tensors, key=lambda layers: tensors[layers] / (1 + sum(times[each] for each in layers - again)))
            self._order.append(best)
            again |= best
            del tensors[best]

    def within(self, nbytes: float) -> list[fx.Node]:
        """Nodes to save, whose plan takes at most ``nbytes`` where that can be, in little time of backward."""
        return self._usual if self.most <= nbytes else self._first(self._least_count(nbytes))[0]

    def least_noise(self, usual: list[fx.Node], limit: float) -> tuple[list[fx.Node], dict[str, int]]:
        """Nodes to save within ``limit`` bytes in place of the ``usual`` ones, and bit widths of tensors by name.

        As few layers are computed again as codes of 8 bits, or of the settings' if they have more, allow. Where all
        layers do not suffice, codes of fewer bits are those that add least noise.
        """
        joint = self._plan(usual)[0]
        if nbytes_of_saved(joint) > limit:
            fits = self._least_count(limit)
            before = self._first(max(fits - 1, 0))
            usual, joint = before if nbytes_of_saved(before[1]) <= _NARROWED * limit else self._first(fits)
        widths, least = widths_within(joint, limit)
        if least > limit:
            raise ValueError(
                f"budget: a graph saves {least:,.0f} bytes at least, more than {limit:,.0f}; accepted is a budget of "
                "at least that, or settings that pack more (min_numel=0)"
            )
        return usual, widths

    def _least_count(self, limit: float) -> int:
        order = range(len(self._order))
        return bisect_left(order, -limit, key=lambda count: -nbytes_of_saved(self._first(count)[1]))

    @functools.cache  # noqa: B019 - of a graph that is compiled
    def _first(self, count: int) -> tuple[list[fx.Node], JointGraph]:
        saved = self._cut(frozenset[fx.Node]().union(*self._order[:count]))[0]
        return saved, self._plan(saved)[0]

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


def _layers_behind(node: fx.Node, saved: Collection[fx.Node], layers: dict[fx.Node, fx.Node]) -> frozenset[fx.Node]:
    """Layers from which backward computes a tensor, beside other saved ones."""

    def step(each: fx.Node) -> Iterable[fx.Node]:
        return () if each in layers else (x for x in each.all_input_nodes if x not in saved)

    return frozenset(layers[each] for each in closure([node], step) if each in layers)
