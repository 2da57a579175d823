"""Dataclasses of plain values as text, for graphs that hold a quantizer as a constant.

The text means the same in every process: a graph may come from a cache on disk.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import json
from typing import Any

import torch

from brevact.quantizers.brief import brief

_CLASS, _DTYPE, _TUPLE = "class", "dtype", "tuple"


def to_text(value: Any) -> str:
    """Return a dataclass whose fields are numbers, strings, None, enums, dtypes, tuples or such dataclasses as JSON.

    >>> from brevact.quantizers import UniformQuantizer
    >>> from_text(to_text(UniformQuantizer(bit_width=3))).bit_width
    3

    Raises:
        TypeError: If it is no such dataclass of a module's top level.
    """
    return json.dumps(_plain(value), sort_keys=True)


@functools.lru_cache(maxsize=1024)
def from_text(text: str) -> Any:
    """Return the dataclass of a text, the inverse of `to_text`; equal texts give one shared object."""
    return json.loads(text, object_hook=_object)


def _plain(value: Any) -> Any:
    kind, fields = type(value), None
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if kind is tuple:
        return {_TUPLE: [_plain(item) for item in value]}
    if isinstance(value, enum.Enum):
        fields = {"value": value.value}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    if fields is None or "<" in kind.__qualname__:
        raise TypeError(
            f"got {brief(value)} of type {kind.__name__}; a compiled graph holds the class and fields of a quantizer: "
            "accepted are dataclasses defined at the top level of a module, with fields that are numbers, strings, "
            "None, enums, torch.dtype, tuples or such dataclasses"
        )
    own = {name: _plain(each) for name, each in fields.items()}
    return {_CLASS: f"{kind.__module__}:{kind.__qualname__}", "fields": own}


def _object(found: dict[str, Any]) -> Any:
    if _DTYPE in found:
        return getattr(torch, found[_DTYPE])
    if _TUPLE in found:
        return tuple(found[_TUPLE])
    return _class(found[_CLASS])(**found["fields"]) if _CLASS in found else found


def _class(place: str) -> Any:
    module, _, name = place.partition(":")
    try:
        kind: Any = importlib.import_module(module)
        for part in name.split("."):
            kind = getattr(kind, part)
    except (ImportError, AttributeError) as error:
        raise TypeError(f"{name} is not in the module {module}; define it at the top level of one") from error
    return kind
