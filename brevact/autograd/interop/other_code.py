"""Identify non-torch code that saves tensors for its own backward pass, and the name by which rules know it.

Other people's ``autograd.Function``s, scripted code and operators of other libraries may compare the tensors that
they save, or divide by them; we have not checked. Regions save these in full precision, unless a rule
(``{MyFunction: StochBackward4bit}``) names them, or a Function is in the table of ``library_functions``. So do inputs
of checkpoints: decoded values may change a function's branches. A rule with the key
``torch.utils.checkpoint.checkpoint`` packs them.

A region's mode sees operators, but not a Function; saved-tensor hooks find that by the frame of its ``apply`` (from
torch 2.14 on, where ``apply`` is no Python function, by its watched forward), and the place of a tensor among those
that it saves by its watched forward. Scripted code stays exact.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from brevact.autograd.interop import library_functions
from brevact.autograd.interop.library_functions import UNKNOWN
from brevact.autograd.region.running import hooks_aside, when_imported
from brevact.autograd.saving.storages import storage_address
from brevact.private_names.of_torch import function_apply_code

if TYPE_CHECKING:
    from brevact.autograd.saving.saved import Saved

#: Classes of operators in ``torch.ops``: all overloads of one, and a single overload.
OPERATORS = type(torch.ops.aten.log), type(torch.ops.aten.log.default)
_OF_TORCH = ("aten", "prim", "prims", "brevact")
#: Modules whose functions are one op to their caller and many to a region, and save tensors as decompositions do.
ALGORITHMS = frozenset(("torch._lowrank", "torch._linalg_utils", "torch._lobpcg"))
_is_compiling = torch.compiler.is_dynamo_compiling


def operator_name(func: Any) -> str | None:
    if not isinstance(func, OPERATORS):
        return None
    namespace, name = str(func).split(".")[:2]
    return None if namespace in _OF_TORCH else f"{namespace}::{name}"


def is_of_torch(func: Callable) -> bool:
    if isinstance(func, OPERATORS):
        return operator_name(func) is None
    module = getattr(func, "__module__", None)
    return not isinstance(module, str) or module.partition(".")[0] == "torch"


def is_in_algorithm(caller: FrameType | None) -> bool:
    """Return whether a frame runs a torch function composed of matrix products and decompositions."""
    return caller is not None and caller.f_globals.get("__name__") in ALGORITHMS


def name_of(key: Any) -> str | None:
    """Return the name of a rule's key: a Function's path, also for its ``apply``, or an operator's name; else None."""
    function = as_function(key)
    if function is not None:
        if function_apply_code is None:
            watch_forward(function)
        return _path_of(function)
    if isinstance(key, torch.library.CustomOpDef):
        return str(key._qualname)
    return operator_name(key)


def as_function(key: Any) -> type[torch.autograd.Function] | None:
    """Return the Function that a key, or the owner of a key ``apply``, is; None for others and for brevact's own."""
    if getattr(key, "__name__", "") == "apply":
        key = getattr(key, "__self__", key)
    if isinstance(key, type) and issubclass(key, torch.autograd.Function) and not getattr(key, "is_brevact", False):
        return key
    return None


def label_of(key: Any) -> str:
    """Return how to write a key of :func:`name_of` in a rule."""
    function = as_function(key)
    if function is not None:
        return function.__name__
    name = operator_name(key) or name_of(key) or ""
    if "::" in name:
        return f"torch.ops.{name.replace('::', '.')}"
    return name.rpartition(".")[2]


def is_path(name: str) -> bool:
    return "." in name


def _path_of(function: type) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def saver_of(x: Tensor, frame: FrameType) -> tuple[str, str, _Call | None]:
    """Return the name in rules of code that saves a tensor, or "", its letter in the table, and its call."""
    call, path = _of_thread.call, ""
    if frame.f_code is function_apply_code:
        path = _path_of(frame.f_locals["cls"])
    if call is not None and call.place == (id(frame), frame.f_lasti) and (key := _key_of(x)) in call.saved:
        place = call.saved.index(key)
        call.saved[place] = None  # a call may save a tensor twice, and another call may save it later
        return path or call.path, UNKNOWN if call.letters is None else call.letters[place], call
    return path, UNKNOWN, None


def _key_of(x: Tensor) -> tuple[int, torch.Size]:
    return storage_address(x), x.shape


class _Call:
    """A call of a watched Function: the frame and instruction, and the storages and shapes that it saves."""

    def __init__(self, path: str, frame: FrameType, result: Any, ctx: Any, *args: Any) -> None:
        self.path, self.place = path, (id(frame), frame.f_lasti)
        self.saved = [None if x is None else _key_of(x) for x in ctx.to_save or ()]
        self.letters, self._formula = library_functions.letters_of(path, ctx), None
        if self.letters is not None and type(result) is Tensor and (make := library_functions.FORMULAS.get(path)):
            self._formula = make(result.shape, *args)
        self._result = None if self._formula is None else weakref.ref(result)
        self._operands: list[tuple[Tensor, Saved]] = []

    def result_with(self, x: Tensor, kept: Saved) -> tuple[Any, ...] | None:
        """Return the result, its formula and saved operands, once the last of these is saved."""
        if self._result is None:
            return None
        self._operands.append((x, kept))
        if any(self.saved):
            return None
        operands, self._operands = self._operands, []
        result = self._result()
        is_exact = all(decoder.quality.is_exact for _, (_, decoder) in operands)  # a kernel has other last bits
        return None if result is None or is_exact else (result, self._formula, operands)


class _CallOfThread(threading.local):
    call: _Call | None = None  # the last one


_of_thread = _CallOfThread()


def watch_forward(function: type[torch.autograd.Function]) -> None:
    """Wrap a Function's forward to note the tensors that its call will save as soon as the forward has run."""
    name = "forward" if function.setup_context is torch.autograd.Function.setup_context else "setup_context"
    inner = inspect.getattr_static(function, name)
    kind = classmethod if isinstance(inner, classmethod) else staticmethod  # Liger's losses know their subclass
    inner = getattr(inner, "__func__", inner)
    if hasattr(inner, "brevact_inner"):
        return

    @functools.wraps(inner)
    def told(*args: Any, **kwargs: Any) -> Any:
        if _is_compiling():
            return inner(*args, **kwargs)
        with hooks_aside():  # it may compile `torch.func.grad`, and the gradients are exact
            result = inner(*args, **kwargs)
        given = args[1:] if kind is classmethod else args
        if given and not kwargs:  # called by autograd
            of = getattr(type(given[0]), "_forward_cls", function)  # a subclass has a backward pass of its own
            _of_thread.call = _Call(_path_of(of), sys._getframe(1), result, *given)
        return result

    told.brevact_inner = inner  # type: ignore[attr-defined]
    setattr(function, name, kind(told))


def watch_forwards(paths: Iterable[str]) -> None:
    for path in paths:
        function = as_function(find(path))
        if function is not None:
            watch_forward(function)


def watch_all() -> None:
    """Watch all Functions of other code, where their ``apply`` has no frame: reports name these without a rule."""
    functions = [] if function_apply_code is not None else torch.autograd.Function.__subclasses__()
    for function in functions:  # which grows
        functions += function.__subclasses__()
        if as_function(function) is not None and not is_of_torch(function):
            watch_forward(function)


def find(path: str) -> Any:
    """Return the object with a name of :func:`name_of`; None if its module is not imported, or has no such object."""
    namespace, _, operator = path.partition("::")
    if operator:
        return getattr(getattr(torch.ops, namespace), operator, None)
    parts = path.split(".")
    for stop in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:stop]))
        if found is not None:
            for part in parts[stop:]:
                found = getattr(found, "__dict__", {}).get(part)
            return found
    return None


#: Name of the op whose rule applies to checkpoint inputs.
CHECKPOINT = "checkpoint"
#: Why an input is saved in full precision.
INPUT_OF_CHECKPOINT = "input of a checkpoint: a rule with the key torch.utils.checkpoint.checkpoint packs it"


def saves_input(frame: FrameType) -> bool:
    if frame.f_code is function_apply_code:  # a reentrant checkpoint is a Function
        return bool(frame.f_locals["cls"].__module__ == checkpoint.__module__)
    return bool(frame.f_globals.get("__name__") == checkpoint.__module__)


for _module, _names in library_functions.BY_MODULE.items():
    when_imported(_module, _names[0], functools.partial(watch_forwards, [f"{_module}.{name}" for name in _names]))
