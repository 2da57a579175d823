"""Measure a model in place and restore it bit for bit.

Reports, fits and a policy's first steps train the model: they run forward and backward passes and change regions and
modes. Copying the model instead fails if it is pruned, keeps a tensor of its last forward pass, or holds a lock.
"""

from __future__ import annotations

import array
import functools
import operator
import random
import sys
import types
from collections import OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from brevact.autograd.seeds import kept_generators
from brevact.reports.tensors_in_place import TensorBefore
from brevact.user_lines import warn

#: Containers; subclasses are refilled with the base class's own methods.
_CONTAINERS = (OrderedDict, dict, list, set, deque)
#: Standard library classes that hold arbitrary user attributes.
_OF_PYTHON = (types.SimpleNamespace, UserDict, UserList)
#: Depth to which objects that are not modules are searched below a module.
_DEEPEST = 2
#: Packages whose objects hold no state that must be restored.
_NOT_OURS = frozenset((*sys.stdlib_module_names, "torch", "numpy", "builtins"))
_NEVER = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
#: Classes without contents, and containers without attributes.
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size))
_WITHOUT_ATTRIBUTES = frozenset((dict, list, tuple, set, deque))
_NO_PAIRS: dict[Any, Any] = {}
_NO_ITEMS: list[Any] = []


@contextmanager
def in_place(model: nn.Module) -> Iterator[None]:
    """Run a block that may run, train and change a model, then restore the model, also after an error.

    Restores buffers, gradients, modes, hooks, regions, module attributes, the contents of their lists and dictionaries,
    and the random generators of torch, Python and NumPy. In the block no parameter has a gradient, and no parameter
    hook runs. Parameters and integer tensors above 64 KiB are not copied: a warning names modified ones.
    Not restored: globals, files, iterators, objects nested in three others, attributes of scripted modules, overwritten
    tensors with a graph, and writes through ``.data`` of a large parameter.

    Raises:
        ValueError: the model has lazy parameters, or wraps several processes or devices.
    """
    _check(model)
    _shard(model)
    state = ModelBefore(model)
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with kept_generators(), torch.inference_mode(False):
            state.hide_gradients()
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        _shard(model)
        with torch.inference_mode(False):
            state.restore()


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context that runs compiled code eagerly, since hooks cannot see inside a compiled graph."""
    is_there = "torch._dynamo" in sys.modules  # otherwise nothing is compiled, and the import takes seconds
    return torch.compiler.set_stance("force_eager") if is_there else nullcontext()


def _shard(model: nn.Module) -> None:
    """Reshard FSDP2 modules that have gathered their parameters, as between steps."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # None if never imported
    for module in () if fsdp is None else model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()


def _check(model: nn.Module) -> None:
    if any(is_lazy(x) for x in (*model.parameters(), *model.buffers())):
        raise ValueError("model: some lazy modules have no parameters yet; call the model on a batch first")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ValueError(
            f"model: a {type(model).__name__} sums gradients over processes or devices; accepted is the module that it "
            "wraps: model.module"
        )


class ModelBefore:
    """Snapshot of a model: objects by reference, their contents as shallow copies; skips parameters if asked to."""

    def __init__(self, model: nn.Module, *, but_parameters: bool = False) -> None:
        self._but_parameters = but_parameters
        self._seen: dict[int, Any] = {}  # keeps objects alive, so that no id is reused
        self._contents: list[tuple[Any, Any]] = []
        self._others: list[Callable[[], object]] = []
        self._tensors: list[TensorBefore] = []
        self._model = model
        self._visit(model)

    def _visit(self, model: nn.Module) -> None:
        """Record a model, its modules and its tensors."""
        pending: list[tuple[Any, int]] = [(model, 0)]
        while pending:
            value, depth = pending.pop()
            if id(value) in self._seen or isinstance(value, _NEVER):
                continue
            inside: list[Any] = []
            if isinstance(value, Tensor):
                if self._but_parameters and isinstance(value, nn.Parameter):
                    continue
                if value.is_leaf:  # non-leaves come from an earlier pass: only the references are restored
                    self._tensors.append(TensorBefore(value))
            elif isinstance(value, _CONTAINERS):
                inside = self._note_contents(value)
            elif isinstance(value, tuple):
                inside = [*tuple.__iter__(value)]  # a subclass's __len__ may raise
            elif (restore := _restorer_of(value)) is not None:
                self._others.append(restore)
            elif isinstance(value, nn.Module):
                self._others.append(functools.partial(_set_class, value, type(value)))
                inside, depth = self._note_scripted(value), 0
            elif depth < _DEEPEST and _holds_state(value):
                depth += 1
            else:
                continue
            self._seen[id(value)] = value
            if type(value) not in _WITHOUT_ATTRIBUTES:
                inside += self._note_attributes(value)
            pending += [(item, depth) for item in inside if type(item) not in _PLAIN]

    def _note_scripted(self, module: nn.Module) -> list[Any]:
        """Record the modes of a torch.jit module, whose state is not in Python attributes; return its tensors."""
        if not isinstance(module, torch.jit.ScriptModule):
            return []
        self._others += [functools.partial(_set_mode, each, each.training) for each in module.modules()]
        return [*module.parameters(), *module.buffers()]

    def _note_contents(self, container: Any) -> list[Any]:
        """Record a container's items and return them."""
        is_mapping = isinstance(container, dict)
        if type(container) in _CONTAINERS and not container:  # like most hook dictionaries
            self._contents.append((container, _NO_PAIRS if is_mapping else _NO_ITEMS))
            return []
        items = dict(container) if is_mapping else list(container)
        self._contents.append((container, items))
        return list(items.values()) if isinstance(items, dict) else [*items]

    def _note_attributes(self, value: Any) -> list[Any]:
        """Record an object's attributes and slots and return their values."""
        inside: list[Any] = []
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            inside += self._note_contents(attributes)
        kind: Any = type(value)
        slots = _slots_of(kind)
        if slots:
            before = {name: getattr(value, name) for name in slots if hasattr(value, name)}
            self._others.append(functools.partial(_set_slots, value, slots, before))
            inside += before.values()
        return inside

    def hide_gradients(self) -> None:
        """Remove gradients, so that nothing accumulates into them, and gradient hooks."""
        for each in self._tensors:
            each.hide_gradient()

    def restore(self) -> None:
        """Restore the snapshot; warn about modified tensors that were too large to copy."""
        for container, items in self._contents:
            _refill(container, items)
        for restore in self._others:
            restore()
        changed = [each.tensor for each in self._tensors if not each.restore()]
        if changed:
            of_model = [name for name, x in self._model.named_parameters() if any(x is each for each in changed)]
            warn(
                f"the forward pass of the model writes into {', '.join(of_model) or 'a tensor'}, of which no copy was "
                "made since it is large: it has the values that the measured passes gave it. Measure a copy of the "
                "model to keep them: copy.deepcopy(model)"
            )


@functools.lru_cache(maxsize=1024)
def _is_ours(kind: Any) -> bool:
    """Whether a class is outside the standard library, torch and NumPy."""
    return kind.__module__.partition(".")[0] not in _NOT_OURS


def _holds_state(value: Any) -> bool:
    if isinstance(value, _OF_PYTHON):
        return True
    kind: Any = type(value)
    return _is_ours(kind) and (hasattr(value, "__dict__") or bool(_slots_of(kind)))


def _restorer_of(value: Any) -> Callable[[], object] | None:
    """Return a function that restores a random generator or an array; None for other objects."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, np.ndarray) and value.flags.writeable:
        return functools.partial(np.copyto, value, value.copy())
    if isinstance(value, bytearray | array.array):
        return functools.partial(operator.setitem, value, slice(None), value[:])
    return None


@functools.lru_cache(maxsize=1024)
def _slots_of(kind: Any) -> list[str]:
    """Return the slot names of a class for which `_is_ours` holds."""
    found: list[str] = []
    for each in kind.__mro__ if _is_ours(kind) else ():
        slots = vars(each).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            is_private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{each.__name__.lstrip('_')}{name}" if is_private else name)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _set_slots(value: Any, names: list[str], before: dict[str, Any]) -> None:
    for name in names:
        if name not in before:
            if hasattr(value, name):
                object.__delattr__(value, name)
        elif getattr(value, name, None) is not before[name] or not hasattr(value, name):
            object.__setattr__(value, name, before[name])


def _set_mode(module: nn.Module, trains: bool) -> None:
    if module.training is not trains:
        module.training = trains


def _set_class(value: Any, kind: type) -> None:
    """Restore a module's class, which parametrization changes."""
    if type(value) is not kind:
        value.__class__ = kind


def _refill(container: Any, items: Any) -> None:
    """Restore a container's items, unless they are unchanged."""
    if len(container) == len(items) and all(map(operator.is_, container, items)):
        if not (items and isinstance(items, dict)) or all(map(operator.is_, container.values(), items.values())):
            return
    kind: Any = next(kind for kind in _CONTAINERS if isinstance(container, kind))
    kind.clear(container)
    (kind.extend if kind in (list, deque) else kind.update)(container, items)
