"""Budgets of the command line: `24x`, `512MiB`."""

from brevact.policy import words as policy_words
from recipes.errors import RecipeError


def budget_of(words: str, option: str = "--budget") -> dict[str, float]:
    """The arguments of `brevact.fit` that a budget of bytes stands for.

    >>> budget_of("24x"), budget_of("1.5MiB"), budget_of("60x time=1.2")
    ({'ratio': 24.0}, {'saved_bytes': 1572864}, {'ratio': 60.0, 'time': 1.2})

    Args:
        words: how many times less is stored, such as "24x", or bytes, such as "512MiB"; noise and time may follow.
        option: of the command line, for the error.

    Raises:
        RecipeError: it is neither.
    """
    try:
        found = policy_words.budget_of(words)
    except ValueError as error:
        raise RecipeError(f"{option} {words} is not possible: {error}") from error
    if found is None or not {"ratio", "saved_bytes"} & found.keys():
        raise RecipeError(f"{option} {words} is not possible: use 24x, for 24 times less, or bytes such as 512MiB")
    return found
