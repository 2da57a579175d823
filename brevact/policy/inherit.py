"""Modules of a model with a policy that no rule matches: they run like the module around them, also called alone.

A warning, once per process: a model with a policy got gradients, but packed nothing.

Module hooks enter regions. `model.forward(x)` calls none, and a model in eval mode trains without regions.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from brevact.autograd import BackwardSettings
from brevact.autograd.hooks import Attachment, attachments_of, inherit_region, inherited_region, regions_of
from brevact.injectors.proxies import modules_without_own_region
from brevact.policy.rules import POLICY
from brevact.private_names.of_torch import has_compiled
from brevact.quantizers.brief import brief
from brevact.user_lines import warn


def hook_of_policy(module: nn.Module) -> Any:
    """Return the hook by which a policy applies to a module: its own, or the enclosing module's; None without."""
    own = [hook for hook in regions_of(module) if hook.origin == POLICY]
    return own[0] if own else inherited_region(module)


def inherit_policy(model: nn.Module) -> None:
    """Let each module without a region of a policy open its enclosing module's region when called alone."""
    found: dict[str, Any] = {}
    for name, module in modules_without_own_region(model):
        hook = hook_of_policy(module)
        around = found.get(name.rpartition(".")[0]) if name else None
        if hook is None and around is not None and type(module).forward is not nn.Module.forward:
            inherit_region(module, around)
        found[name] = around if around is not None and not regions_of(module) else hook


def attachment_of(model: nn.Module) -> Attachment | None:
    """Return the policy of a model, or of a part of it, as in a wrapped model; None without.

    If its parts have policies with different settings, the result has no settings: code outside of them keeps full
    precision.
    """
    own = attachments_of(model)
    if own:
        return own[0]
    found: dict[Attachment, None] = {}
    for module in model.modules():
        found |= dict.fromkeys(attachments_of(module))
    first = next(iter(found), None)
    if first is not None and any(each.settings != first.settings for each in found):
        return Attachment()
    return first


def required_attachment(model: nn.Module) -> Attachment:
    """Return the result of :func:`attachment_of`, or raise a ValueError with the fix."""
    found = attachment_of(model)
    if found is None:
        raise ValueError(
            f"source: got {brief(model)}, a model without a backward policy, by which the block could run; accepted is "
            "a model with one: brevact.quantize_backward(model) gives it"
        )
    return found


def is_model(module: nn.Module) -> bool:
    """Return whether a module is a model, not a quantizer module or a quantizer's slot."""
    settings = getattr(getattr(module, "backward_quant", module), "settings", None)
    return not (hasattr(module, "is_stochastic") or isinstance(settings, BackwardSettings))


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
