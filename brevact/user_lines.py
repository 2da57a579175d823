"""Warnings that name a line of the user's code, whatever lies between that line and the warning."""

from __future__ import annotations

import sys
import warnings

#: Packages between the user's line and the warning.
_BETWEEN = frozenset(
    "accelerate brevact brevitas contextlib dependencies functools importlib lightning pytorch_lightning torch "
    "transformers".split()
)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line outside this package and its callers (Brevitas, torch, trainers), or the outermost."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    name = names.get("__name__", "<string>")
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, name, registry)
