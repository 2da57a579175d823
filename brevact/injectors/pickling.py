"""Pickles injector classes made by ``.let()``, so that quantized layers can be pickled, copied and saved whole.

Brevitas' layers hold such classes and cannot be pickled by themselves (``PicklingError``: no module has a class made by
``.let()``). Importing brevact changes that for every Brevitas injector, because a layer with a backward quantizer has
slots with other injectors too. Importable injectors are pickled by name, as before.
"""

from __future__ import annotations

import copyreg
import operator
import sys
from typing import Any

from brevact.injectors.class_protocol import BrevitasInjectorType, InjectorClass, InjectorType, added_values
from brevact.injectors.injector_type import BackwardInjectorType


def reduce_injector(injector: InjectorClass) -> str | tuple:
    """Return an import name, or bases and added settings, which are set later: they may hold the injector's layer."""
    if _is_importable(injector):
        return injector.__qualname__
    return _rebuild, (injector.__name__, injector.__bases__), added_values(injector), None, None, _add


def _is_importable(injector: InjectorClass) -> bool:
    try:
        return operator.attrgetter(injector.__qualname__)(sys.modules[injector.__module__]) is injector
    except Exception:  # no such module or name; or an injector's attribute, which resolves and may raise anything
        return False


def _rebuild(name: str, bases: tuple[type, ...]) -> type:
    return type(name, bases, {})


def _add(injector: InjectorClass, added: dict[str, Any]) -> None:
    donor: InjectorClass = type(injector.__name__, injector.__bases__, dict(added))
    injector.__dependencies__.update(donor.__dependencies__)


for kind in (BrevitasInjectorType, InjectorType, BackwardInjectorType):
    copyreg.pickle(kind, reduce_injector)
