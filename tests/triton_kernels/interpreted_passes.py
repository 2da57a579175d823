"""Every pass on GPU tensors, by interpreted kernels, is its law; see `test_interpreted`."""

from __future__ import annotations

import pytest

from brevact import triton_kernels
from tests.quantizers.pass_cases import NAMES, check_pass


@pytest.mark.parametrize("name", NAMES)
def test_pass_equals_its_law(name: str):
    check_pass(name, triton_kernels, most=16)  # types, bucket sizes, runs of segments and what is asked for take turns


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["map_levels", "look_up"])
def test_pass_equals_its_law_in_every_call(name: str):
    check_pass(name, triton_kernels)
