"""Budgets of the command line: `24x`, `512MiB`."""

from brevact.policy import words as policy_words
from recipes.errors import RecipeError


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
    try:
        found = policy_words.budget_of(words)
    except ValueError as error:
        raise RecipeError(f"{option} {words} is not possible: {error}") from error
    if found is None or "noise" in found:
        raise RecipeError(f"{option} {words} is not possible: use 24x, for 24 times less, or bytes such as 512MiB")
    return found
