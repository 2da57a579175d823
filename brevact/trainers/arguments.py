"""Parse and check the arguments of a run's policy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from brevact.arguments import check_count, check_state
from brevact.bit_widths.spec import PolicySpec, parse_policy
from brevact.policy.mixing import checked_plan
from brevact.policy.presets import DEFAULT, Policy
from brevact.policy.text import settings_of
from brevact.quantizers.brief import brief
from brevact.reports.gradient_passes import check_loss
from brevact.trainers.batches import has_others


def check_steps(**intervals: Any) -> None:
    """Raise unless numbers of steps are None or at least 1."""
    for name, steps in intervals.items():
        if steps is not None:
            check_count(name, steps, more=", or None")


def check_run(batches: Any, loss: Any) -> None:
    """Raise a TypeError unless batches are iterable and the loss is a function or None."""
    if not isinstance(batches, Iterable):
        raise TypeError(
            f"batches: got {brief(batches)} of type {type(batches).__name__}; accepted is a data loader or a list"
        )
    if loss is not None:
        check_loss(loss)


def check_values(state: Any, own: Mapping[str, Any]) -> None:
    """Raise a TypeError or a ValueError unless this is a training policy's own state."""
    check_state(state, own)
    for name in ("steps", "noise_count"):
        check_count(f"state: {name}", state[name], 0)
    for name, kinds, accepted in (("noise", (int, float), "a number"), ("rules", str, "JSON text of a policy")):
        if state[name] is not None and (isinstance(state[name], bool) or not isinstance(state[name], kinds)):
            raise TypeError(f"state: {name}={brief(state[name])}; accepted is {accepted}, or None")
    if state["rules"] is not None:
        Policy.from_json(state["rules"])  # raises unless valid


def spec_of(policy: Any) -> PolicySpec | None:
    """Return a policy's spec, parsed if it is text; None for the policy that a model has."""
    if policy is None:
        return None
    if isinstance(policy, PolicySpec):
        return policy
    if isinstance(policy, str | os.PathLike):
        return parse_policy(policy)
    if policy is DEFAULT:
        return PolicySpec("default", policy)
    if not isinstance(policy, Policy):
        Policy(policy if isinstance(policy, Mapping) else {"*": policy})  # raises unless valid
    text = brief(policy.rules if isinstance(policy, Policy) else policy)
    return PolicySpec(re.sub(r" at 0x[0-9a-f]+", "", text), policy)  # the same in the process that resumes


def mix_of(words: str) -> tuple[str, dict[str, Any]]:
    """Return kind and settings of a schedule of mixing probabilities; raises a TypeError or a ValueError.

    >>> mix_of("cosine:start=0.9,end=0.1")
    ('cosine', {'start': 0.9, 'end': 0.1})
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
    try:
        checked_plan({"start": 0.0, "end": 0.0, "steps": 1, "stairs": 4, **settings, "kind": kind})
    except ValueError as error:
        raise ValueError(f"mix_schedule={words!r}: {error}") from error
    return kind, settings


def refuse_to_fit(model: nn.Module) -> None:
    """Raise a ValueError for SyncBatchNorm in a distributed run: a single process cannot measure it."""
    if has_others() and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise ValueError(
            "policy: a budget is fitted in one process, where SyncBatchNorm waits for the others; fit it in a run of "
            'one process, save it with policy.save("policy.json"), and pass "policy.json"'
        )
