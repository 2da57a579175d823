"""Identify non-torch code that saves tensors for its own backward pass, and the name by which rules know it.

Other people's ``autograd.Function``s, scripted code and operators of other libraries may compare the tensors that
they save, or divide by them; we have not checked. Regions save these in full precision, unless a rule
(``{MyFunction: StochBackward4bit}``) or :data:`LIBRARY_FUNCTIONS` names them. So do inputs of checkpoints: decoded
values may change a function's branches. A rule with the key ``torch.utils.checkpoint.checkpoint`` packs them.

A region's mode sees operators, but not a Function; saved-tensor hooks find that by the frame of its ``apply`` (from
torch 2.14 on, where ``apply`` is no Python function, by its watched forward). Scripted code stays exact.
"""

from __future__ import annotations

import enum
import functools
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from brevact.autograd.storages import storage_address
from brevact.private_names.of_torch import function_apply_code

#: Classes of operators in ``torch.ops``: all overloads of one, and a single overload.
OPERATORS = type(torch.ops.aten.log), type(torch.ops.aten.log.default)
_OF_TORCH = ("aten", "prim", "prims", "brevact")
#: Modules whose functions are one op to their caller and many to a region, and save tensors as decompositions do.
_ALGORITHMS = frozenset(("torch._lowrank", "torch._linalg_utils", "torch._lobpcg"))
_is_compiling = torch.compiler.is_dynamo_compiling


class Saver(NamedTuple):
    """Code that saves a tensor: the name by which rules know it, or "", and a short one for reports."""

    name: str
    label: str


_UNKNOWN = Saver("", "")


def operator_name(func: Any) -> str | None:
    """Return the name of another library's operator, ``"torchvision::roi_align"``; None for anything else."""
    if not isinstance(func, OPERATORS):
        return None
    namespace, name = str(func).split(".")[:2]
    return None if namespace in _OF_TORCH else f"{namespace}::{name}"


def is_of_torch(func: Callable) -> bool:
    """Return whether a function is torch's; its compiled methods have no module."""
    if isinstance(func, OPERATORS):
        return operator_name(func) is None
    module = getattr(func, "__module__", None)
    return not isinstance(module, str) or module.partition(".")[0] == "torch"


def is_in_algorithm(caller: FrameType | None) -> bool:
    """Return whether a frame runs a torch function composed of matrix products and decompositions."""
    return caller is not None and caller.f_globals.get("__name__") in _ALGORITHMS


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


def saver_of(x: Tensor, frame: FrameType) -> Saver:
    if frame.f_code is function_apply_code:
        function = frame.f_locals["cls"]
        return Saver(_path_of(function), function.__name__)
    if _of_thread.ran is not None:
        name, *place, saved = _of_thread.ran
        if place == [id(frame), frame.f_lasti] and storage_address(x) in saved:
            saved.remove(storage_address(x))  # a call may save a tensor twice, and another call may save it later
            return Saver(name, name.rpartition(".")[2])
    return _UNKNOWN


class _OfThread(threading.local):
    """The watched Function that ran last: its name, frame and instruction of the call, and storages that it saves."""

    def __init__(self) -> None:
        self.ran: tuple[str, int, int, list[int]] | None = None


_of_thread = _OfThread()


def watch_forward(function: type[torch.autograd.Function]) -> None:
    """Wrap a Function's forward to note the tensors that its call will save as soon as the forward has run."""
    name = "forward" if function.setup_context is torch.autograd.Function.setup_context else "setup_context"
    inner = getattr(function, name)
    if hasattr(inner, "brevact_inner"):
        return
    path = _path_of(function)

    @functools.wraps(inner)
    def told(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        result = inner(ctx, *args, **kwargs)
        if not _is_compiling():
            caller = sys._getframe(1)
            saved = [storage_address(x) for x in ctx.to_save or () if x is not None]
            _of_thread.ran = path, id(caller), caller.f_lasti, saved
        return result

    told.brevact_inner = inner  # type: ignore[attr-defined]
    setattr(function, name, staticmethod(told))


def watch_forwards(paths: Iterable[str]) -> None:
    for path in paths:
        function = as_function(find(path))
        if function is not None:
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
    """Return whether a tensor that this innermost frame saves is a checkpoint's input."""
    if frame.f_code is function_apply_code:  # a reentrant checkpoint is a Function
        return bool(frame.f_locals["cls"].__module__ == checkpoint.__module__)
    return bool(frame.f_globals.get("__name__") == checkpoint.__module__)


class Gradient(enum.Enum):
    """How the gradient of a Function depends on its saved tensors."""

    LINEAR = "linear in each tensor that is saved, or as the norm's that a region packs, with its bias of Var/N"
    BOUNDED = "quadratic in a result between 0 and 1: a bias of one copy's variance, as softmax has"
    SMOOTH = "a smooth curve of the input, which is saved: the bias Var f'' / 2 of what derives from a packed tensor"

    def may_pack(self, settings: Any) -> bool:
        # a smooth function's input from ``derive_min_bits`` on
        return self is not Gradient.SMOOTH or settings.derives_curved or settings.is_lossless


#: By the Function's path; ``tests/autograd/test_other_code.py`` tests each one.
LIBRARY_FUNCTIONS: dict[str, Gradient] = {
    "torch.nn.modules._functions.SyncBatchNorm": Gradient.LINEAR,
    "timm.layers.activations_me.SwishAutoFn": Gradient.SMOOTH,
    "timm.layers.activations_me.MishAutoFn": Gradient.SMOOTH,
    "transformers.models.bloom.modeling_bloom.GeLUFunction": Gradient.SMOOTH,
    "transformers.models.sew_d.modeling_sew_d.XSoftmax": Gradient.BOUNDED,
}
