"""The protocol of injector classes towards Python, editors and notebooks.

Brevitas' injectors resolve every attribute as a dependency and raise ``DependencyError`` for the rest, so that
``hasattr`` and ``help`` fail on them; their length is 0, so that they are false. Importing this module makes that error
an ``AttributeError`` as well, also for Brevitas' own injectors, because ``help`` of a class queries its bases, too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from brevitas.inject import ExtendedInjector, Injector, value
from dependencies.exceptions import DependencyError

from brevact.quantizers.brief import did_you_mean

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
_OF_LAYERS = ("act_impl", "passthrough_act", "proxy_class")


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


class _Answer(property):
    """A property of injector classes that their metaclass itself lacks."""

    def __get__(self, injector: Any, owner: Any = None) -> Any:
        if injector is None:
            raise AttributeError("only injector classes have it")
        return super().__get__(injector, owner)


class InjectorType(BrevitasInjectorType):
    """Metaclass of injector classes that are true, and raise ``AttributeError`` for names that are no dependencies."""

    def __getattr__(cls, name: str) -> Any:
        if name not in cls.__dependencies__:
            raise AttributeError(_unknown(cls, name), name=name, obj=cls)
        return _stock.__getattr__(cls, name)

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        """Raise: such classes have no instances."""
        name = cls.__name__
        fix = f"pass the class itself: quantize_backward(model, {name})"
        if settings:
            fix = f"pass the class, with these settings: {name}.let({_listed(settings)})"
        elif args:
            fix += f"; to quantize a tensor: brevact.quantizer({name}).quantize(x)"
        raise TypeError(f"{name}(): a quantizer is a class of settings and is not instantiated; {fix}")

    def __bool__(cls) -> bool:
        return True

    def __repr__(cls) -> str:
        """Python's own form, and ``StochBackward2bit.let(bucket_size=128)`` for results of ``.let()``."""
        settings: dict[str, Any] = {}
        origin: Any = cls
        while _is_made_by_let(origin):
            settings = {**added_values(origin), **settings}
            (origin,) = origin.__bases__
        return f"{origin.__name__}.let({_listed(settings)})" if origin is not cls else type.__repr__(cls)

    def __dir__(cls) -> list[str]:
        """Settings and ``let``: `help` looks each name up in Brevitas' metaclasses, which know no others."""
        names = {name for name in cls.__dependencies__ if not name.startswith("__")}
        return sorted(names - set(_OF_LAYERS) | {"let"})

    @_Answer
    def __wrapped__(cls) -> Any:
        raise AttributeError(f"{cls.__name__} wraps nothing", name="__wrapped__", obj=cls)

    def _setting_names(cls) -> set[str]:
        return {name for name in cls.__dependencies__ if not name.startswith("__")} - set(STRUCTURE)


class Fragment(ExtendedInjector, metaclass=InjectorType):
    """A part of a quantizer: settings, and functions of them, for quantizers to inherit from."""

    if TYPE_CHECKING:

        @classmethod
        def let(cls, **settings: Any) -> type[Self]: ...


def _let(cls: InjectorClass, **settings: Any) -> InjectorClass:
    """Return a quantizer with the same name and docstring that differs in some settings.

    >>> from brevact import StochBackward2bit
    >>> StochBackward2bit.let(bucket_size=128).bucket_size
    128

    Args:
        cls: the quantizer to derive from.
        **settings: replacements of its settings.

    Raises:
        TypeError: a name is not one of its settings.
    """
    return type(cls.__name__, (cls,), settings)


_let.__name__, _let.__qualname__ = "let", "Fragment.let"
_let.__dict__["__objclass__"] = Fragment  # where `help` puts it
type.__setattr__(Fragment, "let", classmethod(_let))  # in the class body Brevitas refuses the name


def is_injector(source: Any) -> bool:
    """Whether this is an injector class of brevact, of Brevitas or of the library below it."""
    return inspect.isclass(source) and issubclass(source, (Injector, ExtendedInjector))


def _unknown(cls: InjectorClass, name: str) -> str:
    text = f"{cls.__name__} has no attribute {name!r}"
    if name.startswith("_"):
        return text
    names = [known for known in cls._setting_names() if known in cls.__dependencies__]
    return f"{text}; {did_you_mean(name, names)}Settings: {', '.join(sorted(names))}" if names else text


def _listed(settings: dict[str, Any]) -> str:
    return ", ".join(f"{name}={_source(given)}" for name, given in settings.items())


def _source(given: Any) -> str:
    return given.__name__ if inspect.isclass(given) or inspect.isfunction(given) else repr(given)


def _is_made_by_let(cls: type) -> bool:
    """Whether this is ``base.let(...)``: same name and module as its base, and not nested in the source."""
    bases = cls.__bases__
    return (
        len(bases) == 1
        and (cls.__name__, cls.__module__) == (bases[0].__name__, bases[0].__module__)
        and cls.__qualname__ == cls.__name__
    )


def added_values(injector: InjectorClass) -> dict[str, Any]:
    """Return the settings that an injector adds to its bases, as written."""
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
    """Yield the names and values of an injector as written, inherited ones included."""
    for name, spec in injector.__dependencies__.items():
        if not name.startswith("__"):
            yield name, written_value(spec)
