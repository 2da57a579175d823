"""Interpreted kernels that normalize what they load and undo it where they store; see `test_interpreted`."""

from __future__ import annotations

import pytest
import torch

from brevact.quantizers import Rounding, UniformQuantizer
from tests.crosses import taking_turns
from tests.quantizers.test_normalizing import ORDERS, sample
from tests.triton_kernels.checks import check_normalized

KNOWN = [name for name in ORDERS if not name.startswith("no order")]


FORMATS = (
    (torch.float32, 512, Rounding.STOCHASTIC),
    (torch.bfloat16, 64, Rounding.NEAREST),
    (torch.float32, 64, Rounding.DITHERED),
    (torch.float16, 100, Rounding.DITHERED),  # blocks that are no power of two
    (torch.float16, 100, Rounding.STOCHASTIC),  # blocks that are no power of two
)


@pytest.mark.parametrize("name, chosen", taking_turns(KNOWN, FORMATS), ids=str)
def test_bytes_and_values_are_those_of_the_reference(name, chosen):
    dtype, bucket_size, rounding = chosen
    x, mean, invstd = sample(name, dtype)
    quantizer = UniformQuantizer(bit_width=3, bucket_size=bucket_size, rounding=rounding)
    check_normalized(quantizer, x, None if bucket_size == 64 else mean, invstd)


@pytest.mark.parametrize("shape", [(8, 512), (3, 1024)])
def test_rows_that_hold_whole_planes(shape):
    x = torch.randn(shape) * 10 ** torch.linspace(-2, 2, shape[0])[:, None]
    mean, invstd = x.mean(1, keepdim=True), x.std(1, keepdim=True).reciprocal()
    check_normalized(UniformQuantizer(bit_width=2), x.bfloat16(), mean, invstd)


def test_values_that_are_not_finite():
    x, mean, invstd = sample("rows", torch.float32)
    invstd[2, 3] = float("nan")
    x[1, 1, 5], x[4, 0, 7] = float("inf"), float("nan")
    check_normalized(UniformQuantizer(bit_width=2), x, mean, invstd)
