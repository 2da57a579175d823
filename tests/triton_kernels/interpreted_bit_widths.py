"""Interpreted kernels of the uniform quantizer: every bit width, rounding and type; see `test_interpreted`.

Tensors have whole blocks and a ragged one for a single program: each program takes the interpreter half a second.
"""

from __future__ import annotations

import pytest
import torch

from brevact.quantizers import Rounding, UniformQuantizer
from tests.crosses import taking_turns
from tests.quantizers.uneven_cases import UNEVEN_CASES, uneven_values
from tests.triton_kernels.checks import check_quantizer

BIT_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: The quick ones, and a tenth of the others: each takes the interpreter two seconds.
SOME_UNEVEN_CASES = [case for turn, case in enumerate(UNEVEN_CASES) if not case.marks or turn % 10 == 0]


@pytest.mark.parametrize("bit_width, rounding, dtype", taking_turns(BIT_WIDTHS, list(Rounding), DTYPES), ids=str)
def test_quantize_bytes_for_every_bit_width(bit_width: int, rounding: Rounding, dtype: torch.dtype):
    torch.manual_seed(bit_width)
    x = (torch.randn(1024 + 71) * 3 + 1).to(dtype)
    check_quantizer(UniformQuantizer(bit_width=bit_width, rounding=rounding), x, multiply=rounding is Rounding.NEAREST)


@pytest.mark.parametrize(
    "bit_width, rounding, dtype", taking_turns((1, 2, 4, 6, 8, 24), list(Rounding), DTYPES), ids=str
)
def test_quantize_bytes_beside_zeros(bit_width: int, rounding: Rounding, dtype: torch.dtype):
    """One bucket with elements of both signs, one with NaN as well, one with negative elements alone."""
    torch.manual_seed(bit_width)
    x = torch.randn(2 * 512 + 71)
    x[::9] = 0.0
    x[700], x[1024:] = float("nan"), -x[1024:].abs()
    minimum_dtype = torch.bfloat16 if rounding is Rounding.NEAREST else torch.float32
    scale_dtype = torch.float32 if bit_width in (6, 24) else torch.bfloat16
    metadata = {"minimum_dtype": minimum_dtype, "scale_dtype": scale_dtype}
    check_quantizer(UniformQuantizer(bit_width=bit_width, rounding=rounding, **metadata), x.to(dtype), multiply=False)


@pytest.mark.parametrize("bit_width, bucket_size, rounding, dtype", SOME_UNEVEN_CASES, ids=str)
def test_quantize_bytes_of_uneven_buckets(bit_width: int, bucket_size: int, rounding: Rounding, dtype: torch.dtype):
    quantizer = UniformQuantizer(bit_width=bit_width, bucket_size=bucket_size, rounding=rounding)
    check_quantizer(quantizer, uneven_values(bucket_size, dtype), multiply=rounding is Rounding.NEAREST)


@pytest.mark.parametrize("bit_width", [2, 24])
def test_quantize_rounds_to_the_nearest_and_halves_to_even(bit_width: int):
    """Every position is a quarter of an integer, two, three or four."""
    x = torch.arange(512) / 4
    x[-1] = 2**bit_width - 1
    x = x.clamp(max=2**bit_width - 1)
    quantizer = UniformQuantizer(bit_width=bit_width, rounding=Rounding.NEAREST, scale_dtype=torch.float32)
    check_quantizer(quantizer, x, multiply=False)
