"""Measure a model in place and restore it.

Reports, fits and a policy's first steps train the model: they run forward and backward passes and change regions and
modes. Copying the model instead fails if it is pruned, keeps a tensor of its last forward pass, or holds a lock.
"""

from __future__ import annotations

import operator
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from brevact.autograd.region.module_hooks import attachments_of, regions_of
from brevact.autograd.region.seeds import kept_generators
from brevact.autograd.saving.storages import storage_address
from brevact.user_lines import warn

#: Containers; subclasses are refilled with the base class's own methods.
_CONTAINERS = (OrderedDict, dict, list, set, deque)
#: Parameters and integers up to this many bytes are copied: scales that collect statistics, counters.
_SMALL = 1 << 16
_HOOKS = ("_post_accumulate_grad_hooks", "_backward_hooks")


@contextmanager
def in_place(model: nn.Module) -> Iterator[None]:
    """Run a block that may run, train and change a model, then restore the model, also after an error.

    Restores gradients, modes, hooks, regions, the random generators of torch, Python and NumPy, and attributes of
    modules: buffers and other tensors, generators of torch, and the items of lists, dictionaries and sets. In the block
    no parameter has a gradient, no parameter hook runs, and ``DistributedDataParallel`` exchanges nothing. Parameters
    and integer tensors above 64 KiB are not copied: a warning names modified ones. Not restored: globals, files,
    iterators, the state of other objects in attributes, of tensors and containers in containers, sparse buffers,
    attributes of scripted modules, and writes through ``.data`` of a large parameter.
    """
    _check(model)
    _shard(model)
    state = ModelBefore(model)
    try:
        with kept_random_state(), torch.inference_mode(False), ExitStack() as stack:
            for module in model.modules():
                if isinstance(module, nn.parallel.DistributedDataParallel):  # other processes may not take part
                    stack.enter_context(module.no_sync())
                    module.require_forward_param_sync = False
            state.hide_gradients()
            yield
    finally:
        _shard(model)
        with torch.inference_mode(False):
            state.restore()


@contextmanager
def kept_random_state() -> Iterator[None]:
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with kept_generators():
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def holds_graphs(model: nn.Module, run: Any = None) -> bool:
    """Return whether a module of a model is compiled, or the loss or function that runs it."""
    while (inner := getattr(run, "func", getattr(run, "loss", None))) is not None:
        run = inner
    names = "_torchdynamo_orig_callable", "_compiled_call_impl"
    return any(getattr(part, name, None) is not None for part in (run, *model.modules()) for name in names)


def uncompiled(is_eager: bool = True) -> AbstractContextManager[Any]:
    """Return a context that runs compiled code eagerly, unless told not to."""
    is_there = "torch._dynamo" in sys.modules  # otherwise nothing is compiled, and the import takes seconds
    return torch.compiler.set_stance("force_eager") if is_there and is_eager else nullcontext()


def _shard(model: nn.Module) -> None:
    """Reshard FSDP2 modules that have gathered their parameters, as between steps."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # None if never imported
    for module in () if fsdp is None else model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def _check(model: nn.Module) -> None:
    if any(is_lazy(x) for x in (*model.parameters(), *model.buffers())):
        raise ValueError("model: some lazy modules have no parameters yet; call the model on a batch first")
    if isinstance(model, nn.DataParallel):
        raise ValueError("model: a DataParallel runs on several devices; accepted is what it wraps: model.module")


class ModelBefore:
    """Snapshot of a model: attributes of modules by reference, containers by shallow copies, tensors by value."""

    def __init__(self, model: nn.Module, *, but_parameters: bool = False) -> None:
        self._model = model
        self._modes = [(module, module.training) for module in model.modules()]
        self._contents: list[tuple[Any, Any]] = []
        self._generators: list[tuple[torch.Generator, Tensor]] = []
        tensors = {id(x): x for x in (*model.parameters(), *model.buffers())}
        for module in model.modules():
            of_policy = map(vars, (*regions_of(module), *attachments_of(module)))
            for held in (vars(module), *vars(module).values(), *of_policy):
                if isinstance(held, Tensor):
                    tensors[id(held)] = held
                elif isinstance(held, _CONTAINERS):
                    self._contents.append((held, dict(held) if isinstance(held, dict) else list(held)))
                elif isinstance(held, torch.Generator):
                    self._generators.append((held, held.get_state()))
        values: dict[int, torch.UntypedStorage] = {}
        # Non-leaves come from an earlier pass: only the references are restored.
        kept = (x for x in tensors.values() if x.is_leaf and not (but_parameters and isinstance(x, nn.Parameter)))
        self._tensors = [_TensorBefore(x, values) for x in kept]

    def hide_gradients(self) -> None:
        for each in self._tensors:
            each.hide_gradient()

    def restore(self) -> None:
        for container, items in self._contents:
            _refill(container, items)
        for module, mode in self._modes:
            if module.training is not mode:
                module.training = mode
        for generator, state in self._generators:
            generator.set_state(state)
        changed = [each.tensor for each in self._tensors if not each.restore()]
        if changed:
            of_model = [name for name, x in self._model.named_parameters() if any(x is each for each in changed)]
            warn(
                f"the forward pass of the model writes into {', '.join(of_model) or 'a tensor'}, of which no copy was "
                "made since it is large: it has the values that the measured passes gave it. Measure a copy of the "
                "model to keep them: copy.deepcopy(model)"
            )


class _TensorBefore:
    """Snapshot of a leaf; `values` has copies of storages, by address, for tensors that share one."""

    def __init__(self, x: Tensor, values: dict[int, torch.UntypedStorage]) -> None:
        self.tensor, self._grad, self._trains = x, x.grad, x.requires_grad
        self._hooks = [(name, dict(getattr(x, name) or {})) for name in _HOOKS]
        self._alias: Tensor | None = None
        self._values: torch.UntypedStorage | None = None
        self._version = 0 if x.is_inference() else x._version
        is_plain = type(x).__torch_dispatch__ is Tensor.__torch_dispatch__ and x.layout is torch.strided
        if is_plain and not (x.is_meta or x.is_inference()) and (address := storage_address(x)):
            self._alias = x.detach()
            if x.nbytes <= _SMALL or (x.is_floating_point() and not isinstance(x, nn.Parameter)):
                if address not in values:
                    values[address] = self._alias.untyped_storage().clone()
                self._values = values[address]

    def hide_gradient(self) -> None:
        if self._grad is not None:
            self.tensor.grad = None
        for name, hooks in self._hooks:
            if hooks:
                getattr(self.tensor, name).clear()

    def restore(self) -> bool:
        """Restore the tensor; return False if its values were not copied and its version counter changed."""
        x = self.tensor
        if not x.is_leaf and not x._is_view():
            x.detach_()  # a buffer into which a pass has written a tensor with a graph
        if self._alias is not None and _span_of(x) != _span_of(self._alias):
            x.data = self._alias
        if self._alias is not None and self._values is not None:
            storage = self._alias.untyped_storage()
            if storage.nbytes() != self._values.nbytes():  # observers of torch.ao resize theirs
                storage.resize_(self._values.nbytes())
            storage.copy_(self._values)  # leaves the version: graphs that saved the tensor find its old values
        if x.is_leaf and x.requires_grad is not self._trains:
            x.requires_grad_(self._trains)
        if x.grad is not self._grad:
            x.grad = self._grad
        for name, before in self._hooks:
            if (hooks := getattr(x, name)) is not None:
                hooks.clear()
                hooks.update(before)
        return self._alias is None or self._values is not None or x._version == self._version


def _span_of(x: Tensor) -> tuple[Any, ...]:
    return storage_address(x), x.storage_offset(), x.shape, x.stride(), x.dtype


def _refill(container: Any, items: Any) -> None:
    if len(container) == len(items) and all(map(operator.is_, container, items)):
        if not isinstance(items, dict) or all(map(operator.is_, container.values(), items.values())):
            return
    kind: Any = next(kind for kind in _CONTAINERS if isinstance(container, kind))
    kind.clear(container)
    (kind.extend if kind in (list, deque) else kind.update)(container, items)
