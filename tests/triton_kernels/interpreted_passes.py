"""Every pass on GPU tensors, by interpreted kernels, is its law; see `test_interpreted`."""

from __future__ import annotations

import pytest

from brevact import triton_kernels
from tests.quantizers.pass_cases import NAMES, check_pass


@pytest.mark.parametrize("name", NAMES)
def test_pass_equals_its_law(name: str):
    check_pass(name, triton_kernels)
