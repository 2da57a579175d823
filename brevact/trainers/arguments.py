"""Arguments of a run's policy that may be text, and what they refuse."""

from __future__ import annotations

import os
from typing import Any

from torch import distributed, nn

from brevact.bit_widths.spec import PolicySpec, parse_policy
from brevact.policy.presets import DEFAULT
from brevact.policy.words import settings_of
from brevact.quantizers.brief import brief


def check_steps(**intervals: Any) -> None:
    """Raise a ValueError for numbers of steps that are neither None nor at least 1."""
    for name, steps in intervals.items():
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise ValueError(f"{name}={brief(steps)}; accepted is an integer of at least 1, or None")


def spec_of(policy: Any) -> PolicySpec | None:
    """Return what a policy is, as text where it was one; None for the policy that a model has."""
    if policy is None:
        return None
    if isinstance(policy, PolicySpec):
        return policy
    if isinstance(policy, str | os.PathLike):
        return parse_policy(policy)
    if policy is DEFAULT:
        return PolicySpec("default", policy)
    return PolicySpec(brief(policy), policy)


def mix_of(words: str) -> tuple[str, dict[str, Any]]:
    """Return kind and settings of a schedule of mixing probabilities.

    >>> mix_of("cosine:start=0.9,end=0.1")
    ('cosine', {'start': 0.9, 'end': 0.1})

    Raises:
        TypeError: it is no text.
        ValueError: a setting is not known.
    """
    if not isinstance(words, str):
        raise TypeError(
            f"mix_schedule={brief(words)} of type {type(words).__name__}; accepted is a text: "
            '"cosine:start=0.9,end=0.1"'
        )
    kind, separator, rest = words.partition(":")
    settings = settings_of(rest.split(",")) if separator else {}
    accepted = ("start", "end", "steps", "stairs")
    for name in settings:
        if name not in accepted:
            raise ValueError(f"mix_schedule={words!r}: {name} is not known; accepted are {', '.join(accepted)}")
    return kind, settings


def refuse_to_fit(model: nn.Module) -> None:
    """Raise where a model talks to other processes, which one process alone cannot measure."""
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    if several and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise ValueError(
            "policy: a budget is fitted in one process, where SyncBatchNorm waits for the others; fit it in a run of "
            'one process, save it with policy.save("policy.json"), and pass "policy.json"'
        )
