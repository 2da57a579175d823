"""Blocks beyond element 2^31, without the memory: addresses are shifted so that one block falls on a buffer."""

from __future__ import annotations

import ctypes

import pytest
import torch

from brevact.cpu_kernels.floats import KINDS
from brevact.cpu_kernels.levels import look_up_blocks, map_levels_blocks
from brevact.cpu_kernels.uniform import GroupTable, dequantize_blocks, quantize_blocks
from brevact.geometry import Geometry, Place, Segments
from brevact.quantizers import Layout, UniformQuantizer
from brevact.quantizers.reference import calibrate, column_bits, pack, round_codes

BLOCK = 512


@pytest.mark.parametrize("first_block", [0, 2**22, 2**23 + 5, 2**36])  # elements up to 2^45: columns beyond 2^32
@pytest.mark.parametrize("bit_width", [2, 5, 8])
def test_quantize_blocks_far_into_a_tensor(first_block: int, bit_width: int):
    torch.manual_seed(0)
    first, seed = first_block * BLOCK, 99
    x, quantizer = torch.randn(BLOCK), UniformQuantizer(bit_width=bit_width)
    numel = first + BLOCK
    table = GroupTable(Geometry(numel, bit_width, BLOCK, BLOCK, first_block + 1, True), torch.float32, True)
    codes = torch.zeros(BLOCK * bit_width // 8, dtype=torch.uint8)
    scale, minimum = torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1)
    pointers = (
        codes.data_ptr() - first // 8 * bit_width,
        scale.data_ptr() - 2 * first_block,
        minimum.data_ptr() - 4 * first_block,
    )
    quantize_blocks(x.data_ptr() - 4 * first, *pointers, seed, table.address, 0, first_block, first_block + 1)

    m, s, _ = calibrate(x, quantizer.geometry(Layout.of(x)), torch.bfloat16, torch.float32)
    assert torch.equal(scale, s) and torch.equal(minimum, m)
    s = s.float()
    steps = ((x - m) * (torch.ones_like(s) / s)).clamp(0, 2**bit_width - 1)
    bits = column_bits(torch.arange(first // 8, numel // 8), torch.tensor(seed)).flatten()
    q = round_codes(steps, bits).clamp(max=2**bit_width - 1)
    assert torch.equal(codes, pack(q, bit_width, BLOCK))

    y = torch.full((BLOCK,), float("nan"))
    dequantize_blocks(*pointers, 0, y.data_ptr() - 4 * first, table.address, 0, 0, first_block, first_block + 1)
    assert torch.equal(y, m + s * q)


@pytest.mark.parametrize("first_block", [0, 2**22, 2**23 + 5, 2**36])
def test_tables_far_into_a_tensor(first_block: int):
    torch.manual_seed(0)
    first, bit_width, run = first_block * BLOCK, 3, 200
    numel = first + BLOCK
    geometry = Geometry(numel, bit_width, BLOCK, BLOCK, first_block + 1, True)
    table, segments = GroupTable(geometry, torch.float32, False), Segments.of(geometry, Place(run, 1, 1, 1))
    words = (ctypes.c_int64 * 4)(*segments)
    element, first_run = torch.arange(first, numel), first // run
    runs = int(element[-1]) // run - first_run + 1
    factor, m, s = torch.rand(runs), torch.randn(1), torch.rand(1).bfloat16()
    norm = (ctypes.c_int64 * 6)(0, factor.data_ptr() - 4 * first_run, run, 1, 1, 1)
    values = torch.full((segments.slots, 8), float("nan"))
    at = values.data_ptr() - 4 * 8 * segments.slots * first_block
    metadata = s.data_ptr() - 2 * first_block, m.data_ptr() - 4 * first_block
    addresses = ctypes.addressof(norm), ctypes.addressof(words)
    map_levels_blocks(*metadata, *addresses, at, KINDS[torch.float32], table.address, first_block, first_block + 1)
    slots = torch.arange(segments.slots).clamp(max=runs - 1)
    assert torch.equal(values, (m + s.float() * torch.arange(8)) * factor[slots, None])

    q = torch.randint(8, (BLOCK,))
    codes, y = pack(q, bit_width, BLOCK), torch.full((BLOCK,), float("nan"))
    pointers = codes.data_ptr() - first // 8 * bit_width, ctypes.addressof(words), at, 0, 0, y.data_ptr() - 4 * first
    look_up_blocks(*pointers, table.address, first_block, first_block + 1)
    assert torch.equal(y, values[element // run - first_run, q])
