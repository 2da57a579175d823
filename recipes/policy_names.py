"""Backward policies as words of a command line.

StochBackward2bit                                        a quantizer, or a policy, of brevact
StochBackward4bit:bucket_size=256,save_mode='...'        with settings
StochBackward2bit+norms=StochBackward4bit+loss=None      but for some parts of the model
None+blocks.2.*=StochBackward4bit                        modules by a pattern of their names, which has a dot or a star
None                                                     full precision
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

import brevact
from brevact.policy.predicates import computes_attention, is_activation_function, is_norm
from brevact.policy.text import quantizer_of

M = TypeVar("M", bound=nn.Module)


def is_linear(name: str, module: nn.Module) -> bool:
    """Whether a module is a convolution or a linear layer."""
    return isinstance(module, nn.Linear | nn.modules.conv._ConvNd)


def is_loss(name: str, module: nn.Module) -> bool:
    """Whether a module is a cross-entropy."""
    return isinstance(module, nn.CrossEntropyLoss)


#: Rules for parts of a model, by the names that words use.
PARTS: dict[str, Callable[[str, nn.Module], bool]] = {
    "norms": is_norm,
    "activations": is_activation_function,
    "linear": is_linear,
    "attention": computes_attention,
    "loss": is_loss,
}


@dataclass(frozen=True)
class NamedPolicy:
    """A policy and the words that name it.

    Args:
        name: as the command line has it.
        source: for `brevact.quantize_backward`; None for full precision.
        settings: its keyword arguments.
    """

    name: str
    source: Any
    settings: dict[str, Any] = field(default_factory=dict)

    def apply(self, model: M) -> M:
        return model if self.source is None else brevact.quantize_backward(model, self.source, **self.settings)


def named_policy(words: str) -> NamedPolicy:
    """Read a policy; for argparse."""
    whole, *parts = words.split("+")
    source, settings = _source(whole)
    if parts:
        rules: dict[Any, Any] = {}
        for part in parts:
            name, separator, words_of_part = part.partition("=")
            is_pattern = "." in name or "*" in name
            if not separator or not (is_pattern or name in PARTS):
                raise argparse.ArgumentTypeError(
                    f"+{part} is not of the form +PART=NAME, PART one of {', '.join(PARTS)}, or a pattern of names "
                    "such as blocks.2.*"
                )
            rules[name if is_pattern else PARTS[name]] = _with_settings(*_source(words_of_part))
        source, settings = {**rules, "*": _with_settings(source, settings)}, {}
    try:
        source = brevact.Policy(source) if parts else source
        policy = NamedPolicy(words, source, settings)
        policy.apply(nn.Sequential(nn.Linear(1, 1)))
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{words}: {error}") from error
    return policy


def _source(words: str) -> tuple[Any, dict[str, Any]]:
    """The policy of a name, and its settings."""
    name, separator, _ = words.partition(":")
    if name == "None":
        if separator:
            raise argparse.ArgumentTypeError(f"{words}: full precision has no settings; leave them out")
        return None, {}
    try:
        return quantizer_of(words)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; None is full precision") from error


def _with_settings(source: Any, settings: dict[str, Any]) -> Any:
    return source.let(**settings) if settings else source
