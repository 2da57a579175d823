"""Every kernel op on GPU tensors, by interpreted kernels, is its reference; see `test_interpreted`."""

from __future__ import annotations

import pytest

from brevact import triton_kernels
from tests.quantizers.kernel_op_cases import NAMES, check_kernel_op


@pytest.mark.parametrize("name", NAMES)
def test_kernel_op_equals_its_reference(name: str):
    check_kernel_op(name, triton_kernels, most=16)  # types, bucket sizes, runs of segments and results take turns


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["map_levels", "look_up"])
def test_kernel_op_equals_its_reference_in_every_call(name: str):
    check_kernel_op(name, triton_kernels)
