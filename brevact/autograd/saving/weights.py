"""Decide which tensors are weights, which are never compressed.

A weight is a parameter, a buffer of a module that runs, a view of one of these, or a tensor computed from parameters
alone (a fake-quantized weight, autocast's copy, a LoRA product). Ops with a Function of their own know which argument
is the weight; this module decides for the tensors that reach the saved-tensor hooks.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from brevact.autograd.call_arguments import tensors_of_call
from brevact.autograd.saving.storages import referent, storage_address
from brevact.private_names.of_torch import COMPILED, BackwardCFunction, global_forward_pre_hooks, skip_code

#: Metadata key of a graph node whose op was seen: number of elements of the weight it made, 0 for an activation.
WEIGHT_NUMEL = "brevact.weight_numel"
#: Nodes of layers that ran where no region saw them: their result is an activation.
_LAYER_NODES = (
    *("AddmmBackward", "MmBackward", "BmmBackward", "BaddbmmBackward"),
    *("ConvolutionBackward", "EmbeddingBackward", "NativeBatchNormBackward", "CudnnBatchNormBackward"),
    *("MiopenBatchNormBackward", "NativeLayerNormBackward", "NativeGroupNormBackward", "ScaledDotProduct"),
    *("MaxPool", "AvgPool", "IndexSelectBackward"),
)
#: A weight and its fake-quantized form are some 30 nodes apart.
_MAX_NODES = 128
_SWEEP_FLOOR = 64


def is_parameter(x: Tensor | None) -> bool:
    kind = type(x)
    return kind is nn.Parameter or (kind is not Tensor and isinstance(x, nn.Parameter))  # this isinstance is slow


def is_parameter_or_view(x: Any) -> bool:
    return type(x) is nn.Parameter or (type(x) is Tensor and x._is_view() and type(x._base) is nn.Parameter)


class ModelState:
    """The weights that a root region knows by their storage.

    Parameters and buffers of the modules that run, and tensors computed from them without a gradient (a sign, a mask).
    Without an owner (the region's module), modules are noticed as they run.
    """

    def __init__(self, owner: nn.Module | None) -> None:
        self._owner = owner
        self._modules: dict[nn.Module, None] = {}
        self._unread: list[nn.Module] = []  # their own hooks may still make or move their tensors
        # By address. Once freed (replaced buffers, parameters of `torch.func.functional_call`), others may reuse it.
        self._stored: dict[int, weakref.ref[torch.UntypedStorage]] | None = None
        self._derived: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sweep_at = _SWEEP_FLOOR
        if owner is None:
            _watchers.add(self)

    def see(self, module: nn.Module) -> None:
        """Note a module that runs; a ``torch.export`` program reads its modules' tensors without calling them."""
        if module not in self._modules and (module._parameters or module._buffers or module._modules):
            self._modules[module] = None
            self._unread += module.modules() if isinstance(module, torch.fx.GraphModule) else (module,)

    def __contains__(self, address: int) -> bool:
        if self._stored is None:
            self._stored = {}
            self._unread += () if self._owner is None else self._owner.modules()
        while self._unread:
            self._stored.update(_storages_of(self._unread.pop()))
        found = self._stored.get(address), self._derived.get(address)
        return any(known is not None and referent(known) is not None for known in found)

    def mark_weight(self, output: Any, *, weight: bool) -> None:
        """Mark whether an op's result is a weight: on its graph node, or by its storage if it has none."""
        for x in tensors_of_call((output,), {}):
            node = node_of(x)
            if node is not None:
                node.metadata[WEIGHT_NUMEL] = x.numel() if weight else 0
            elif weight and storage_address(x):  # there is none in a transform
                storage = x.untyped_storage()
                if len(self._derived) >= self._sweep_at:
                    self._derived = {key: x for key, x in self._derived.items() if referent(x) is not None}
                    self._sweep_at = max(_SWEEP_FLOOR, 2 * len(self._derived))
                self._derived[storage._cdata] = weakref.ref(storage)
            elif self._derived:
                self._derived.pop(storage_address(x), None)

    def close(self) -> None:
        if self._owner is None:
            _watchers.remove(self)


def node_of(x: Tensor) -> Any:
    try:
        return x.grad_fn
    except RuntimeError:
        return None


def _storages_of(module: nn.Module) -> dict[int, weakref.ref[torch.UntypedStorage]]:
    found = {}
    for x in (*module._parameters.values(), *module._buffers.values()):
        if x is not None:
            try:
                storage = x.untyped_storage()
                found[storage._cdata] = weakref.ref(storage)
            except (NotImplementedError, RuntimeError, ValueError):  # no storage, such as a lazy module's
                continue
    return found


class _States(threading.local):
    def __init__(self) -> None:
        self.states: list[ModelState] = []


class _Watchers:
    """The states that watch their thread's modules by one global hook, under one key: its keys guard compiled code."""

    def __init__(self) -> None:
        self.of_thread = _States()
        self._count = 0
        self._lock = threading.Lock()
        self._key = RemovableHandle(global_forward_pre_hooks).id

    def add(self, state: ModelState) -> None:
        self.of_thread.states.append(state)
        with self._lock:
            self._count += 1
            global_forward_pre_hooks[self._key] = _tell_watchers

    def remove(self, state: ModelState) -> None:
        self.of_thread.states.remove(state)
        with self._lock:
            self._count -= 1
            if not self._count:
                global_forward_pre_hooks.pop(self._key, None)


def _tell_watchers(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_dynamo_compiling():
        for state in _watchers.of_thread.states:
            state.see(module)


skip_code(_tell_watchers.__code__)  # Dynamo runs it uncompiled, unless it inlines it
_watchers = _Watchers()


def is_weight(x: Tensor, state: ModelState) -> bool:
    if type(x) is not Tensor and is_parameter(x):
        return True
    try:
        node: Any = x.grad_fn
    except RuntimeError:  # a view whose base has changed
        node = None
    if node is None:
        return storage_address(x) in state or (x._is_view() and x._base is not None and is_weight(x._base, state))
    marked = node.metadata.get(WEIGHT_NUMEL)
    if marked is None:
        marked = _largest_behind(node)
        if not marked:
            node.metadata[WEIGHT_NUMEL] = 0  # the graph is not walked again
    return bool(0 < x.numel() <= marked)


def _largest_behind(node: Any) -> int:
    """Return the elements of the largest weight that a result comes from, 0 if not from weights alone.

    Walks the graph from its node up to ops that were seen, and to leaves. Nodes between were made out of sight
    (scripted code, another Function), perhaps with an activation that has no gradient: a result larger than all the
    weights it came from is an activation.
    """
    pending, seen = [node], set()
    largest = 0
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        marked = node.metadata.get(WEIGHT_NUMEL)
        if len(seen) > _MAX_NODES or marked == 0 or _is_own(node):
            return 0
        if marked is None and node.name().startswith(_LAYER_NODES):
            return 0
        if marked is not None:
            largest = max(largest, marked)
            continue
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            if not isinstance(variable, nn.Parameter):
                return 0
            largest = max(largest, variable.numel())
        pending.extend(parent for parent, _ in node.next_functions if parent is not None)
    return largest


def _is_own(node: torch.autograd.graph.Node) -> bool:
    """Whether a node is of a layer's Function, or of a compiled graph, whose results count as activations."""
    if not isinstance(node, BackwardCFunction):
        return False
    function = node._forward_cls
    return getattr(function, "is_brevact", False) or function.__module__.startswith(COMPILED)
