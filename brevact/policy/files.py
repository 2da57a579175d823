"""Policies as readable JSON: how they are written, and which files are accepted.

A file holds the package's version, rules in their order, and the layers that a fitted policy is for:

    {"brevact": "0.1.0",
     "rules": [{"types": ["torch.nn.LayerNorm"], "quantizer": "StochBackward4bit", "settings": {"bucket_size": 128}},
               {"name": "*", "quantizer": "StochBackward2bit"}]}

Names in it are looked up in closed lists: a file from a stranger runs no code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from brevact.injectors.saved_form import from_plain, to_plain
from brevact.policy.fit_report import FitReport
from brevact.policy.keys import FIELDS, key_from_plain, key_to_plain
from brevact.quantizers.brief import brief, did_you_mean

_TOP = ("brevact", "rules", "layers", "report")
_OF_RULES = (*FIELDS, "quantizer", "settings")


def written(rules: Mapping[Any, Any], layers: Mapping[str, str] | None, report: FitReport | None, version: str) -> str:
    """Return a policy's file text; raises a TypeError for a user's own key or quantizer, which a file cannot name."""
    plain: dict[str, Any] = {"brevact": version}
    plain["rules"] = [{**key_to_plain(key), **_quantizer(key, source)} for key, source in rules.items()]
    if layers is not None:
        plain["layers"] = dict(layers)
    if report is not None:
        plain["report"] = report.to_plain()
    lines = [f"{json.dumps(key)}: {_lines(value)}" for key, value in plain.items()]
    return "{\n  " + ",\n  ".join(lines) + "\n}\n"


def _quantizer(key: Any, source: Any) -> dict[str, Any]:
    try:
        return to_plain(source)
    except TypeError as error:
        raise TypeError(f"policy rule {json.dumps(key_to_plain(key))}: {error}") from error


def _lines(value: Any) -> str:
    """Return JSON with one line per item of the outermost list or object."""
    if not value or not isinstance(value, list | dict):
        return json.dumps(value)
    if isinstance(value, list):
        return "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]"
    return "{\n    " + ",\n    ".join(f"{json.dumps(key)}: {json.dumps(each)}" for key, each in value.items()) + "\n  }"


def read(text: str, source: str, version: str) -> tuple[Any, ...]:
    """Return rules, layers and report from the text of a file.

    The ValueError for a text that holds no policy, or names something unknown, mentions `source`, such as the file's
    path, and `version`, the package's.
    """
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
        return _rules(content["rules"]), _layers(content.get("layers")), report
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


def _layers(layers: Any) -> dict[str, str] | None:
    if layers is None or (isinstance(layers, dict) and all(isinstance(kind, str) for kind in layers.values())):
        return layers
    raise TypeError(f"layers: got {brief(layers)}; accepted is an object of kinds of modules by name")


def _check_fields(entry: Mapping[str, Any], accepted: tuple[str, ...]) -> None:
    for name in entry:
        if name not in accepted:
            raise ValueError(f"unknown field {name!r}; {did_you_mean(name, accepted)}Accepted: {', '.join(accepted)}")
