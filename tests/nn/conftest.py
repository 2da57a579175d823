"""Fixtures of the layers' tests."""

from collections.abc import Callable
from typing import Any

import pytest
import torch


def _saved_bytes(function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    storages = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = (x, x.untyped_storage().nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        result = function(*args)
    return result, sum(nbytes for _, nbytes in storages.values())


@pytest.fixture
def saved_bytes() -> Callable[..., tuple[Any, int]]:
    """``saved_bytes(f, *args)``: the result of ``f(*args)``, and the bytes it keeps for backward, each storage once."""
    return _saved_bytes
