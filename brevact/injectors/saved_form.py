"""Backward quantizers as plain JSON values, and back: the name of a shipped one (``StochBackward2bit``), and settings.

Nothing else is looked up, and no name is imported.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
from collections.abc import Mapping
from typing import Any

import torch

from brevact import quant
from brevact.autograd import BackwardSettings
from brevact.injectors.class_protocol import InjectorClass
from brevact.injectors.injector_type import FORWARD_PREFIX, BackwardInjectorType
from brevact.injectors.resolve import BackwardQuantizer, backward_settings_from
from brevact.quantizers.brief import brief

#: The backward quantizers of this package.
LEAVES: dict[str, InjectorClass] = {
    name: each for name, each in vars(quant).items() if isinstance(each, BackwardInjectorType)
}
_KINDS: set[Any] = {BackwardSettings, *(type(leaf.quantizer) for leaf in LEAVES.values())}
_ENUMS: dict[str, type[enum.Enum]] = {
    type(field.default).__name__: type(field.default)
    for kind in _KINDS
    for field in dataclasses.fields(kind)
    if isinstance(field.default, enum.Enum)
}


def to_plain(source: BackwardQuantizer | None) -> dict[str, Any]:
    """Return a backward quantizer as its name and the settings that differ from that name's."""
    if source is None:
        return {"quantizer": None}
    mro = source.__mro__ if isinstance(source, BackwardInjectorType) else ()
    origin = next((base for base in mro if LEAVES.get(base.__name__) is base), None)
    if origin is None:
        raise _refusal(source, "it derives from no quantizer of brevact")
    names = [name for name in sorted(origin._setting_names()) if not name.startswith(FORWARD_PREFIX)]
    changed = {name: getattr(source, name) for name in names if getattr(source, name) != getattr(origin, name)}
    plain: dict[str, Any] = {"quantizer": origin.__name__}
    if changed:
        plain["settings"] = {name: _written(name, value) for name, value in changed.items()}
    if backward_settings_from(from_plain(plain)) != backward_settings_from(source):
        raise _refusal(source, f"it differs from {origin.__name__} in more than settings")
    return plain


def from_plain(plain: Mapping[str, Any]) -> Any:
    """Return the backward quantizer that :func:`to_plain` wrote; None for full precision."""
    name, given = plain["quantizer"], plain.get("settings", {})
    if not isinstance(given, dict):
        raise TypeError(f"settings: got {brief(given)}; accepted is an object with a value for each name")
    if name is None:
        if given:
            raise ValueError(f"settings: got {brief(given)} for full precision, which has none; leave them out")
        return None
    if not isinstance(name, str) or name not in LEAVES:
        near = difflib.get_close_matches(str(name), LEAVES, n=3, cutoff=0.4)
        hint = f"nearest: {', '.join(near)}; " if near else ""
        raise ValueError(
            f"quantizer {brief(name)} is not known here; {hint}accepted are backward quantizers of brevact, such as "
            "StochBackward8bit, and null for full precision"
        )
    settings = {key: _read(value) for key, value in given.items()}
    backward_settings_from(LEAVES[name], **settings)  # refuses unknown settings and values out of range
    return LEAVES[name].let(**settings) if settings else LEAVES[name]


def _written(name: str, value: Any) -> Any:
    kind = type(value)
    if isinstance(value, enum.Enum) and _ENUMS.get(kind.__name__) is kind:
        return f"{kind.__name__}.{value.name}"
    if isinstance(value, torch.dtype):
        return str(value)
    if value is None or (kind in (bool, int, float, str) and _read(value) == value):
        return value
    raise _refusal(value, f"as setting {name} it is no number, string, dtype or option of brevact")


def _read(value: Any) -> Any:
    if isinstance(value, list | dict):
        raise TypeError(f"settings: got {brief(value)}; accepted are numbers, strings and null")
    if isinstance(value, str):
        kind, _, member = value.partition(".")
        if kind in _ENUMS and member in _ENUMS[kind].__members__:
            return _ENUMS[kind][member]
        if kind == "torch" and isinstance(getattr(torch, member, None), torch.dtype):
            return getattr(torch, member)
    return value


def _refusal(value: Any, why: str) -> TypeError:
    return TypeError(
        f"{brief(value)} of type {type(value).__name__} cannot be saved: {why}; accepted are backward quantizers of "
        "brevact, with settings: StochBackward2bit.let(bucket_size=128)"
    )
