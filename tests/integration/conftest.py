"""Fixtures of the tests with the rest of PyTorch."""

from collections.abc import Iterator

import pytest
import torch

from brevact.autograd import current_region


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert current_region() is None and torch._C._len_torch_function_stack() == 0
