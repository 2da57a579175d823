"""A warning, once per process: a model with a policy got gradients, but packed nothing.

Module hooks enter regions. `model.forward(x)` calls none, and a model in eval mode trains without regions.
"""

from __future__ import annotations

import logging

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

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


class _Watch:
    """Gradient hook of a model's last parameter."""

    warned = False

    def __init__(self, kind: str, attachment: Attachment) -> None:
        self._kind, self._attachment = kind, attachment

    def __call__(self, parameter: Tensor) -> None:
        if self._attachment.has_run or _Watch.warned or has_compiled():
            return
        _Watch.warned = True
        why = _EVAL if self._attachment.has_declined else _NOT_CALLED
        message = f"{self._kind} has a backward policy, and got gradients of a step that packed nothing: {why}"
        _log.warning(message)
        warn(message)


def watch_gradients(model: nn.Module) -> None:
    """Warn when a model with a policy gets gradients, but no region of the policy was entered."""
    attachment = attachment_of(model)
    if attachment is None or attachment.settings is None:
        return  # full precision is intended, at least in parts
    trained = [p for p in model.parameters() if p.requires_grad and p.is_leaf and not (is_lazy(p) or p.is_inference())]
    for parameter in trained[-1:]:
        watch = _Watch(type(model).__name__, attachment)
        vars(attachment)["watch"] = parameter.register_post_accumulate_grad_hook(watch)


def stop_watching(attachment: Attachment) -> None:
    """Undo :func:`watch_gradients`."""
    if "watch" in vars(attachment):
        vars(attachment).pop("watch").remove()
