"""Fixtures of the injectors' tests, and of the layers'."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.autograd.measuring import watch_saved


def _saved_bytes(function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    with watch_saved() as saved:
        result = function(*args)
    return result, saved.nbytes


@pytest.fixture
def saved_bytes() -> Callable[..., tuple[Any, int]]:
    """``saved_bytes(f, *args)``: the result of ``f(*args)``, and the bytes it keeps for backward, each storage once."""
    return _saved_bytes
