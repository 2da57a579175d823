"""Interpreted kernels of masks and integer codes, launchers, and blocks far into a tensor; see `test_interpreted`."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from brevact.quantizers import Layout, Rounding, UniformQuantizer, reference, uneven
from brevact.quantizers.philox import column_bits
from brevact.triton_kernels.uniform import dequantize_whole_blocks, quantize_whole_blocks
from tests.crosses import taking_turns
from tests.triton_kernels.checks import check_codes, check_mask, filled

BLOCK = 512
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    "bit_width", [1, 3, 8, 13, 32, *(pytest.param(width, marks=pytest.mark.exhaustive) for width in (2, 5, 9, 24, 31))]
)
def test_pack_codes_bytes_for_every_bit_width(bit_width: int):
    torch.manual_seed(bit_width)
    check_codes(torch.randint(-(2**31), 2**31, (1024 + 71,)), bit_width, BLOCK)


@pytest.mark.parametrize(
    "dtype, case",
    [*taking_turns(FLOATS, ((1100, -0.3), (513, 0.0))), *((dtype, (0, 0.0)) for dtype in FLOATS)],
    ids=str,
)
def test_masks_equal_torch(dtype: torch.dtype, case: tuple[int, float]):
    length, slope = case
    torch.manual_seed(length)
    info = torch.finfo(dtype)
    special = [0.0, -0.0, info.tiny, -info.tiny, info.max, float("inf"), -float("inf"), float("nan")]
    x, grad = torch.randn(length).to(dtype), torch.randn(length).to(dtype)
    x[: len(special)] = torch.tensor(special, dtype=dtype)[:length]
    grad[8 : 8 + len(special)] = torch.tensor(special, dtype=dtype)[: max(length - 8, 0)]
    check_mask(x, grad, slope)


@triton.jit
def _block_far_away_kernel(
    x_ptr, codes_ptr, scale_ptr, minimum_ptr, seed_ptr, target_ptr, first_ptr, BITS: tl.constexpr, UNEVEN: tl.constexpr
):
    """Quantize and decode the block at `first`, whose memory is the tensors'."""
    first = tl.load(first_ptr)
    codes_ptr, group = codes_ptr - first // 8 * BITS, first // 512
    scale_ptr, minimum_ptr = scale_ptr - group, minimum_ptr - group
    quantize_whole_blocks(
        x_ptr - first, codes_ptr, scale_ptr, minimum_ptr, seed_ptr, None, None, 1, 1, 1, 1, first, 1, BITS, True,
        DITHERED=False, UNEVEN=UNEVEN, INNER=512, BLOCK=512, ROWS=1, PLACE=0,
    )  # fmt: skip
    row, column = tl.zeros((1, 1), tl.int32), tl.arange(0, 64)[None, :]
    dequantize_whole_blocks(
        codes_ptr, scale_ptr, minimum_ptr, None, target_ptr - first, first, row, column, 64, 1, 512, group + 1, 3e38,
        None, None, 1, 1, 1, 1, BITS, BLOCK=512, INNER=512, ALIGNED=True, PLACE=0, UNEVEN=UNEVEN, ROWS=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    "first_block, far", [(2**22, 0), (2**23 + 5, 1000), (2**36, 0), (2**36, 1000)]
)  # elements up to 2^45: columns beyond 2^32
def test_quantize_blocks_far_into_a_tensor(first_block: int, far: int):
    torch.manual_seed(0)
    bit_width, seed, first = 5, torch.tensor(99), first_block * BLOCK
    x = torch.randn(BLOCK)
    x[100:102] += far
    codes, scale = filled(BLOCK * bit_width // 8, torch.uint8, "cpu"), filled(1, torch.bfloat16, "cpu")
    minimum, target = filled(1, x.dtype, "cpu"), filled(BLOCK, x.dtype, "cpu")
    first_at = torch.tensor(first)
    _block_far_away_kernel[(1,)](x, codes, scale, minimum, seed, target, first_at, bit_width, UNEVEN=far > 0)

    random_bits = column_bits(torch.arange(first // 8, first // 8 + 64), seed).flatten()
    if far:
        own_minimum, s, is_far = uneven.fit(x[None], bit_width)
        steps, m = uneven.positions(x[None], own_minimum, s, is_far, bit_width)[0], own_minimum.view(torch.float32)
        q = reference.round_codes(steps, random_bits)
        values, s = uneven.values(q, own_minimum, s, bit_width, torch.inf), s.view(torch.bfloat16)
    else:
        geometry = UniformQuantizer(bit_width=bit_width, rounding=Rounding.NEAREST).geometry(Layout.of(x))
        m, s, _ = reference.calibrate(x, geometry, torch.bfloat16, torch.float32)
        s = s.float()
        steps = ((x - m) * (1 / s)).clamp(0, 2**bit_width - 1)
        q = reference.round_codes(steps, random_bits)
        values = m + s * q
    assert torch.equal(scale, s) and torch.equal(minimum, m)
    assert torch.equal(codes, reference.pack(q, bit_width, BLOCK))
    assert torch.equal(target, values)
