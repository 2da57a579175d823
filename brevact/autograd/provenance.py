"""Which tensors are weights: those are never compressed.

A weight is a parameter, a buffer of a module that runs, a view of one of these, or a tensor computed from
parameters alone (a fake-quantized weight, the copy that autocast makes, a LoRA product). Ops with a Function of their
own know which argument is the weight; this module answers for the tensors that reach the saved-tensor hooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

#: Key under which a graph node whose op was seen is marked: elements of the weight it made, 0 for an activation.
_WEIGHT_NUMEL = "brevact.weight_numel"
#: Chains from a weight to its fake-quantized form are some 30 nodes long.
_MAX_NODES = 128


def storage_address(x: Tensor) -> int:
    """Return the address of the storage object of ``x``; 0 for tensors without storage."""
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return 0


def state_addresses(modules: Iterable[nn.Module]) -> frozenset[int]:
    """Return the storage addresses of the parameters and buffers of ``modules`` themselves (not of their children)."""
    return frozenset(
        storage_address(tensor)
        for module in modules
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    )


def is_weight(x: Tensor, state: frozenset[int]) -> bool:
    """Return whether ``x`` is a weight.

    Args:
        x: any tensor.
        state: storage addresses of the known parameters and buffers.
    """
    if isinstance(x, nn.Parameter) or storage_address(x) in state:
        return True
    node = x.grad_fn
    if node is None:
        return x._is_view() and isinstance(x._base, nn.Parameter)
    return _comes_from_weights_alone(node, x.numel())


def mark(output: Any, *, weight: bool) -> None:
    """Note on the graph whether what an op returned is a weight, computed from weights alone."""
    if isinstance(output, Tensor):
        if output.grad_fn is not None:
            output.grad_fn.metadata[_WEIGHT_NUMEL] = output.numel() if weight else 0
    elif isinstance(output, tuple | list):
        for item in output:
            mark(item, weight=weight)


def _comes_from_weights_alone(node: torch.autograd.graph.Node, numel: int) -> bool:
    """Walk the graph up to ops that were seen, and to leaves.

    What lies between was computed out of sight (scripted code, another Function), perhaps with an activation that has
    no gradient: a result larger than all the weights it came from is one.
    """
    pending, seen, largest = [node], set(), 0
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        marked = node.metadata.get(_WEIGHT_NUMEL)
        if len(seen) > _MAX_NODES or marked == 0 or _is_own(node):
            return False
        if marked is not None:
            largest = max(largest, marked)
            continue
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            if not isinstance(variable, nn.Parameter):
                return False
            largest = max(largest, variable.numel())
        pending.extend(parent for parent, _ in node.next_functions if parent is not None)
    return 0 < numel <= largest


def _is_own(node: torch.autograd.graph.Node) -> bool:
    return getattr(getattr(node, "_forward_cls", None), "is_brevact", False)
