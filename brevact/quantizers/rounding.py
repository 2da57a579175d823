"""How a position between two levels becomes a code."""

from enum import Enum


class Rounding(str, Enum):
    """How a position between two levels becomes a code.

    >>> Rounding("nearest")
    <Rounding.NEAREST: 'nearest'>
    """

    NEAREST = "nearest"
    """The closer level, half to even: smallest error, biased."""
    STOCHASTIC = "stochastic"
    """Up with probability equal to the fraction: unbiased."""
    DITHERED = "dithered"
    """The closer level of a grid that is shifted by a random part of a step: unbiased, with half the variance."""
