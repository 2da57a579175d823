"""Backward quantizers for a model, a block of code, a tensor: `quantize_backward`, `backward_quant`, `quantizer`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn

from brevact.arguments import check_model
from brevact.autograd import BackwardSettings, attach_region, detach_region, has_region, region
from brevact.autograd.compiled.mode import TracingMode, text_of
from brevact.injectors import backward_settings_from, settings_of_block, settings_of_module
from brevact.injectors.resolve import BackwardQuantizer
from brevact.policy.fitted_layers import check_layers
from brevact.policy.notes import add_note, remove_note
from brevact.policy.presets import DEFAULT, Policy
from brevact.policy.rules import (
    POLICY,
    Assignment,
    assignments,
    block_assignment,
    check_rules,
    refuse_policy,
    source_text,
)
from brevact.quantizers import ActivationQuantizer
from brevact.quantizers.brief import brief

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
        source: backward quantizer, such as ``StochBackward2bit``, or an activation quantizer of Brevitas, such as
            ``Int8ActPerTensorFloat``.
        **overrides: settings that replace those of ``source``.

    Returns:
        Its activation quantizer: ``quantize(x, seed=None)`` gives a ``PackedActivation``.

    Raises:
        TypeError: ``source`` is no backward quantizer, or an override is not one of its settings.
        ValueError: a value is out of range.
    """
    return backward_settings_from(source, **overrides).quantizer


def backward_quant(source: BackwardQuantizer | Policy | None = DEFAULT, **overrides: Any) -> region:
    """Return a region: code inside stores packed activations for backward; the forward pass is unchanged.

    >>> import torch, brevact
    >>> x, weight = torch.rand(64, 64), torch.rand(64, 64, requires_grad=True)
    >>> with brevact.backward_quant(brevact.StochBackward2bit):
    ...     loss = (x @ weight).relu().sum()
    >>> loss.backward()
    >>> with brevact.backward_quant():  # what brevact.DEFAULT says
    ...     loss = (x @ weight).relu().sum()

    An activation quantizer of Brevitas quantizes each tensor by statistics of its own, like a new one: in a block
    nothing tells tensors apart from one run to the next.

    In code that ``torch.compile(fullgraph=True)`` traces, make the region where it is entered: Dynamo knows no context
    manager that was made before.

    Args:
        source: backward quantizer, such as ``StochBackward2bit``; None keeps full precision inside another region. Or
            a :class:`Policy` whose rules are "*" and torch functions. Left out, it is :data:`DEFAULT`, of whose rules
            those for modules do not count here.
        **overrides: settings that replace those of ``source``, which is one quantizer.

    Returns:
        Context manager, to be used once or often, also as a decorator.

    Raises:
        TypeError: ``source`` is no backward quantizer and no policy for a block, or an override is not one of its
            settings.
        ValueError: a value is out of range.
    """
    if torch.compiler.is_dynamo_compiling():
        mode: Any = TracingMode(_text_of(source, tuple(overrides.items())))  # what Dynamo knows of a region
        return mode
    return region(settings_of_block(_settings(source, overrides)))


@torch.compiler.assume_constant_result
def _text_of(source: Any, overrides: tuple[tuple[str, Any], ...]) -> str | None:
    return text_of(_settings(source, dict(overrides)))


def quantize_backward(
    model: M, policy: BackwardQuantizer | Mapping[Any, BackwardQuantizer | None] | Policy = DEFAULT, **overrides: Any
) -> M:
    """Let a whole model store packed activations for backward, in place.

    No module is replaced: forward hooks let each module run in a region while it trains, so that weights, dtype,
    device, eval mode, hooks, tied weights, subclasses and ``state_dict`` keys stay. Layers that have a backward
    quantizer of their own (``act_quant=``) keep it.

    >>> import torch.nn as nn, torch.nn.functional as F, brevact
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> model = brevact.quantize_backward(model)  # what brevact.DEFAULT says
    >>> model = brevact.quantize_backward(brevact.restore_backward(model), {
    ...     nn.BatchNorm2d: brevact.StochBackward4bit,
    ...     F.cross_entropy: None,  # full precision, wherever it is called
    ...     "*": brevact.StochBackward2bit,
    ... })

    An activation quantizer of Brevitas quantizes for backward alone here. One that collects statistics collects them in
    each module anew; they are copied and pickled with the model, and are not part of its ``state_dict``: a layer's
    ``act_quant=`` keeps them there.

    What builds a new model out of this one drops the hooks, silently: ``torch.fx`` and Brevitas' passes over graphs
    (``brevitas.graph.quantize.preprocess_for_quantize``). Call it first, and this function on its result;
    :func:`backward_policy` shows what applies. A checkpoint of the ``state_dict`` (Lightning, ``save_pretrained``) has
    no policy either.

    ``print(model)`` says in short which modules store what; :func:`backward_policy` is the whole table.

    A model that has run compiled keeps its graphs, whatever changes here: call ``torch.compiler.reset()`` then.

    Args:
        model: module to change.
        policy: one backward quantizer for all of it; or rules, a mapping to backward quantizers, None for full
            precision. A rule is a module type or a tuple of types; a name pattern, which names a module and what is
            inside it ("head"), with the wildcards of ``fnmatch`` ("blocks.*.norm", "*"); a torch function or a tuple of
            functions; or a function of a module's name and the module, which returns True or False. A torch function
            stands for all that mean the same op: ``torch.matmul`` for ``a @ b`` and ``torch.bmm``, ``F.cross_entropy``
            for ``nn.CrossEntropyLoss``. For a call of a function in a module, the first rule wins that matches the
            module or names the function; a module that none matches counts as its parent. Layers with ``act_quant=``
            have no rules. Or a :class:`Policy`, such as ``CONV_NET`` and ``TRANSFORMER``; left out, it is
            :data:`DEFAULT`.
        **overrides: settings that replace those of the one quantizer.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no module, a rule's key is of another kind or a torch function in which no quantizer
            changes what is stored, its value no backward quantizer.
        ValueError: a rule matches nothing, or nothing that the rules before it leave; the model, or a part of it,
            already has a policy.
    """
    attach_policy(model, policy, overrides)
    regions = sum(has_region(module, POLICY) for module in model.modules())
    _log.info("%s has a backward policy; a rule matches %d of its modules", type(model).__name__, regions)
    return model


def attach_policy(model: M, policy: Any = DEFAULT, overrides: Mapping[str, Any] = MappingProxyType({})) -> M:
    """Do what :func:`quantize_backward` does without a word in the log: of a copy that is measured, say."""
    check_model(model, "quantize_backward(model, policy)", policy)
    refuse_policy(model)
    for module, assignment in _assignments(model, policy, dict(overrides)).items():
        settings = settings_of_module(assignment.settings, module)
        label = assignment.rule, assignment.source, tuple((each.op, each.rule, each.source) for each in assignment.ops)
        try:
            attach_region(module, settings, POLICY, label=label)
        except RuntimeError as error:  # of torch.jit
            _detach_policy(model)
            raise TypeError(
                f"model: {brief(module)} takes no forward hooks ({error}); accepted are modules that are not scripted: "
                "quantize before torch.jit.script, or call the model in a region, with brevact.backward_quant(...)"
            ) from error
        add_note(module)
    return model


def restore_backward(model: M) -> M:
    """Undo :func:`quantize_backward`: the model stores what it stored before. Layers with ``act_quant=`` keep theirs.

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
    if not _detach_policy(model):
        raise ValueError("model has no backward policy; brevact.quantize_backward(model, ...) gives it one")
    return model


def _detach_policy(model: nn.Module) -> bool:
    """Take regions and notes of a policy off all modules, and return whether there was one."""
    for module in model.modules():
        remove_note(module)
    return any([detach_region(module, POLICY) for module in model.modules()])


def _settings(source: Any, overrides: dict[str, Any]) -> BackwardSettings | None:
    if isinstance(source, Policy):
        _refuse_overrides(source, overrides, "backward_quant(StochBackward4bit, {})")
        return block_assignment(source.rules, skips_modules=source is DEFAULT).settings
    if source is None:
        if overrides:
            raise TypeError(
                f"{', '.join(overrides)}: source=None keeps full precision and has no settings; leave them out, or "
                "pass a quantizer: backward_quant(StochBackward2bit, bucket_size=128)"
            )
        return None
    return backward_settings_from(source, **overrides)


def _refuse_overrides(policy: Any, overrides: dict[str, Any], call: str) -> None:
    if overrides:
        stated = ", ".join(f"{name}={brief(value)}" for name, value in overrides.items())
        fix = (
            f"name one: {call.format(stated)}"
            if policy is DEFAULT
            else "in rules, put them on a rule's value: StochBackward2bit.let(bucket_size=128)"
        )
        raise TypeError(f"{', '.join(overrides)}: overrides go with a single quantizer; {fix}")


def _assignments(model: nn.Module, policy: Any, overrides: dict[str, Any]) -> dict[nn.Module, Assignment]:
    """Return what each module gets by a policy of any kind."""
    if isinstance(policy, Mapping | Policy):
        _refuse_overrides(policy, overrides, "quantize_backward(model, StochBackward4bit, {})")
        if isinstance(policy, Policy):
            if policy.layers is not None:
                check_layers(model, policy.layers)
            return assignments(model, policy.rules, optional=True)
        check_rules(policy, "policy")
        return assignments(model, policy)
    settings, source = backward_settings_from(policy, None, "policy", **overrides), source_text(policy, overrides)
    every = assignments(model, {"*": settings})
    return {module: Assignment(settings, found.rule, source) for module, found in every.items()}
