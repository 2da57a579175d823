"""A warning, once per process: a model with a policy got gradients, but packed nothing.

Module hooks enter regions. `model.forward(x)` calls none, and a model in eval mode trains without regions.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from brevact.autograd.hooks import Attachment
from brevact.policy.inherit import attachment_of
from brevact.private_names.of_torch import has_compiled
from brevact.user_lines import warn

_log = logging.getLogger(__name__)
_BLOCK = "with brevact.backward_quant(model): loss = loss_fn(model(inputs), targets)"
_NOT_CALLED = (
    "none of its modules was called: model.forward(x), and methods that use parameters by themselves, run no hooks. "
    f"Call the model, model(x), or run the step in a block: {_BLOCK}"
)
_EVAL = f"it ran in eval mode. Call model.train(), or run the step in a block: {_BLOCK}"


class _Warned:
    is_so = False


class _Watch:
    """Gradient hook of a model's parameters; one remains after the first gradient."""

    def __init__(self, kind: str, attachment: Attachment) -> None:
        self._kind, self._attachment = kind, attachment
        self.handles: dict[int, RemovableHandle] = {}

    def add(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            if is_lazy(parameter):
                self.handles[id(module)] = module.register_forward_pre_hook(_Initialized(self))
                return
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and parameter.is_leaf and not parameter.is_inference():
                if id(parameter) not in self.handles:
                    self.handles[id(parameter)] = parameter.register_post_accumulate_grad_hook(self)

    def __call__(self, parameter: Tensor) -> None:
        if len(self.handles) > 1:
            for key, handle in self.handles.items():
                if key != id(parameter):
                    handle.remove()
            self.handles = {key: handle for key, handle in self.handles.items() if key == id(parameter)}
        attachment = self._attachment
        if attachment.has_run or _Warned.is_so or has_compiled():
            return
        _Warned.is_so = True
        why = _EVAL if attachment.has_declined else _NOT_CALLED
        message = f"{self._kind} has a backward policy, and got gradients of a step that packed nothing: {why}"
        _log.warning(message)
        warn(message)


class _Initialized:
    """Pre-hook of a module whose lazy parameters take no hooks until torch's own pre-hook initializes them.

    Copies do nothing: a copied model has no watch.
    """

    def __init__(self, watch: _Watch) -> None:
        self._watch: _Watch | None = watch

    def __getstate__(self) -> dict[str, Any]:
        return {"_watch": None}

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Watch the module's initialized parameters; compiled models are not watched."""
        if not torch.compiler.is_dynamo_compiling() and self._watch is not None:
            self._watch.handles.pop(id(module)).remove()
            self._watch.add(module)


def watch_gradients(model: nn.Module) -> None:
    """Warn when parameters of a model with a policy get gradients, but no region of the policy was entered."""
    attachment = attachment_of(model)
    if attachment is None or attachment.settings is None:
        return  # full precision is intended, at least in parts
    watch = _Watch(type(model).__name__, attachment)
    for module in model.modules():
        watch.add(module)
    vars(attachment)["watch"] = watch


def stop_watching(attachment: Attachment) -> None:
    """Undo :func:`watch_gradients`."""
    watch: Any = vars(attachment).pop("watch", None)
    if watch is not None:
        for handle in watch.handles.values():
            handle.remove()
