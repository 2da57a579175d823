"""Policies as text, wherever a policy is accepted: names, the path of a file, and budgets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from brevact.policy.presets import Policy
from brevact.policy.words import budget_of, quantizer_of, with_settings
from brevact.quantizers.brief import brief

_ACCEPTED = (
    'accepted are "default", "none" for full precision, a backward quantizer or policy such as "StochBackward2bit" or '
    '"StochBackward4bit:bucket_size=256", a budget such as "24x", "512MiB", "peak=2GiB", "noise=0.05" or '
    '"60x time=1.2", and the path of a JSON file'
)
_FULL_PRECISION = Policy({"": None})


def read_policy(text: str | os.PathLike[str], argument: str = "policy") -> tuple[Any, Mapping[str, float]]:
    """Return the backward quantizer or the policy that a text names; or None and a budget, arguments of `brevact.fit`.

    Raises an OSError for a missing file, a TypeError if it is no text, a ValueError if it is none of these; errors call
    the text by ``argument``.

    >>> read_policy("24x"), read_policy("StochBackward2bit")[0].__name__
    ((None, {'ratio': 24.0}), 'StochBackward2bit')
    """
    if not isinstance(text, str | os.PathLike):
        raise TypeError(f"{argument}: got {brief(text)} of type {type(text).__name__}; {_ACCEPTED}")
    words = os.fsdecode(text).strip()
    if words.endswith(".json"):
        return Policy.load(words), {}
    if words.lower() == "none":
        return _FULL_PRECISION, {}
    try:
        budget = budget_of(words)
        if budget is not None:
            return None, budget
        source, settings = quantizer_of(words)
        return (with_settings(source, settings) if settings else source), {}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{argument} {brief(words)}: {error}; {_ACCEPTED}") from error


@dataclass(frozen=True)
class PolicyText:
    """A parsed policy text; :class:`brevact.PolicySpec` documents the fields."""

    text: str
    source: Any
    budget: Mapping[str, float] = field(default_factory=dict)


def named_policy(policy: Any, argument: str = "policy") -> Any:
    """Return a text's policy, any other policy unchanged; a ValueError for a budget, which needs batches and a loss."""
    if isinstance(policy, PolicyText):
        words, source, budget = policy.text, policy.source, policy.budget
    elif isinstance(policy, str | os.PathLike):
        source, budget = read_policy(policy, argument)
        words = os.fsdecode(policy).strip()
    else:
        return policy
    if budget:
        given = ", ".join(f"{name}={value!r}" for name, value in budget.items())
        raise ValueError(
            f"{argument} {words!r} is a budget, which is fitted on batches and a loss: "
            f"policy = brevact.fit(model, batches, loss, {given}), then pass that policy; or give the budget to the "
            f"callback of a trainer: brevact.trainers.HuggingFaceCallback({words!r})"
        )
    return source
