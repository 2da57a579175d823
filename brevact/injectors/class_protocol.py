"""The classes of injectors, and the values that they were written with.

Brevitas' injectors resolve every attribute as a dependency and raise ``DependencyError`` for the rest, so that
``hasattr`` fails on them; their length is 0, so that they are false. Importing this module makes that error an
``AttributeError`` as well, also for Brevitas' own injectors.

Without Brevitas, injectors are those of ``dependencies``, the library that Brevitas' derive from.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from dependencies import Injector, value
from dependencies.exceptions import DependencyError

from brevact.private_names.of_brevitas import IS_INSTALLED
from brevact.quantizers.brief import did_you_mean

if TYPE_CHECKING or IS_INSTALLED:
    from brevitas.inject import ExtendedInjector
else:
    ExtendedInjector = Injector
if TYPE_CHECKING:
    from typing_extensions import Self

    BrevitasInjectorType = type  # brevitas has no types
else:
    BrevitasInjectorType = type(ExtendedInjector)
_stock: Any = type(ExtendedInjector)

#: A class of injectors, for type checkers: its attributes are the dependencies that it resolves.
InjectorClass: TypeAlias = Any
#: Filled in by a layer or the solver, not settings that a user chooses.
STRUCTURE = ("act_impl", "backward_settings", "passthrough_act", "proxy_class", "quantizer")


class InjectorAttributeError(DependencyError, AttributeError):
    """A setting that cannot be resolved; also a ``DependencyError``, which Brevitas raises."""


def _raise_attribute_errors(resolve: Callable[[type, str], Any]) -> Callable[[type, str], Any]:
    @functools.wraps(resolve)
    def __getattr__(cls: type, name: str) -> Any:
        try:
            return resolve(cls, name)
        except InjectorAttributeError:
            raise
        except DependencyError as error:
            raise InjectorAttributeError(str(error)) from error

    return __getattr__


_stock.__getattr__ = _raise_attribute_errors(_stock.__getattr__)


class InjectorType(BrevitasInjectorType):
    """Metaclass of injector classes that are true, and raise ``AttributeError`` for names that are no dependencies."""

    def __new__(mcs, class_name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        if not IS_INSTALLED:  # Brevitas drops these names of Python 3.13, ``dependencies`` refuses them
            unknown = ("__firstlineno__", "__static_attributes__", "__classdictcell__")
            namespace = {name: each for name, each in namespace.items() if name not in unknown}
        return super().__new__(mcs, class_name, bases, namespace)

    def __getattr__(cls, name: str) -> Any:
        if name not in cls.__dependencies__:
            names = [] if name.startswith("_") else sorted(cls._setting_names() & {*cls.__dependencies__})
            hint = f"; {did_you_mean(name, names)}Settings: {', '.join(names)}" if names else ""
            raise AttributeError(f"{cls.__name__} has no attribute {name!r}{hint}", name=name, obj=cls)
        built = (
            cls.__dependencies__["quantizer"][1] if name in STRUCTURE and "quantizer" in cls.__dependencies__ else None
        )
        if dataclasses.is_dataclass(built) and built.__module__.startswith("brevact."):  # its defaults would be silent
            for field in dataclasses.fields(built):
                if field.init and field.name not in cls.__dependencies__:
                    missing = f"{cls.__name__!r} can not resolve attribute {field.name!r} while building 'quantizer'"
                    raise InjectorAttributeError(missing)
        return _stock.__getattr__(cls, name)

    def __bool__(cls) -> bool:
        return True

    def _setting_names(cls) -> set[str]:
        return {name for name in cls.__dependencies__ if not name.startswith("__")} - set(STRUCTURE)


class Fragment(ExtendedInjector, metaclass=InjectorType):
    """A part of a quantizer: settings, and functions of them, for quantizers to inherit from."""

    if TYPE_CHECKING:

        @classmethod
        def let(cls, **settings: Any) -> type[Self]: ...


def is_injector(source: Any) -> bool:
    return inspect.isclass(source) and issubclass(source, (Injector, ExtendedInjector))


def added_values(injector: InjectorClass) -> dict[str, Any]:
    inherited: dict[str, tuple] = {}
    for base in reversed(injector.__bases__):
        inherited.update(base.__dependencies__)
    return {
        name: written_value(spec)
        for name, spec in injector.__dependencies__.items()
        if spec is not inherited.get(name) and not name.startswith("__")
    }


def written_value(spec: tuple) -> Any:
    """Return a dependency as written in the source; raises a TypeError for kinds that cannot be written back."""
    marker, attribute, *_ = spec
    if inspect.isclass(attribute):
        return attribute
    if inspect.isfunction(attribute):
        return value(attribute)
    field = "injector" if marker == "nested_injector" else "dependency"
    if not hasattr(attribute, field):
        raise TypeError(f"an injector dependency of type {type(attribute).__name__} cannot be written back")
    return getattr(attribute, field)


def written_values(injector: InjectorClass) -> Iterator[tuple[str, Any]]:
    for name, spec in injector.__dependencies__.items():
        if not name.startswith("__"):
            yield name, written_value(spec)
