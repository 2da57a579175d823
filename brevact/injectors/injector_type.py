"""The metaclass of backward quantizers, and how an injector's values are read back as written.

Brevitas ignores a keyword that nothing looks up: ``grop_size=64`` leaves the default in place. Here
``backward_settings`` must depend on each name, directly or through other values, so that a new format adds settings by
the arguments of its ``@value`` functions alone.

Importing this module lets injector classes made by ``.let()`` be pickled, Brevitas' too, so that quantized layers can
be pickled, copied and saved whole. Importable injectors are pickled by name, as before.
"""

from __future__ import annotations

import copyreg
import importlib
import operator
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from brevact.injectors.class_protocol import (
    STRUCTURE,
    BrevitasInjectorType,
    InjectorClass,
    InjectorType,
    added_values,
    written_values,
)
from brevact.quantizers.brief import brief, did_you_mean

#: Names that a region, a Brevitas layer or the slot's proxy looks up in a backward quantizer.
ASKED_FOR = ("backward_settings", "proxy_class", "forward_quant", "act_impl")
#: Prefixes of settings in a slot of Brevitas: the forward quantizer's, and the backward one's, which is optional.
FORWARD_PREFIX, ACT_PREFIX = "forward_", "act_"
#: Passed by Brevitas layers to every activation slot; they belong to the forward side.
FROM_LAYER = ("act_impl", "passthrough_act")


class BackwardInjectorType(InjectorType):
    """Metaclass of backward quantizers: a name that nothing depends on raises at once, instead of doing nothing."""

    def __new__(mcs, class_name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> BackwardInjectorType:
        origin = next((base for base in bases if isinstance(base, mcs)), None)
        _refuse_annotations(class_name, namespace)
        if origin is not None:
            namespace = {"__module__": origin.__module__, "__doc__": origin.__doc__, **namespace}
        written = {name: given for name, given in namespace.items() if not name.startswith("__")}
        cls = super().__new__(mcs, class_name, bases, namespace)
        for fragment in bases:
            if not isinstance(fragment, mcs):
                written = {**dict(written_values(fragment)), **written}
        _check_names(cls, written)
        return cls

    def _setting_names(cls) -> set[str]:
        return known_names(cls) - set(STRUCTURE)


def known_names(injector: InjectorClass) -> set[str]:
    """Return the names that resolving a backward quantizer looks up, directly or through other values."""
    known: set[str] = set()
    open_names = list(ASKED_FOR)
    while open_names:
        name = open_names.pop()
        if name not in known:
            known.add(name)
            open_names.extend(_dependencies_of(injector.__dependencies__.get(name)))
    return known


def derived(solver: InjectorClass) -> Iterator[InjectorClass]:
    classes = [solver]
    while classes:
        injector = classes.pop()
        yield injector
        classes.extend(type.__subclasses__(injector))


def act_impl_arguments(injector: InjectorClass) -> list[str]:
    """Return the constructor arguments of the activation that a Brevitas layer put into its slot (``min_val``, ...)."""
    return list(_dependencies_of(injector.__dependencies__.get("act_impl")))


def _dependencies_of(spec: tuple | None) -> Iterator[str]:
    if spec is None:
        return
    marker, attribute, arguments, _ = spec
    yield from (name for name in arguments if not name.startswith("__"))
    if marker == "this":  # bucket_size = this.group_size
        yield from (symbol for kind, symbol in attribute.dependency.__expression__ if kind == ".")


def _check_names(injector: InjectorClass, written: dict[str, Any]) -> None:
    known = known_names(injector)
    from_layer = all(name in written for name in FROM_LAYER)
    for name, given in written.items():
        if name in known or name in FROM_LAYER or name.startswith(FORWARD_PREFIX):
            continue
        if from_layer and (name.startswith("input_") or name.removeprefix(ACT_PREFIX) in known):
            continue  # for the other slot of a Brevitas activation layer, or for the backward quantizer of this one
        accepted = known - {"backward_settings", "proxy_class", *FROM_LAYER}
        raise unknown_setting(name, given, injector.__name__, accepted)


def _refuse_annotations(class_name: str, namespace: dict[str, Any]) -> None:
    """Raise for ``bucket_size: int = 128``, which Brevitas mistakes for a magic method."""
    annotations = namespace.get("__annotations__", ())
    annotate = namespace.get("__annotate_func__") or namespace.get("__annotate__")
    if annotate is not None:  # Python 3.14 puts a function there in place of the dictionary
        library = importlib.import_module("annotationlib")
        annotations = library.call_annotate_function(annotate, library.Format.STRING)
    if annotations:
        raise TypeError(
            f"{', '.join(annotations)} of {class_name} is annotated, which the body of an injector cannot be: drop the "
            "annotation (bucket_size = 128)"
        )


def unknown_setting(name: str, given: Any, owner: str, accepted: Iterable[str]) -> TypeError:
    """Return the error for a setting that ``owner`` lacks; it names the nearest one and all of them."""
    accepted = sorted(accepted)
    hint = did_you_mean("bit_width" if name == "bits" else name, accepted)
    forward = (
        f"; settings of a forward quantizer take the prefix {FORWARD_PREFIX}" if "forward_quant" in accepted else ""
    )
    return TypeError(
        f"{name}={brief(given)} is not a setting of {owner}; {hint}Accepted: {', '.join(accepted)}{forward}"
    )


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
