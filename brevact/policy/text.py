"""Policies as text, wherever a policy is accepted: names, settings, budgets and the path of a file.

Names are looked up in closed lists, and values are literals: words from a stranger run no code.
"""

from __future__ import annotations

import ast
import difflib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dependencies.exceptions import DependencyError

from brevact.injectors import backward_settings_from
from brevact.policy.files import LEAVES, setting_of
from brevact.policy.presets import CONV_NET, DEFAULT, RECOMPUTE, TRANSFORMER, Policy
from brevact.quantizers.brief import brief

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_NUMBER = r"\d+\.?\d*(?:e-?\d+)?|\.\d+(?:e-?\d+)?"
_POLICIES = {"CONV_NET": CONV_NET, "DEFAULT": DEFAULT, "RECOMPUTE": RECOMPUTE, "TRANSFORMER": TRANSFORMER}
#: Backward quantizers and policies of the package, by name.
KNOWN: Mapping[str, Any] = {**LEAVES, **_POLICIES}


def named(name: str) -> Any:
    found = KNOWN.get(name, _POLICIES.get(name.upper()))
    if found is None:
        small = {each.lower(): each for each in KNOWN}
        near = [small[each] for each in difflib.get_close_matches(name.lower(), small, n=3, cutoff=0.4)]
        near = near or sorted(KNOWN)[:3]
        raise ValueError(
            f"{name} is not a backward quantizer or policy of brevact; nearest: {', '.join(near)} "
            f"({len(KNOWN)} are known)"
        )
    return found


def settings_of(words: Sequence[str]) -> dict[str, Any]:
    """Return quantizer settings by name: Python literals, dtypes or plain words. Other forms raise a ValueError."""
    found = {}
    for each in words:
        name, separator, value = each.partition("=")
        if not separator or not name.isidentifier() or name.startswith("__"):
            raise ValueError(f"{each!r} is not of the form setting=value, such as bucket_size=256")
        found[name] = _literal(value)
    return found


def with_settings(source: Any, settings: Mapping[str, Any]) -> Any:
    try:
        if isinstance(source, Policy):
            rules: Mapping[Any, Any] = source.rules
            return Policy({key: leaf and leaf.let(**settings) for key, leaf in rules.items()})
        changed = source.let(**settings)
        backward_settings_from(changed)
    except DependencyError as error:
        raise ValueError(str(error)) from error
    return changed


def budget_of(words: str) -> dict[str, float] | None:
    """Return the arguments of ``brevact.fit`` for words, or None if they are no budget."""
    budget: dict[str, float] = {}
    for each in words.split():
        found = _one_budget(each)
        if found is None:
            return None
        if budget.keys() & found.keys():
            raise ValueError(f"{words}: {each} says {next(iter(found))} a second time; accepted is one of each")
        budget |= found
    return budget or None


def _one_budget(words: str) -> dict[str, float] | None:
    found = re.fullmatch(rf"(noise=|time=|)([-+]?(?:{_NUMBER}))([A-Za-z]*)", words)
    if found is None:
        return None
    prefix, number, unit = found[1], float(found[2]), found[3]
    accepted = ("",) if prefix else ("x", *_UNITS)
    size = number * _UNITS.get(unit, 1)
    if not 0 < size < math.inf or (unit == "B" and size < 1):
        raise ValueError(f"{words}: got {size:g}; accepted is a number above 0, and at least 1 byte")
    if unit not in accepted:
        raise ValueError(f"{words}: a budget is written 24x, 512MiB ({', '.join(_UNITS)}), noise=0.05 or time=1.15")
    if prefix:
        return {prefix.removesuffix("="): number}
    return {"ratio": number} if unit == "x" else {"saved_bytes": int(size)}


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # the last two for deep brackets
        return setting_of(text)


_ACCEPTED = (
    'accepted are "default", "none" for full precision, a backward quantizer or policy such as "StochBackward2bit" or '
    '"StochBackward4bit:bucket_size=256", a budget such as "24x", "512MiB", "noise=0.05" or '
    '"60x time=1.2", and the path of a JSON file'
)
_FULL_PRECISION = Policy({"": None})


def read_policy(text: str | os.PathLike[str], argument: str = "policy") -> tuple[Any, Mapping[str, float]]:
    """Return the backward quantizer or policy that a text names; or None and arguments of `brevact.fit`."""
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
        name, separator, rest = words.partition(":")
        source = named(name)
        return (with_settings(source, settings_of(rest.split(","))) if separator else source), {}
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
