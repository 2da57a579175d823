"""Overrides beside rules: only ``double_backward``, as a gradient is differentiated again through the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brevact.injectors import DitherBackward4bit, backward_settings_from
from brevact.injectors.saved_form import LEAVES
from brevact.policy.presets import DEFAULT
from brevact.quantizers.brief import brief


def refuse_overrides(policy: Any, overrides: Mapping[str, Any], call: str = "") -> None:
    """Raise a TypeError if a policy of several quantizers gets overrides; ``call`` begins the suggested call."""
    if not overrides:
        return
    fix = "in rules, put them on a rule's value: StochBackward2bit.let(bucket_size=128)"
    if policy is DEFAULT:
        others = {"bit_width" if name == "bits" else name: value for name, value in overrides.items()}
        backward_settings_from(DitherBackward4bit, **others)  # invalid ones raise their own error
        leaf = LEAVES.get(f"DitherBackward{others.get('bit_width', 4)}bit", DitherBackward4bit)
        if leaf.bit_width == others.get("bit_width"):
            del others["bit_width"]
        settings = "".join(f", {name}={brief(value)}" for name, value in others.items())
        fix = f"name one: {call}brevact.{leaf.__name__}{settings})"
    raise TypeError(f"{', '.join(overrides)}: overrides go with a single quantizer; {fix}")


def check_overrides_of_rules(policy: Any, overrides: Mapping[str, Any], call: str) -> None:
    """Raise like :func:`refuse_overrides`, unless the overrides apply to all quantizers."""
    refuse_overrides(policy, {name: value for name, value in overrides.items() if name != "double_backward"}, call)
