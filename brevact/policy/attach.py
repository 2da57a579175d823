"""Backward quantizers for a model, a block of code, a tensor: `quantize_backward`, `backward_quant`, `quantizer`.

Modules that no rule matches run like the module around them, also called alone. A warning, once per process: a model
with a policy got gradients, but packed nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from brevact.arguments import check_model
from brevact.autograd import BackwardSettings, attach_region, detach_region, has_region, region
from brevact.autograd.region.module_hooks import (
    Attachment,
    attachments_of,
    inherit_region,
    inherited_region,
    regions_of,
    takes_hooks,
)
from brevact.autograd.region.settings import with_overrides
from brevact.injectors import backward_settings_from
from brevact.injectors.proxies import modules_without_own_region, settings_of_slot
from brevact.injectors.resolve import BackwardQuantizer
from brevact.policy.presets import DEFAULT, Policy
from brevact.policy.rules import (
    POLICY,
    Assignment,
    assignments,
    check_layers,
    check_rules,
    is_foreign,
    refuse_policy,
    source_text,
)
from brevact.policy.text import named_policy
from brevact.private_names.of_torch import has_compiled, skipped_by_dynamo
from brevact.quantizers import ActivationQuantizer
from brevact.quantizers.brief import brief
from brevact.quantizers.traits import is_quantizer
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
    """Return the policy of a model, or of a part of it, as in a wrapped model; None without."""
    own = attachments_of(model)
    if own:
        return own[0]
    found = dict.fromkeys(each for module in model.modules() for each in attachments_of(module))
    first = next(iter(found), None)
    if first is not None and any(each.settings != first.settings for each in found):
        return Attachment()
    return first


def required_attachment(model: nn.Module) -> Attachment:
    found = attachment_of(model)
    if found is None:
        raise ValueError(
            f"source: got {brief(model)}, a model without a backward policy, by which the block could run; accepted is "
            "a model with one: brevact.quantize_backward(model) gives it"
        )
    return found


def is_model(module: nn.Module) -> bool:
    """Return whether a module is a model, not a quantizer module or a quantizer's slot."""
    return not is_quantizer(module) and settings_of_slot(module) is None


_BLOCK = "with brevact.backward_quant(model): loss = loss_fn(model(inputs), targets)"
_NOT_CALLED = (
    "none of its modules was called: model.forward(x), and methods that use parameters by themselves, run no hooks. "
    f"Call the model, model(x), or run the step in a block: {_BLOCK}"
)
_EVAL = f"it ran in eval mode. Call model.train(), or run the step in a block: {_BLOCK}"


class _Watch:
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


M = TypeVar("M", bound=nn.Module)
_log = logging.getLogger(__name__)


def quantizer(source: BackwardQuantizer, **overrides: Any) -> ActivationQuantizer:
    """Return a backward quantizer by itself, for tests, notebooks and other frameworks' code.

    >>> import torch, brevact
    >>> q = brevact.quantizer(brevact.NearestBackward4bit, bucket_size=64)
    >>> packed = q.quantize(torch.linspace(0, 1, 256))
    >>> packed.nbytes, packed.dequantize().shape
    (152, torch.Size([256]))

    Args:
        source: backward quantizer, such as ``StochBackward2bit``.
        **overrides: settings that replace those of ``source``.

    Returns:
        Its activation quantizer: ``quantize(x, seed=None)`` returns a ``PackedActivation``.

    Raises:
        TypeError: ``source`` is no backward quantizer, or an override is not one of its settings.
        ValueError: a value is out of range.
    """
    return backward_settings_from(source, **overrides).quantizer


def backward_quant(
    source: BackwardQuantizer | Policy | nn.Module | str | os.PathLike[str] | None = DEFAULT, **overrides: Any
) -> region:
    """Return a region: a block of code that saves packed activations for backward; the forward pass is unchanged.

    With a model that has a policy, the block is a training step: modules run by their rules; the loss and other
    functions outside of modules run by the rules of the model as a whole (``"*"``, ``""`` and rules for functions).

    >>> import torch, torch.nn as nn, torch.nn.functional as F, brevact
    >>> model = brevact.quantize_backward(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)))
    >>> images, labels = torch.rand(256, 64), torch.randint(10, (256,))
    >>> with brevact.backward_quant(model):  # the step is the unit: the model and its loss
    ...     loss = F.cross_entropy(model(images), labels)
    >>> loss.backward()

    Without a model, name a quantizer or a policy:

    >>> x, weight = torch.rand(64, 64), torch.rand(64, 64, requires_grad=True)
    >>> with brevact.backward_quant(brevact.StochBackward2bit):
    ...     loss = (x @ weight).relu().sum()
    >>> loss.backward()
    >>> with brevact.backward_quant():  # the policy brevact.DEFAULT
    ...     loss = (x @ weight).relu().sum()

    A block packs even in modules in eval mode, unless gradients are off.

    In code that ``torch.compile(fullgraph=True)`` traces, call this function in the ``with`` statement: Dynamo cannot
    trace a context manager that was made before.

    Args:
        source: :data:`DEFAULT` or one of the following. A model with a policy, or a wrapper of such a model
            (``DistributedDataParallel``). A backward quantizer, such as ``StochBackward2bit``; None for full precision
            inside another region. A :class:`Policy` whose rules are "*" and torch functions (:data:`DEFAULT`'s and
            :data:`RECOMPUTE`'s rules for modules do not count here). A text for :func:`brevact.parse_policy`, but no
            budget.
        **overrides: settings that replace those of ``source``, if it is one quantizer. ``double_backward=True``, for
            gradients that are differentiated again (``create_graph=True``), works with rules, too.

    Returns:
        A context manager and decorator that can be entered many times.

    Raises:
        TypeError: ``source`` is no backward quantizer and no policy for a block, or an override is not one of its
            settings.
        OSError: the file of a text cannot be read.
        ValueError: a value is out of range, a model has no policy, or a text is no policy or a budget.
    """
    if torch.compiler.is_dynamo_compiling():
        return region(_settings_of_graph(source, tuple(overrides.items())))
    if isinstance(source, nn.Module) and is_model(source):
        return _RegionOfModel(source, overrides)
    return region(_settings(source, overrides))


class _RegionOfModel(region):
    def __init__(self, model: nn.Module, overrides: Mapping[str, Any]) -> None:
        refuse_overrides(overrides)
        super().__init__(None, required_attachment(model))
        self._model = model

    @skipped_by_dynamo
    def __enter__(self) -> None:
        self.attachment = required_attachment(self._model)
        self.settings = self.attachment.settings
        super().__enter__()


def region_of_step(model: nn.Module) -> AbstractContextManager[Any]:
    """Return the region for a training step of a model, its loss included; a null context without a policy."""
    return nullcontext() if attachment_of(model) is None else _RegionOfModel(model, {})


@torch.compiler.assume_constant_result
def _settings_of_graph(source: Any, overrides: tuple[tuple[str, Any], ...]) -> BackwardSettings | None:
    return _settings(source, dict(overrides))


def quantize_backward(
    model: M,
    policy: BackwardQuantizer | Mapping[Any, BackwardQuantizer | None] | Policy | str | os.PathLike[str] = DEFAULT,
    **overrides: Any,
) -> M:
    """Make a whole model save packed activations for backward; changes the model in place.

    No module is replaced: forward hooks run each module in a region while it trains. Weights, dtype, device, eval mode,
    other hooks, tied weights, subclasses and ``state_dict`` keys stay. Layers with their own backward quantizer
    (``act_quant=``) keep it. Scripted and traced submodules take no hooks: they run in their parent's region.

    >>> import torch.nn as nn, torch.nn.functional as F, brevact
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> model = brevact.quantize_backward(model)  # the policy brevact.DEFAULT
    >>> model = brevact.quantize_backward(brevact.restore_backward(model), {
    ...     nn.BatchNorm2d: brevact.StochBackward4bit,
    ...     F.cross_entropy: None,  # full precision, wherever it is called
    ...     "*": brevact.StochBackward2bit,
    ... })

    ``torch.fx`` and Brevitas' passes over graphs (``brevitas.graph.quantize.preprocess_for_quantize``) build a new
    model without the hooks: call this function on the new model. A checkpoint of the ``state_dict`` (Lightning,
    ``save_pretrained``) has no policy either. :func:`backward_policy` shows which quantizer applies to each module.

    Args:
        model: module to change.
        policy: one of the following; :data:`DEFAULT` if left out.

            - One backward quantizer for the whole model.
            - Rules, a mapping to backward quantizers, or to None for full precision. A rule's key is a module type
              or a tuple of types; a name, which matches a module and its submodules ("head"), with the wildcards of
              ``fnmatch`` ("blocks.*.norm", "*"); a torch function or a tuple of functions; or a predicate of a module's
              name and the module. A torch function matches all functions of the same op: ``torch.matmul`` for
              ``a @ b`` and ``torch.bmm``, ``F.cross_entropy`` for ``nn.CrossEntropyLoss``. For each call of a torch
              function in a module, the first rule that matches the module or the function wins; a module without a
              match has its parent's rule. Rules skip layers with ``act_quant=``.
            - A :class:`Policy`, such as ``CONV_NET`` and ``TRANSFORMER``.
            - A text for :func:`brevact.parse_policy`, but no budget: "default",
              "StochBackward4bit:bucket_size=256", "policy.json".
        **overrides: settings that replace those of the one quantizer. ``double_backward=True``, for gradients that are
            differentiated again (``create_graph=True``), works with rules, too.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no module, or a scripted or traced one; a rule's key has another type, or is a torch
            function that packs nothing; its value is no backward quantizer.
        OSError: the file of a text cannot be read.
        ValueError: a rule matches nothing, or earlier rules match all its modules; a text is no policy or a budget,
            which only :func:`brevact.fit` takes; the model, or a part of it, already has a policy.
    """
    attach_policy(model, policy, overrides)
    watch_gradients(model)
    regions = sum(has_region(module, POLICY) for module in model.modules())
    _log.info("%s has a backward policy; a rule matches %d of its modules", type(model).__name__, regions)
    return model


def attach_policy(model: M, policy: Any = DEFAULT, overrides: Mapping[str, Any] = MappingProxyType({})) -> M:
    """Attach a policy like :func:`quantize_backward`, without a log line, for example to a copy that is measured."""
    check_model(model, "quantize_backward(model, policy)", policy)
    refuse_policy(model)
    if not takes_hooks(model):
        kind = type(model).__name__
        raise TypeError(
            f"model: got a {kind} ({getattr(model, 'original_name', kind)}) of torch.jit, which takes no forward "
            "hooks; accepted is a module of Python, with scripted ones inside or not: torch.nn.Sequential(model); "
            "or run the model in a block: with brevact.backward_quant(...)"
        )
    attachment = Attachment()
    for module, assignment in _assignments(model, named_policy(policy), dict(overrides)).items():
        if module is not model and is_foreign(module):
            continue  # it runs as the module around it
        label = assignment.rule, assignment.source, tuple((each.op, each.rule, each.source) for each in assignment.ops)
        attach_region(module, assignment.settings, POLICY, label=label, attachment=attachment)
    attachment.root = hook_of_policy(model)
    if attachment.root is not None:
        attachment.root.yields = False
    inherit_policy(model)
    return model


def restore_backward(model: M) -> M:
    """Undo :func:`quantize_backward`: remove the policy and its hooks. Layers with ``act_quant=`` keep theirs.

    >>> import torch.nn as nn, brevact
    >>> model = brevact.quantize_backward(nn.Linear(8, 8), brevact.StochBackward2bit)
    >>> brevact.backward_policy(brevact.restore_backward(model)).rows[0].source
    'full precision'

    Args:
        model: module that ``quantize_backward`` changed.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: there is no policy to remove.
    """
    check_model(model)
    own = {each for module in model.modules() if not is_foreign(module) for each in attachments_of(module)}
    own.update(attachments_of(model))
    for attachment in own:
        if "watch" in vars(attachment):
            vars(attachment).pop("watch").remove()
    modules = [each for each in model.modules() if not is_foreign(each) or own.intersection(attachments_of(each))]
    if not any([detach_region(module, POLICY) for module in modules]):
        raise ValueError("model has no backward policy; brevact.quantize_backward(model, ...) gives it one")
    return model


def _settings(source: Any, overrides: dict[str, Any]) -> BackwardSettings | None:
    source = named_policy(source, "source")
    if isinstance(source, Policy):
        refuse_overrides(overrides, "double_backward")
        return with_overrides(source.settings_of_block, overrides)
    if isinstance(source, nn.Module) and is_model(source):
        refuse_overrides(overrides)
        return required_attachment(source).settings
    if source is None:
        if overrides:
            raise TypeError(
                f"{', '.join(overrides)}: source=None keeps full precision and has no settings; leave them out, or "
                "pass a quantizer: backward_quant(StochBackward2bit, bucket_size=128)"
            )
        return None
    return backward_settings_from(source, **overrides)


def _assignments(model: nn.Module, policy: Any, overrides: dict[str, Any]) -> dict[nn.Module, Assignment]:
    if isinstance(policy, Mapping | Policy):
        refuse_overrides(overrides, "double_backward")
        if isinstance(policy, Policy):
            if policy.layers is not None:
                check_layers(model, policy.layers)
            found = assignments(model, policy.rules, optional=policy.rules.keys() - set(policy.required))
        else:
            check_rules(policy, "policy")
            found = assignments(model, policy)
        return {module: each.with_overrides(overrides) for module, each in found.items()}
    settings, source = backward_settings_from(policy, "policy", **overrides), source_text(policy, overrides)
    every = assignments(model, {"*": settings})
    return {module: Assignment(settings, found.rule, source) for module, found in every.items()}


def refuse_overrides(overrides: Mapping[str, Any], accepted: str = "") -> None:
    given = [name for name in overrides if name != accepted]
    if given:
        raise TypeError(
            f"{', '.join(given)}: overrides go with a single quantizer; name one, such as brevact.DitherBackward4bit, "
            "or put them on the value of a rule: DitherBackward4bit.let(bucket_size=128)"
        )
