"""Budgets of the command line: `24x`, `512MiB`, `peak=2GiB`."""

from brevact.policy import text as policy_text
from recipes.errors import RecipeError


def budget_of(words: str, option: str = "--budget") -> dict[str, float]:
    """Arguments of `brevact.fit` for a budget of bytes.

    >>> budget_of("24x"), budget_of("1.5MiB"), budget_of("60x time=1.2")
    ({'ratio': 24.0}, {'saved_bytes': 1572864}, {'ratio': 60.0, 'time': 1.2})
    >>> budget_of("peak=2GiB")
    {'peak_bytes': 2147483648}

    Args:
        words: how many times less is stored, such as "24x", bytes, such as "512MiB", or the peak of a step, such as
            "peak=2GiB"; noise and time may follow.
        option: of the command line, for the error.

    Raises:
        RecipeError: it is neither.
    """
    try:
        found = policy_text.budget_of(words)
    except ValueError as error:
        raise RecipeError(f"{option} {words} is not possible: {error}") from error
    if found is None or not {"ratio", "saved_bytes", "peak_bytes"} & found.keys():
        raise RecipeError(
            f"{option} {words} is not possible: use 24x, for 24 times less, bytes such as 512MiB, or the peak of a "
            "step such as peak=2GiB"
        )
    return found
