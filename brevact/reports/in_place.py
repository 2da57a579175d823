"""A model that is measured itself, and is afterwards as it was, bit for bit.

What a report, a fit or a policy's first steps do to a model is what training does: forward and backward passes, other
regions, other modes. A copy would need a model that can be copied: not one that is pruned, keeps a tensor of its last
forward pass, or holds a lock.
"""

from __future__ import annotations

import functools
import operator
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

#: Containers, by whose own methods those of derived classes are filled again.
_CONTAINERS = (OrderedDict, dict, list, set, deque)
#: Objects in objects that are no modules, of which a module's attributes are looked through.
_DEEPEST = 2
#: Packages whose objects hold nothing that a forward pass changes and a model would miss.
_NOT_OURS = frozenset((*sys.stdlib_module_names, "torch", "numpy", "builtins"))
_NEVER = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


@contextmanager
def in_place(model: nn.Module) -> Iterator[None]:
    """Run a block that may run, train and change a model; afterwards, also after an error, all is as before.

    That is parameters, buffers, gradients, modes, hooks, regions, attributes of modules, what is in their lists and
    dictionaries, and the random generators of torch, Python and NumPy. In the block no parameter has a gradient, and no
    hook on parameters runs. Not restored is what is out of the model's sight: globals, files, tensors with a graph that
    are overwritten.

    Args:
        model: any module but a wrapper of several processes or devices.

    Raises:
        ValueError: the model has lazy parameters, or is such a wrapper.
    """
    _check(model)
    state = _State(model)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices), torch.inference_mode(False):
            state.hide_gradients()
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        with torch.inference_mode(False):
            state.restore()


def uncompiled() -> AbstractContextManager[Any]:
    """A context in which compiled modules and functions run as they are written: no hook sees inside a graph."""
    is_there = "torch._dynamo" in sys.modules  # without it nothing is compiled, and importing it takes seconds
    return torch.compiler.set_stance("force_eager") if is_there else nullcontext()


def _check(model: nn.Module) -> None:
    if any(is_lazy(x) for x in (*model.parameters(), *model.buffers())):
        raise ValueError("model: some lazy modules have no parameters yet; call the model on a batch first")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ValueError(
            f"model: a {type(model).__name__} sums gradients over processes or devices; accepted is the module that it "
            "wraps: model.module"
        )


class _State:
    """All that a model is made of, to be put back: objects by reference, their contents in shallow copies."""

    def __init__(self, model: nn.Module) -> None:
        self._seen: dict[int, Any] = {}  # which keeps what is seen alive, so that no other object has its identity
        self._contents: list[tuple[Any, Any]] = []
        self._others: list[Callable[[], object]] = []
        self._tensors: list[tuple[Tensor, Tensor | None, bool, Tensor | None, int]] = []
        self._visit(model)
        hooks = [each for x, *_ in self._tensors for each in (x._post_accumulate_grad_hooks, x._backward_hooks) if each]
        self._hooks = [(each, dict(each)) for each in hooks]

    def _visit(self, model: nn.Module) -> None:
        """Take note of a model, and of what is in it."""
        pending: list[tuple[Any, int]] = [(model, 0)]
        while pending:
            value, depth = pending.pop()
            if id(value) in self._seen or isinstance(value, _NEVER):
                continue
            inside: Any = ()
            if isinstance(value, Tensor):
                self._note_tensor(value)
            elif isinstance(value, _CONTAINERS):
                inside = self._note_contents(value)
            elif isinstance(value, tuple):
                inside = value
            elif (restore := _restorer_of(value)) is not None:
                self._others.append(restore)
            elif isinstance(value, nn.Module):
                inside, depth = self._note_contents(vars(value)), 0
            elif depth < _DEEPEST and _holds_state(value):
                inside, depth = self._note_contents(vars(value)), depth + 1
            elif depth < _DEEPEST and (slots := _slots_of(value)):
                self._others.append(functools.partial(_set_slots, value, slots))
                inside, depth = slots.values(), depth + 1
            else:
                continue
            self._seen[id(value)] = value
            pending += [(item, depth) for item in inside]

    def _note_contents(self, container: Any) -> list[Any]:
        """Take note of a container, and return what is in it."""
        is_mapping = isinstance(container, dict)
        items = dict(container) if is_mapping else list(container)
        self._contents.append((container, items))
        return list(items.values()) if isinstance(items, dict) else items

    def _note_tensor(self, x: Tensor) -> None:
        if not x.is_leaf:
            return  # of an earlier pass: it is put back where it was
        has_values = not (x.is_meta or x.is_inference())
        values = x.detach().clone() if has_values else None
        self._tensors.append((x, x.grad, x.requires_grad, values, x._version if has_values else 0))

    def hide_gradients(self) -> None:
        """Let no parameter have a gradient, so that none adds to it, and no hook see one."""
        for x, grad, *_ in self._tensors:
            if grad is not None:
                x.grad = None
        for hooks, _ in self._hooks:
            hooks.clear()

    def restore(self) -> None:
        """Put everything back."""
        for container, items in self._contents:
            _refill(container, items)
        for hooks, before in self._hooks:
            hooks.clear()
            hooks.update(before)
        for restore in self._others:
            restore()
        for x, grad, trains, values, version in self._tensors:
            # The version counter does not see `x.data`, nor what batch norms write.
            if values is not None and (x.layout is torch.strided or x._version != version):
                put_back(x, values)
            if x.requires_grad is not trains:
                x.requires_grad_(trains)
            if x.grad is not grad:
                x.grad = grad


def put_back(x: Tensor, values: Tensor) -> None:
    """Give a tensor the sizes and values that it had, if it has others."""
    with torch.no_grad():
        if x.shape != values.shape:  # observers of torch.ao resize theirs
            x.resize_(values.shape)
        if x.layout is not torch.strided or not torch.equal(x, values):
            x.copy_(values)


def _holds_state(value: Any) -> bool:
    """Whether an object has attributes, and is of a class that is neither Python's nor torch's: a user's, or ours."""
    return hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _NOT_OURS


def _restorer_of(value: Any) -> Callable[[], object] | None:
    """Return what gives a generator of random numbers, or an array, what it has now; None for anything else."""
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
    return None


def _slots_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that has slots for them, of a class that is neither Python's nor torch's."""
    if type(value).__module__.partition(".")[0] in _NOT_OURS:
        return {}
    names = [name for kind in type(value).__mro__ for name in _names_of(vars(kind).get("__slots__", ()))]
    return {name: getattr(value, name) for name in names if not name.startswith("__") and hasattr(value, name)}


def _names_of(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _set_slots(value: Any, slots: dict[str, Any]) -> None:
    for name, before in slots.items():
        if getattr(value, name, None) is not before:
            object.__setattr__(value, name, before)


def _refill(container: Any, items: Any) -> None:
    """Put items back into a container, unless it has just these."""
    now = [*container.items()] if isinstance(items, dict) else [*container]
    before = [*items.items()] if isinstance(items, dict) else items
    if len(now) == len(before) and all(_is_same(a, b) for a, b in zip(now, before, strict=True)):
        return
    kind: Any = next(kind for kind in _CONTAINERS if isinstance(container, kind))
    kind.clear(container)
    (kind.extend if kind in (list, deque) else kind.update)(container, items)


def _is_same(a: Any, b: Any) -> bool:
    """Whether two items are one object, or two pairs of a key and a value hold the same ones."""
    return a is b or (type(a) is type(b) is tuple and len(a) == len(b) and all(map(operator.is_, a, b)))
