"""Every kernel op on CPU tensors, by kernels, is its reference."""

from __future__ import annotations

import pytest

from brevact.cpu_kernels import launch
from tests.quantizers.kernel_op_cases import NAMES, check_kernel_op


@pytest.mark.parametrize("name", NAMES)
def test_kernel_op_equals_its_reference(name: str):
    assert hasattr(launch, name)
    check_kernel_op(name, launch)
