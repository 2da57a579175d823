"""Policies as readable JSON: how they are written, and which files are accepted.

A file holds the package's version, rules in their order, and the layers that a fitted policy is for:

    {"brevact": "0.2.0",
     "rules": [{"types": ["torch.nn.LayerNorm"], "quantizer": "StochBackward4bit", "settings": {"bucket_size": 128}},
               {"name": "*", "quantizer": "StochBackward2bit"}]}

Names in it are looked up in closed lists: a file from a stranger runs no code.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import types
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from brevact import quant
from brevact.autograd import BackwardSettings
from brevact.autograd.region.rows import OP_NAMES
from brevact.injectors.class_protocol import InjectorClass
from brevact.injectors.injector_type import FORWARD_PREFIX, BackwardInjectorType
from brevact.injectors.resolve import BackwardQuantizer, backward_settings_from
from brevact.policy.fit_report import FitReport
from brevact.policy.predicates import OF_MODELS, is_norm, is_rectified
from brevact.policy.rules import are_module_types, ops_of
from brevact.private_names.of_brevitas import IS_INSTALLED, MISSING
from brevact.quantizers.brief import brief, did_you_mean

if IS_INSTALLED:
    import brevitas.nn as qnn

    import brevact.nn as bnn


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
    settings = {key: setting_of(value) for key, value in given.items()}
    backward_settings_from(LEAVES[name], **settings)  # refuses unknown settings and values out of range
    return LEAVES[name].let(**settings) if settings else LEAVES[name]


def _written(name: str, value: Any) -> Any:
    kind = type(value)
    if isinstance(value, enum.Enum) and _ENUMS.get(kind.__name__) is kind:
        return f"{kind.__name__}.{value.name}"
    if isinstance(value, torch.dtype):
        return str(value)
    if value is None or (kind in (bool, int, float, str) and setting_of(value) == value):
        return value
    raise _refusal(value, f"as setting {name} it is no number, string, dtype or option of brevact")


def setting_of(value: Any) -> Any:
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


def _types() -> dict[str, type[nn.Module]]:
    within = {"torch.nn": nn, **({"brevitas.nn": qnn, "brevact.nn": bnn} if IS_INSTALLED else {})}
    inner = [each for each in vars(nn.modules).values() if isinstance(each, types.ModuleType)]
    within |= {each.__name__: each for each in inner}
    found: dict[str, type[nn.Module]] = {}
    for place, module in within.items():
        for name, kind in vars(module).items():
            if isinstance(kind, type) and issubclass(kind, nn.Module) and kind not in found.values():
                found[f"{place}.{name}"] = kind
    return found


#: By public path; base classes such as `_ConvNd` by their module's path.
LAYER_TYPES: dict[str, type[nn.Module]] = _types()


#: Functions of a name and a module, by their public path.
PREDICATES: dict[str, Callable[[str, nn.Module], bool]] = {
    f"brevact.policy.predicates.{each.__name__}": each for each in (is_norm, is_rectified, *OF_MODELS)
}
#: Fields for a rule's subject.
FIELDS = ("name", "types", "functions", "predicate")


def key_to_plain(key: Any) -> dict[str, Any]:
    """Return a rule's key as a field and its value: ``{"types": ["torch.nn.Conv2d"]}``."""
    if isinstance(key, str):
        return {"name": key}
    if ops_of(key):
        ops = list(ops_of(key))
        if not _FUNCTIONS.keys() >= {*ops}:
            raise TypeError(
                f"policy rule {', '.join(ops)} cannot be saved: a file names torch functions alone, so that it runs "
                "no code; add the rule after loading: Policy.load(path).let({MyFunction: quantizer})"
            )
        return {"functions": ops}
    if are_module_types(key):
        names = {kind: name for name, kind in LAYER_TYPES.items()}
        kinds = key if isinstance(key, tuple) else (key,)
        for kind in kinds:
            if kind not in names:
                raise TypeError(
                    f"policy rule {kind.__module__}.{kind.__qualname__} cannot be saved: a file names types of "
                    "torch.nn, brevitas.nn and brevact.nn alone, so that it runs no code; write name patterns in its "
                    "place: {name: quantizer for name, module in model.named_modules() if isinstance(module, "
                    f"{kind.__name__})}}"
                )
        return {"types": [names[kind] for kind in kinds]}
    for name, predicate in PREDICATES.items():
        if key is predicate:
            return {"predicate": name}
    raise TypeError(
        f"policy rule {getattr(key, '__qualname__', brief(key))} is a function of yours, which a file cannot hold; "
        f"accepted functions are {', '.join(PREDICATES)}; write name patterns in its place: "
        "{name: quantizer for name, module in model.named_modules() if rule(name, module)}"
    )


def key_from_plain(entry: Mapping[str, Any]) -> Any:
    given = [field for field in FIELDS if field in entry]
    if len(given) != 1:
        raise ValueError(f"got {', '.join(given) or 'none'} of {', '.join(FIELDS)}; accepted is exactly one")
    (field,) = given
    value = entry[field]
    if field in ("name", "predicate") and isinstance(value, str):
        return value if field == "name" else _find(value, PREDICATES, "predicate")
    if field in ("types", "functions") and isinstance(value, list) and value:
        known = LAYER_TYPES if field == "types" else _FUNCTIONS
        found = tuple(_find(each, known, field.removesuffix("s")) for each in value)
        return found if len(found) > 1 else found[0]
    accepted = "a string" if field in ("name", "predicate") else "a list of names"
    raise TypeError(f"{field}: got {brief(value)} of type {type(value).__name__}; accepted is {accepted}")


def _functions() -> dict[str, Callable]:
    """Return a torch function for each op, preferably one with the op's own name."""
    found: dict[str, Callable] = {}
    for func, op in OP_NAMES.items():
        if op not in found or func.__name__ == op != found[op].__name__:
            found[op] = func
    return found


_FUNCTIONS = _functions()


def _find(name: Any, known: Mapping[str, Any], what: str) -> Any:
    if isinstance(name, str) and name in known:
        return known[name]
    if not IS_INSTALLED and str(name).startswith(("brevitas.", "brevact.nn.")):
        raise ImportError(f"{what} {name} {MISSING}")
    by_last: dict[str, str] = {each.rpartition(".")[2]: each for each in known}
    near = difflib.get_close_matches(str(name).rpartition(".")[2], by_last, n=3, cutoff=0.4) or sorted(by_last)[:3]
    fix = "; add rules for Functions after loading: Policy.load(path).let({MyFunction: quantizer})"
    raise ValueError(
        f"{what} {brief(name)} is not known here; nearest: {', '.join(by_last[each] for each in near)}"
        f"{fix if what == 'function' else ''}"
    )


_TOP = ("brevact", "rules", "layers", "report")
_OF_RULES = (*FIELDS, "quantizer", "settings")


def written(rules: Mapping[Any, Any], layers: Mapping[str, str] | None, report: FitReport | None, version: str) -> str:
    """Return a policy's file text; raises a TypeError for a user's own key or quantizer, which a file cannot name."""
    plain: dict[str, Any] = {"brevact": version}
    plain["rules"] = entries = []
    for key, source in rules.items():
        subject = key_to_plain(key)
        try:
            entries.append({**subject, **to_plain(source)})
        except TypeError as error:
            raise TypeError(f"policy rule {json.dumps(subject)}: {error}") from error
    if layers is not None:
        plain["layers"] = dict(layers)
    if report is not None:
        plain["report"] = asdict(report)
    return json.dumps(plain, indent=1) + "\n"


def read(text: str, source: str, version: str) -> tuple[Any, ...]:
    try:
        content = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} holds no policy: {error}; Policy.save writes one") from error
    if not isinstance(content, dict) or not {"brevact", "rules"} <= {*content}:
        raise ValueError(f"{source} holds no policy: {brief(content)}; Policy.save writes one")
    of_other = content["brevact"] != version
    note = f" (written by brevact {content['brevact']}; this is {version})" if of_other else ""
    try:
        _check_fields(content, _TOP)
        report = content.get("report")
        report = None if report is None else FitReport.from_plain(report)
        layers = content.get("layers")
        if not (layers is None or (isinstance(layers, dict) and all(isinstance(x, str) for x in layers.values()))):
            raise TypeError(f"layers: got {brief(layers)}; accepted is an object of kinds of modules by name")
        return _rules(content["rules"]), layers, report
    except (TypeError, ValueError) as error:
        raise ValueError(f"{source}{note}: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} stands in one object twice")
    return found


def _rules(entries: Any) -> dict[Any, Any]:
    if not isinstance(entries, list):
        raise TypeError(f"rules: got {brief(entries)}; accepted is a list")
    rules: dict[Any, Any] = {}
    for number, entry in enumerate(entries, 1):
        try:
            if not isinstance(entry, dict) or "quantizer" not in entry:
                raise TypeError(f'got {brief(entry)}; accepted is an object with "quantizer" and one of {FIELDS}')
            _check_fields(entry, _OF_RULES)
            key, source = key_from_plain(entry), from_plain(entry)
        except (TypeError, ValueError) as error:
            raise ValueError(f"rule {number}: {error}") from error
        if key in rules:
            raise ValueError(f"rule {number}: an earlier rule is for the same; leave one of them out")
        rules[key] = source
    return rules


def _check_fields(entry: Mapping[str, Any], accepted: tuple[str, ...]) -> None:
    for name in entry:
        if name not in accepted:
            raise ValueError(f"unknown field {name!r}; {did_you_mean(name, accepted)}Accepted: {', '.join(accepted)}")
