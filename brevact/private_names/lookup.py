"""Finds private names by their path, and replaces those that the installed version lacks.

A missing name never keeps brevact from being imported: its use is off, or raises an error with the version and the fix.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from typing import Any, NoReturn

_NOTHING = object()

#: Names that were not found, each with its use and its message, which is made here, outside of traced code.
missing: list[tuple[str, str, str]] = []


class _StandIn(type):
    """Metaclass of replacements for missing names: nothing is an instance, any use raises, all are false."""

    message: str

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(cls.message)

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(f"{name!r}: {cls.message}")

    def __bool__(cls) -> bool:
        return False


def find(path: str, use: str, *, fallback: Any = _NOTHING, placeholder: Any = _NOTHING) -> Any:
    """Return the object of a name.

    Args:
        path: the name with its modules, ``torch._C._is_tracing``; for an attribute, with its class.
        use: its use, the subject of the error if it is missing.
        fallback: equivalent object to return if the name is missing, without a warning.
        placeholder: object to return for a missing name in place of a stand-in, because importing brevact uses it.

    Returns:
        The object; the fallback or the placeholder; or a class without instances that raises a RuntimeError when
            called.
    """
    try:
        return read(path)
    except (AttributeError, ImportError):
        if fallback is not _NOTHING:
            return fallback
    message = message_for(path, use)
    missing.append((path, use, message))
    from brevact.user_lines import warn  # here: this module is the package's first to be imported

    warn(message, RuntimeWarning)
    if placeholder is not _NOTHING:
        return placeholder
    return _StandIn(path.rpartition(".")[2], (), {"message": message})


def read(path: str) -> Any:
    """Return the object at a path: through modules, classes and attributes that a class only declares.

    Raises:
        AttributeError: a module or a class lacks a part of it.
        ImportError: a module is missing.
    """
    name, *parts = path.split(".")
    found: Any = importlib.import_module(name)
    for part in parts:
        name = f"{name}.{part}"
        if part in getattr(found, "__annotations__", ()) and isinstance(found, type):
            return None  # of instances
        try:
            found = getattr(found, part)
        except AttributeError:
            if not hasattr(found, "__path__"):
                raise
            found = importlib.import_module(name)
    return found


def is_whole(use: str) -> bool:
    """Return whether no name is missing for this use."""
    return not any(needed_by == use for _, needed_by, _ in missing)


def refuse_without(use: str) -> None:
    """Raise a RuntimeError, with the version and the fix, if a name is missing for this use."""
    for _, needed_by, message in missing:
        if needed_by == use:
            raise RuntimeError(message)


def message_for(path: str, use: str) -> str:
    """Return the error text for a missing name."""
    library = path.partition(".")[0]
    return (
        f"{use} needs {path}, which {library} {_version(library)} does not have. "
        f"Install a version that brevact is tested with: pip install '{_requirement(library)}'"
    )


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def _requirement(library: str) -> str:
    """A library's versions that brevact declares, as a pip requirement."""
    try:
        declared = importlib.metadata.requires("brevact") or []
    except importlib.metadata.PackageNotFoundError:  # run from a folder
        declared = []
    for requirement in declared:
        if re.match(r"[\w.-]+", requirement)[0] == library:  # type: ignore[index]
            return requirement.partition(";")[0].strip()
    return library
