"""Crosses of cases; `make test` runs a part of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def taking_turns(*axes: Sequence[object]) -> list:
    """Combinations of values, for `pytest.mark.parametrize`; all but a few are marked `exhaustive`.

    `make test` keeps each value of the longest axis once, and beside them those of the others in turn. The exhaustive
    tier has every two values of two axes together.
    """
    chosen = {
        tuple((turn + turn // len(axis)) % len(axis) for axis in axes)
        for turn in range(max(len(axis) for axis in axes))
    }
    rest = meeting(itertools.product(*(range(len(axis)) for axis in axes)), 2, sorted(chosen))
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(axes, places, strict=True)),
            marks=() if places in chosen else pytest.mark.exhaustive,
        )
        for places in sorted(rest)
    ]


def some_of(values: Iterable[Any], quick: int | Collection[Any]) -> list:
    """Values for `pytest.mark.parametrize`: `make test` takes each so-many-th, or those that are in `quick`."""
    return [
        pytest.param(value, marks=() if is_quick else pytest.mark.exhaustive)
        for place, value in enumerate(values)
        for is_quick in [place % quick == 0 if isinstance(quick, int) else value in quick]
    ]


def meeting(cross: Iterable[tuple[Any, ...]], count: int, before: Sequence[tuple[Any, ...]] = ()) -> list:
    """Cases of a cross in which so many settings meet first, mixed in an order that is always the same.

    Args:
        cross: all cases.
        count: of settings that meet: 2 for a case for each pair of values of two settings.
        before: cases that come first.
    """
    seen: set[tuple[Any, ...]] = set()
    found, all_cases = [], list(cross)
    for case in (*before, *random.Random(0).sample(all_cases, len(all_cases))):
        meet = set(itertools.combinations(enumerate(case), count))
        if not meet <= seen:
            found.append(case)
            seen |= meet
    return found
