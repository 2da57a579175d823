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

_CLASS, _DTYPE = "class", "dtype"


def spell(value: Any) -> str:
    """Spell a dataclass whose fields are numbers, strings, None, enums with such values, dtypes or such dataclasses.

    >>> from brevact.quantizers import UniformQuantizer
    >>> read(spell(UniformQuantizer(bit_width=3))).bit_width
    3

    Args:
        value: Dataclass of a module's top level.

    Returns:
        Its class and fields as JSON.

    Raises:
        TypeError: If it is no such dataclass.
    """
    return json.dumps(value, default=_plain, sort_keys=True)


@functools.lru_cache(maxsize=1024)
def read(text: str) -> Any:
    """The inverse of `spell`; equal texts give one shared object.

    Args:
        text: What `spell` returned.

    Returns:
        The dataclass.
    """
    return json.loads(text, object_hook=_object)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, enum.Enum):
        return value.value
    kind = type(value)
    if not dataclasses.is_dataclass(value) or "<" in kind.__qualname__:
        raise TypeError(
            f"got {value!r} of type {kind.__name__}; what a compiled graph holds of a quantizer is its class and "
            "fields: accepted are dataclasses defined at the top level of a module, with fields that are numbers, "
            "strings, None, enums, torch.dtype or such dataclasses"
        )
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return {_CLASS: f"{kind.__module__}:{kind.__qualname__}", **fields}


def _object(fields: dict[str, Any]) -> Any:
    if _DTYPE in fields and len(fields) == 1:
        return getattr(torch, fields[_DTYPE])
    module, _, name = fields.pop(_CLASS).partition(":")
    kind: Any = importlib.import_module(module)
    for part in name.split("."):
        kind = getattr(kind, part)
    return kind(**fields)
