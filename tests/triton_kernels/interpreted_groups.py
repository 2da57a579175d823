"""Interpreted kernels of the uniform quantizer: every way to divide a tensor, extreme values; see `test_interpreted`.

Tensors have whole blocks and a ragged one for a single program: each program takes the interpreter half a second.
"""

from __future__ import annotations

import pytest
import torch

from brevact.quantizers import Granularity, UniformQuantizer
from tests.crosses import taking_turns
from tests.triton_kernels.checks import check_quantizer

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("bucket_size", "length"),
    [
        (1, 520),
        (64, 1095),
        pytest.param(256, 1000, marks=pytest.mark.exhaustive),
        (1024, 1500),
        (4096, 4097),
        pytest.param(16384, 32768, marks=pytest.mark.exhaustive),  # a tile a group
        (8192, 8193),  # such a group, ragged: two passes
        pytest.param(7, 600, marks=pytest.mark.exhaustive),
        (100, 1291),
        (600, 1201),
        (5000, 5003),
        (None, 1095),
        (None, 32 * 1024 + 3),  # several programs a group
        (512, 0),
        (None, 0),
        (512, 1),
        (512, 4096 + 512),  # a second tile of one block
        (512, 4096 + 9),  # a second tile of a ragged block alone
    ],
)
def test_quantize_bytes_for_every_way_to_divide_a_tensor(bucket_size: int | None, length: int):
    """What is not finite is in some groups, and in others not; zeros likewise."""
    torch.manual_seed(length)
    x = torch.randn(length)
    x[length // 3 :: 1201], x[length // 2 :: 777], x[length // 5 :: 990] = float("nan"), -float("inf"), 0.0
    check_quantizer(UniformQuantizer(bit_width=3, bucket_size=bucket_size), x)


LAYOUTS = (
    ((3, 6, 9, 11), torch.contiguous_format),
    ((3, 6, 9, 11), torch.channels_last),
    ((4, 70, 3, 5), torch.channels_last),
    ((600, 3), torch.contiguous_format),
    ((2, 1024), torch.contiguous_format),
    ((300, 10), torch.contiguous_format),
)


@pytest.mark.parametrize(
    "layout, granularity", taking_turns(LAYOUTS, [Granularity.CHANNEL, Granularity.SAMPLE]), ids=str
)
def test_quantize_bytes_for_every_granularity(layout: tuple, granularity: Granularity):
    shape, memory_format = layout
    torch.manual_seed(0)
    x = torch.randn(shape)
    x.view(-1)[::41] = float("nan")
    x.view(-1)[:9] = float("inf")
    x.view(-1)[5::83] = 0.0
    x = x.contiguous(memory_format=memory_format)
    check_quantizer(UniformQuantizer(bit_width=4, granularity=granularity), x.bfloat16())


@pytest.mark.parametrize(
    ("scale_dtype", "minimum_dtype", "dtype"),
    [
        pytest.param(torch.bfloat16, torch.float32, torch.float32, marks=pytest.mark.exhaustive),
        pytest.param(torch.bfloat16, torch.float32, torch.bfloat16, marks=pytest.mark.exhaustive),
        (torch.bfloat16, torch.float32, torch.float16),
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_quantize_bytes_of_extreme_values(scale_dtype: torch.dtype, minimum_dtype: torch.dtype, dtype: torch.dtype):
    """One bucket a row; the last is ragged."""
    torch.manual_seed(0)
    info = torch.finfo(dtype)
    rows = [
        -torch.zeros(64),
        torch.tensor([0.0, -0.0]).repeat(32),
        torch.tensor([info.max, -info.max]).repeat(32),
        torch.tensor([info.max, 0.0]).repeat(32),
        torch.linspace(0.4, 0.5, 64, dtype=torch.float64) * info.max,
        torch.linspace(-1, 1, 64, dtype=torch.float64) * info.tiny,
        torch.linspace(0, 1, 64, dtype=torch.float64) * info.tiny * info.eps,
        torch.linspace(1, 1 + 1e-6, 64, dtype=torch.float64),
        torch.linspace(-1000.01, -999.99, 64),
        torch.tensor([1.0] * 63 + [float("nan")]),
        torch.tensor([-float("nan")] + [-1.0] * 63),
        torch.tensor([float("inf")] + [1.0] * 63),
        torch.tensor([-float("inf")] * 64),
        torch.tensor([float("nan")] * 5),
    ]
    x = torch.cat([row.to(dtype) for row in rows])
    metadata = {"scale_dtype": scale_dtype, "minimum_dtype": minimum_dtype}
    check_quantizer(UniformQuantizer(bit_width=2, bucket_size=64, **metadata), x)
    check_quantizer(UniformQuantizer(bit_width=8, bucket_size=None, **metadata), x[:256])
