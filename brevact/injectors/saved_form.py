"""Backward quantizers as plain JSON values, and back: a name of a closed list, and settings.

A name is a shipped quantizer (``StochBackward2bit``), a Brevitas activation quantizer
(``brevitas.quant.Int8ActPerTensorFloat``), a class of quantizer objects (``UniformQuantizer``), or ``BackwardSettings``
for full precision with other settings for some ops. Nothing else is looked up, and no name is imported.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
from collections.abc import Mapping
from typing import Any

import torch

from brevact import quant
from brevact.autograd import BackwardSettings
from brevact.injectors.brevitas_quantizer import BrevitasQuantizer, is_act_quantizer
from brevact.injectors.class_protocol import InjectorClass, added_values, brevitas_enums, brevitas_quant
from brevact.injectors.injector_type import FORWARD_PREFIX, BackwardInjectorType
from brevact.injectors.resolve import BackwardQuantizer, backward_settings_from
from brevact.private_names.of_brevitas import IS_INSTALLED, MISSING
from brevact.quantizers.brief import brief

#: Prefix of Brevitas' quantizer names.
BREVITAS = "brevitas.quant."
#: Name of no quantizer, where some ops have settings of their own.
NO_QUANTIZER = "BackwardSettings"
#: The backward quantizers of this package.
LEAVES: dict[str, InjectorClass] = {
    name: each for name, each in vars(quant).items() if isinstance(each, BackwardInjectorType)
}
#: Classes of quantizer objects.
OBJECTS: dict[str, type] = {type(leaf.quantizer).__name__: type(leaf.quantizer) for leaf in LEAVES.values()}
_ENUMS: dict[str, type[enum.Enum]] = {
    kind.__name__: kind
    for kind in (
        *(each for each in vars(brevitas_enums).values() if isinstance(each, type)),
        *(type(field.default) for each in (BackwardSettings, *OBJECTS.values()) for field in dataclasses.fields(each)),
    )
    if issubclass(kind, enum.Enum)
}
_OF_OPS = "of_functions"


@functools.cache
def _of_brevitas_quant() -> dict[str, InjectorClass]:
    """Brevitas' activation quantizers by name; looked up only when a policy is saved or loaded."""
    return {f"{BREVITAS}{name}": each for name, each in vars(brevitas_quant).items() if is_act_quantizer(each)}


def to_plain(source: BackwardQuantizer | None) -> dict[str, Any]:
    """Return a backward quantizer as its name and the settings that differ from that name's.

    >>> from brevact.injectors import StochBackward2bit
    >>> to_plain(StochBackward2bit.let(bucket_size=128))
    {'quantizer': 'StochBackward2bit', 'settings': {'bucket_size': 128}}
    """
    if source is None:
        return {"quantizer": None}
    settings = backward_settings_from(source)
    if isinstance(source, BackwardInjectorType):
        plain = _of_leaf(source)
        if plain is not None and backward_settings_from(from_plain(plain)) == settings:
            return plain
    if isinstance(source, BackwardInjectorType) or not is_act_quantizer(source):
        plain = _of_settings(settings)
    else:
        plain = _of_brevitas(source)
    return plain


def from_plain(plain: Mapping[str, Any]) -> Any:
    """Return the backward quantizer that :func:`to_plain` wrote; None for full precision.

    >>> from_plain({"quantizer": "StochBackward2bit", "settings": {"bucket_size": 128}}).bucket_size
    128
    """
    name, given = plain["quantizer"], plain.get("settings", {})
    if not isinstance(given, dict):
        raise TypeError(f"settings: got {brief(given)}; accepted is an object with a value for each name")
    settings = {key: _read(value) for key, value in given.items() if key != _OF_OPS}
    if name is None:
        if given:
            raise ValueError(f"settings: got {brief(given)} for full precision, which has none; leave them out")
        return None
    leaf = _known(name)
    if leaf in OBJECTS.values() or leaf is None:
        quantizer = None if leaf is None else leaf()
        built = BackwardSettings(quantizer, of_functions=_read_ops(given.get(_OF_OPS, [])))
        return backward_settings_from(built, **settings)
    if _OF_OPS in given:
        raise ValueError(f"settings: {_OF_OPS} goes with a class of quantizers ({', '.join(OBJECTS)}), not with {name}")
    backward_settings_from(leaf, **settings)  # refuses unknown settings and values out of range
    return leaf.let(**settings) if settings else leaf


def _known(name: Any) -> Any:
    """Return the injector class or quantizer-object class of a name, or None for no quantizer."""
    known = LEAVES | _of_brevitas_quant() | OBJECTS | {NO_QUANTIZER: None}
    if isinstance(name, str) and name in known:
        return known[name]
    if not IS_INSTALLED and str(name).startswith(BREVITAS):
        raise ImportError(f"quantizer {name} {MISSING}")
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.4)
    hint = f"nearest: {', '.join(near)}; " if near else ""
    raise ValueError(
        f"quantizer {brief(name)} is not known here; {hint}accepted are backward quantizers of brevact, activation "
        f"quantizers of brevitas.quant ({BREVITAS}Int8ActPerTensorFloat), {', '.join(OBJECTS)}, and null for full "
        "precision"
    )


def _of_leaf(source: InjectorClass) -> dict[str, Any] | None:
    """Return a quantizer derived from a shipped one as that one's name and the changed settings, None for any other."""
    origin = next((base for base in source.__mro__ if LEAVES.get(base.__name__) is base), None)
    if origin is None:
        return None
    names = [name for name in sorted(origin._setting_names()) if not name.startswith(FORWARD_PREFIX)]
    changed = {name: getattr(source, name) for name in names if getattr(source, name) != getattr(origin, name)}
    try:
        return _plain(origin.__name__, changed)
    except TypeError:
        return None


def _of_brevitas(source: InjectorClass, of_region: Mapping[str, Any] | None = None) -> dict[str, Any]:
    names = {each: name for name, each in _of_brevitas_quant().items()}
    changed: dict[str, Any] = {}
    origin = source
    while origin not in names:
        if len(origin.__bases__) != 1:
            raise _refusal(source, "it derives from none of brevitas.quant alone")
        changed = {**added_values(origin), **changed}
        (origin,) = origin.__bases__
    return _plain(names[origin], {**changed, **(of_region or {})})


def _of_settings(settings: BackwardSettings) -> dict[str, Any]:
    quantizer = settings.quantizer
    changed = _changed(settings)
    if isinstance(quantizer, BrevitasQuantizer) and not settings.of_functions:
        return _of_brevitas(quantizer.source, changed)
    if quantizer is None:
        name = NO_QUANTIZER
    else:
        name = type(quantizer).__name__
        if OBJECTS.get(name) is not type(quantizer):
            raise _refusal(quantizer, "its class is not one of brevact's")
        changed = {**_changed(quantizer), **changed}
    plain = _plain(name, changed)
    if settings.of_functions:
        of_ops = [{"op": op, **to_plain(each)} for op, each in settings.of_functions]
        plain["settings"] = {**plain.get("settings", {}), _OF_OPS: of_ops}
    return plain


def _changed(value: Any) -> dict[str, Any]:
    fields = {field.name: field.default for field in dataclasses.fields(value) if field.init}
    own = {name: getattr(value, name) for name in fields if name not in ("quantizer", _OF_OPS)}
    return {name: each for name, each in own.items() if each != fields[name]}


def _read_ops(pairs: Any) -> tuple[tuple[str, BackwardSettings | None], ...]:
    is_list = isinstance(pairs, list) and all(isinstance(each, dict) for each in pairs)
    if not is_list or not all({"op", "quantizer"} <= {*each} for each in pairs):
        raise TypeError(f'{_OF_OPS}: got {brief(pairs)}; accepted is a list of objects with "op" and "quantizer"')
    sources = [(each["op"], from_plain(each)) for each in pairs]
    return tuple((op, None if source is None else backward_settings_from(source)) for op, source in sources)


def _plain(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    written = {key: _written(key, value) for key, value in settings.items()}
    return {"quantizer": name, "settings": written} if written else {"quantizer": name}


def _written(name: str, value: Any) -> Any:
    kind = type(value)
    if isinstance(value, enum.Enum) and _ENUMS.get(kind.__name__) is kind:
        return f"{kind.__name__}.{value.name}"
    if isinstance(value, torch.dtype):
        return str(value)
    if kind in (tuple, list):
        return [_written(name, item) for item in value]
    if value is None or (kind in (bool, int, float, str) and _read(value) == value):
        return value
    raise _refusal(value, f"as setting {name} it is no number, string, dtype, tuple or option of brevact or Brevitas")


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_read, value))
    if isinstance(value, dict):
        raise TypeError(f"settings: got {brief(value)}; accepted are numbers, strings, null and lists of them")
    if isinstance(value, str):
        kind, _, member = value.partition(".")
        if kind in _ENUMS and member in _ENUMS[kind].__members__:
            return _ENUMS[kind][member]
        if kind == "torch" and isinstance(getattr(torch, member, None), torch.dtype):
            return getattr(torch, member)
    return value


def _refusal(value: Any, why: str) -> TypeError:
    return TypeError(
        f"{brief(value)} of type {type(value).__name__} cannot be saved: {why}; accepted are the quantizers of brevact "
        "and brevitas.quant, with settings: StochBackward2bit.let(bucket_size=128)"
    )
