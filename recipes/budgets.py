"""Budgets of the command line: `24x`, `512MiB`."""

import re

from recipes.errors import RecipeError

_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def budget_of(words: str, option: str = "--budget") -> dict[str, float]:
    """The argument of `brevact.fit` that a budget of bytes stands for.

    >>> budget_of("24x"), budget_of("1.5MiB")
    ({'ratio': 24.0}, {'saved_bytes': 1572864})

    Args:
        words: how many times less is stored, such as "24x", or bytes, such as "512MiB".
        option: of the command line, for the error.

    Raises:
        RecipeError: it is neither.
    """
    found = re.fullmatch(rf"(\d+\.?\d*|\.\d+)(x|{'|'.join(_UNITS)})", words)
    if found is None or float(found[1]) == 0:
        raise RecipeError(f"{option} {words} is not possible: use 24x, for 24 times less, or bytes such as 512MiB")
    number, unit = float(found[1]), found[2]
    return {"ratio": number} if unit == "x" else {"saved_bytes": int(number * _UNITS[unit])}
