"""Warnings that name a line of the user's code, whatever lies between that line and the warning."""

from __future__ import annotations

import sys
import warnings

#: Packages through which a user's line comes to the place that warns.
_BETWEEN = frozenset(
    "accelerate brevact brevitas contextlib dependencies functools importlib lightning pytorch_lightning torch "
    "transformers".split()
)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the innermost line that is not of this package, or of one that calls it: Brevitas, torch, trainers.

    Where there is none, as in a thread of such a package, the outermost line is named.

    Args:
        message: text.
        category: of the warning.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    name = names.get("__name__", "<string>")
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, name, registry)
