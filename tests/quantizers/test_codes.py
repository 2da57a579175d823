"""Packing of codes and masks, against the format as its docstring states it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from brevact.quantizers import Layout, mask_multiply, pack_codes, pack_mask, reference, unpack_codes, unpack_mask
from tests.crosses import taking_turns
from tests.quantizers.subjects import DTYPES, TENSORS


def _packed_by_hand(codes: list[int], bit_width: int, block_size: int) -> list[int]:
    """The byte format with Python's big integers, straight from the docstring of `PackedActivation`."""
    out = []
    for start in range(0, len(codes), block_size):
        block = codes[start : start + block_size]
        columns = -(-len(block) // 8)
        block = block + [0] * (8 * columns - len(block))
        rows = [sum(block[i * columns + j] << (i * bit_width) for i in range(8)) for j in range(columns)]
        out += [row >> (8 * k) & 0xFF for k in range(bit_width) for row in rows]
    return out


@settings(max_examples=150, deadline=None)
@given(
    bit_width=st.integers(1, 32),
    length=st.one_of(st.integers(0, 40), st.integers(500, 1100)),
    block_size=st.sampled_from([8, 64, 512, 560]),
    seed=st.integers(0, 2**31),
)
def test_pack_codes_follows_the_format_and_unpack_inverts_it(bit_width, length, block_size, seed):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bit_width, (length,), generator=generator)
    packed = pack_codes(codes, bit_width, block_size)
    assert packed.tolist() == _packed_by_hand(codes.tolist(), bit_width, block_size)
    assert torch.equal(reference.pack(codes, bit_width, block_size), packed)
    unpacked = unpack_codes(packed, bit_width, length, block_size)
    assert unpacked.dtype == (torch.int32 if bit_width < 32 else torch.int64)
    assert torch.equal(unpacked.to(torch.int64), codes)
    assert torch.equal(reference.unpack(packed, bit_width, length, block_size), unpacked)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_pack_codes_drops_high_bits_and_never_spills(dtype: torch.dtype):
    codes = torch.arange(-20, 120).to(dtype)
    for bit_width in (1, 3, 7, 8, 11, 20):
        expected = codes.to(torch.int64) & ((1 << bit_width) - 1)
        packed = pack_codes(codes, bit_width)
        assert torch.equal(unpack_codes(packed, bit_width, codes.numel()).to(torch.int64), expected)


@pytest.mark.parametrize(
    ("codes", "bit_width", "block_size", "error", "name"),
    [
        (torch.zeros(8), 2, 512, TypeError, "codes"),
        (torch.zeros(8, dtype=torch.bool), 2, 512, TypeError, "codes"),
        (torch.zeros(2, 4, dtype=torch.int32), 2, 512, ValueError, "codes"),
        (torch.zeros(8, dtype=torch.int32), 0, 512, ValueError, "bit_width"),
        (torch.zeros(8, dtype=torch.int32), 33, 512, ValueError, "bit_width"),
        (torch.zeros(8, dtype=torch.int32), 2.0, 512, TypeError, "bit_width"),
        (torch.zeros(8, dtype=torch.int32), 2, 12, ValueError, "block_size"),
        (torch.zeros(8, dtype=torch.int32), 2, 0, ValueError, "block_size"),
    ],
)
def test_pack_codes_names_what_is_wrong(codes, bit_width, block_size, error, name):
    with pytest.raises(error, match=f"^{name}: got"):
        pack_codes(codes, bit_width, block_size)


def test_unpack_names_what_is_wrong():
    packed = pack_codes(torch.zeros(100, dtype=torch.int32), 3)
    with pytest.raises(ValueError, match=r"packed: got .* expected .*\(42,\)"):
        unpack_codes(packed, 3, 105)
    with pytest.raises(ValueError, match="packed: got"):
        unpack_mask(packed, Layout.of(torch.zeros(9)))
    with pytest.raises(TypeError, match="mask: got"):
        pack_mask(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="grad: got shape"):
        mask_multiply(pack_mask(torch.zeros(8)), Layout.of(torch.zeros(8)), torch.zeros(1, 8))


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS.keys())
def test_masks_round_trip_at_one_bit_an_element(make):
    torch.manual_seed(0)
    x = make().detach()
    layout = Layout.of(x)
    mask = x > 0
    packed = pack_mask(x)
    assert packed.numel() == -(-layout.numel // 8)
    assert torch.equal(unpack_mask(packed, layout), mask)
    assert unpack_mask(packed, layout).stride() == x.stride()
    assert torch.equal(unpack_mask(pack_mask(mask), Layout.of(mask)), mask)


@pytest.mark.parametrize("name, dtype", taking_turns(list(TENSORS), DTYPES), ids=str)
def test_mask_multiply_is_torchs_backward_of_relu(name: str, dtype: torch.dtype):
    torch.manual_seed(0)
    x = TENSORS[name]().detach().to(dtype)
    layout, packed = Layout.of(x), pack_mask(x)
    same_layout = layout.restore(torch.randn(layout.numel, dtype=dtype))
    gaps = torch.randn((*x.shape, 2), dtype=dtype)[..., 0]
    for grad in (same_layout, torch.randn(x.shape, dtype=dtype), gaps, torch._neg_view(torch.randn_like(x))):
        for slope, name in ((0.0, "threshold_backward"), (0.2, "leaky_relu_backward")):
            if slope:
                expected = torch.ops.aten.leaky_relu_backward(grad, x, slope, False)
            else:
                expected = torch.ops.aten.threshold_backward(grad, x, 0)
            result = mask_multiply(packed, layout, grad, negative_slope=slope)
            assert torch.equal(result, expected), name
            in_place = grad.resolve_neg().clone()
            assert mask_multiply(packed, layout, in_place, slope, overwrites=True) is in_place
            assert torch.equal(in_place, expected) and in_place._version > 0, name


def test_mask_of_nan_and_masked_infinite_gradient_follow_torch():
    x = torch.tensor([float("nan"), -1.0, 1.0, -1.0])
    grad = torch.tensor([2.0, float("inf"), 3.0, float("nan")])
    result = mask_multiply(pack_mask(x), Layout.of(x), grad)
    assert torch.equal(result, torch.ops.aten.threshold_backward(grad, x, 0))
    assert result.tolist() == [2.0, 0.0, 3.0, 0.0]
