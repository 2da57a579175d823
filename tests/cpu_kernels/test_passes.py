"""Every pass on CPU tensors, by kernels, is its law."""

from __future__ import annotations

import pytest

from brevact.cpu_kernels import launch
from tests.quantizers.pass_cases import NAMES, check_pass


@pytest.mark.parametrize("name", NAMES)
def test_pass_equals_its_law(name: str):
    assert hasattr(launch, name)
    check_pass(name, launch)
