"""The largest size that fits in memory, by trials."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], start: int, most: int, resolution: float = 1 / 16) -> int:
    """The largest size that fits, found by doubling and bisection; what fits, fits at every smaller size.

    Args:
        fits: tries a size.
        start: size of the first trial.
        most: no larger size is tried.
        resolution: the search ends when the smallest size that does not fit is larger by no more than this share.

    Returns:
        The largest size that was tried and fits; 0 if `start` and all smaller ones that were tried do not fit.
    """
    fitting, failing = 0, most + 1
    size = min(start, most)
    while fitting < size < failing:
        if fits(size):
            fitting = size
        else:
            failing = size
        if failing > most:
            size = min(2 * fitting, most)
        elif failing - fitting > max(1, fitting * resolution):
            size = (fitting + failing) // 2
        else:
            break
    return fitting
