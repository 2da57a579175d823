"""Modules of a model with a policy that no rule matches: they run like the module around them, also called alone."""

from __future__ import annotations

from typing import Any

from torch import nn

from brevact.autograd import BackwardSettings
from brevact.autograd.hooks import Attachment, attachments_of, inherit_region, inherited_region, regions_of
from brevact.injectors.proxies import modules_without_own_region
from brevact.policy.rules import POLICY
from brevact.quantizers.brief import brief


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
