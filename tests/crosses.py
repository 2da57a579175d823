"""Crosses of cases; `make test` runs a part of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest


def taking_turns(*axes: Sequence[object]) -> list:
    """Every combination of values, for `pytest.mark.parametrize`; all but a few are marked `exhaustive`.

    `make test` keeps each value of the longest axis once, and beside them those of the others in turn.
    """
    chosen = {
        tuple((turn + turn // len(axis)) % len(axis) for axis in axes)
        for turn in range(max(len(axis) for axis in axes))
    }
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(axes, places, strict=True)),
            marks=() if places in chosen else pytest.mark.exhaustive,
        )
        for places in itertools.product(*(range(len(axis)) for axis in axes))
    ]
