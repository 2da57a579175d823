"""Overrides beside rules: only ``double_backward``, as a gradient is differentiated again through the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from brevact.injectors import DitherBackward4bit, backward_settings_from
from brevact.injectors.saved_form import LEAVES
from brevact.policy.presets import DEFAULT
from brevact.quantizers.brief import brief


def of_all_rules(policy: Any, overrides: Mapping[str, Any], call: str) -> dict[str, Any]:
    """Return the overrides that apply to all quantizers of a policy; raises like :func:`refuse_overrides`."""
    refuse_overrides(policy, {name: value for name, value in overrides.items() if name != "double_backward"}, call)
    return dict(overrides)


def refuse_overrides(policy: Any, overrides: Mapping[str, Any], call: str) -> None:
    """Raise a TypeError if a policy of several quantizers gets overrides; ``call`` begins the suggested call."""
    if overrides:
        fix = (
            f"name one: {call}{_quantizer_with(overrides)})"
            if policy is DEFAULT
            else "in rules, put them on a rule's value: StochBackward2bit.let(bucket_size=128)"
        )
        raise TypeError(f"{', '.join(overrides)}: overrides go with a single quantizer; {fix}")


def _quantizer_with(overrides: Mapping[str, Any]) -> str:
    """Return the arguments of a call that names a quantizer with these settings; invalid ones raise their own error."""
    others = {"bit_width" if name == "bits" else name: value for name, value in overrides.items()}
    backward_settings_from(DitherBackward4bit, **others)
    leaf = LEAVES.get(f"DitherBackward{others.get('bit_width', 4)}bit", DitherBackward4bit)
    if leaf.bit_width == others.get("bit_width"):
        del others["bit_width"]
    return ", ".join([f"brevact.{leaf.__name__}", *(f"{name}={brief(value)}" for name, value in others.items())])
