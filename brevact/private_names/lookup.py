"""Finds private names by their path. The versions that brevact declares have all of them."""

from __future__ import annotations

import importlib.metadata
import pkgutil
from typing import Any

_REQUIRED = object()


def find(path: str, fallback: Any = _REQUIRED) -> Any:
    """Return the object at a path, ``torch._C._is_tracing``, through modules, classes and attributes."""
    try:
        return pkgutil.resolve_name(path)
    except (AttributeError, ImportError):
        if fallback is not _REQUIRED:
            return fallback
    library = path.partition(".")[0]
    raise ImportError(
        f"brevact needs {path}, which {library} {importlib.metadata.version(library)} does not have. Install versions "
        "that brevact is tested with: pip install --upgrade brevact"
    )
