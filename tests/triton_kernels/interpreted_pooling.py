"""Interpreted kernels of block means; see `test_interpreted`."""

from __future__ import annotations

import pytest
import torch

from tests.crosses import taking_turns
from tests.triton_kernels.pooling_checks import DTYPES, check_pooling

CASES = (
    (5, (1, 7, 7), 8),
    (3, (1, 13, 17), 8),
    (3, (10, 9, 5), 3),
    (40, (1, 1, 70), 8),  # two programs of means
    (2, (1, 3, 700), 8),  # two tiles a row
    (7, (1, 1, 1), 8),
    (3, (1, 20, 20), 40),
    (0, (1, 4, 4), 8),
)


@pytest.mark.parametrize("case, dtype", taking_turns(CASES, DTYPES), ids=str)
def test_split_and_join_maps_bits(case: tuple[int, tuple[int, int, int], int], dtype: torch.dtype):
    check_pooling(*case, dtype, "cpu")
