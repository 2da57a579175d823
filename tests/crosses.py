"""Crosses of cases; `make test` runs a part of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
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
