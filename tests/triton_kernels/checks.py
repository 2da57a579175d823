"""What every launch has to do, on any device: give the reference's bytes, and write every byte of its results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from brevact import triton_kernels
from brevact.geometry import DEFAULT_BLOCK, Geometry, Grid, packed_bytes
from brevact.quantizers import (
    Layout,
    PackedSpec,
    UniformQuantizer,
    kernel_ops,
    normalizing,
    normalizing_plans,
    reference,
)
from brevact.quantizers.formats.uniform.quantizer import plan_of
from brevact.triton_kernels.launch import one_pass
from brevact.triton_kernels.normalize import fits
from tests.quantizers.grid_cases import GridCase
from tests.quantizers.same_values import assert_same_values

SEED = -0x123456789ABCDEF


def filled(length: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A tensor whose unwritten bytes show: NaN in every floating-point type."""
    return torch.full((length * dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device).view(dtype)


def check_quantizer(quantizer: UniformQuantizer, x: Tensor, seed: int = SEED, multiply: bool = True) -> None:
    spec = PackedSpec.of(quantizer, Layout.of(x))
    plan, flat = plan_of(spec), spec.layout.flatten(x)
    seed = seed if quantizer.is_stochastic else None
    expected, values = torch.zeros(spec.nbytes, dtype=torch.uint8), torch.empty_like(flat, device="cpu")
    kernel_ops.quantize_uniform.reference(flat.cpu(), plan, seed, expected)
    kernel_ops.dequantize_uniform.reference(expected, plan, None, values)

    buffer = filled(spec.nbytes, torch.uint8, x.device)
    triton_kernels.quantize_uniform(flat, plan, seed, buffer)
    for name, got, want in zip(("codes", "minimum", "scale"), plan.split(buffer), plan.split(expected), strict=True):
        assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8)), (name, quantizer, spec.layout)
    target = filled(flat.numel(), x.dtype, x.device)
    if multiply:
        target.copy_(torch.linspace(-3, 5, flat.numel()))
        values = values * target.cpu()
    triton_kernels.dequantize_uniform(buffer, plan, target if multiply else None, target)
    assert_same_values(target, values)


def check_normalized(
    quantizer: UniformQuantizer, x: Tensor, mean: Tensor | None, invstd: Tensor, device: torch.device | str = "cpu"
) -> None:
    layout = Layout.of(x)
    reference = quantizer.quantize(normalizing.normalize(x, mean, invstd), SEED)
    plan = plan_of(reference.spec)
    there = [None if part is None else part.to(device) for part in (mean, invstd, invstd.reciprocal())]
    seed = torch.tensor(SEED, device=device) if quantizer.is_stochastic else None
    norm = normalizing_plans.groups_of(layout, there[0], there[1])
    assert one_pass(plan.geometry) and fits(norm[2], layout.numel)
    buffer = filled(reference.spec.nbytes, torch.uint8, device)
    triton_kernels.quantize_normalized(layout.flatten(x).to(device), plan, seed, *norm, buffer)
    for part, want in zip(plan.split(buffer), plan.split(reference.buffer), strict=True):
        assert torch.equal(part.cpu().view(torch.uint8), want.view(torch.uint8)), (quantizer, layout)
    for shift in {there[0], None}:
        target = filled(layout.numel, x.dtype, device)
        norm = normalizing_plans.groups_of(layout, shift, there[2])
        triton_kernels.denormalize(buffer, plan, *norm, None, None, target)
        values = reference.dequantize() * invstd.reciprocal()
        values = values if shift is None else values + mean
        values = values.clamp(-65504, 65504) if x.dtype is torch.float16 else values
        assert_same_values(target, layout.flatten(values.to(x.dtype).as_strided(layout.shape, values.stride())))


def check_grid(case: GridCase, device: torch.device | str = "cpu") -> None:
    geometry, grid, dtype = case.geometry, case.grid, case.x.dtype
    expected, values = torch.empty(geometry.code_bytes, dtype=torch.uint8), torch.empty_like(case.x)
    kernel_ops.quantize_grid.reference(case.x, geometry, grid, case.seed, expected)
    kernel_ops.dequantize_grid.reference(expected, geometry, grid, None, values)
    parts = (grid.levels, grid.bounds, grid.offset, grid.scale)
    there = Grid(*(None if part is None else part.to(device) for part in parts), grid.marks)
    codes = filled(expected.numel(), torch.uint8, device)
    triton_kernels.quantize_grid(case.x.to(device), geometry, there, case.seed, codes)
    assert torch.equal(codes.cpu(), expected), (geometry, case.seed, dtype)
    target = filled(geometry.numel, dtype, device)
    if case.multiply:
        target.copy_(torch.linspace(-3, 5, geometry.numel))
        values = values * target.cpu()
    triton_kernels.dequantize_grid(codes, geometry, there, target if case.multiply else None, target)
    assert_same_values(target, values)


def check_statistics(x: Tensor, geometry: Geometry, device: torch.device | str = "cpu") -> None:
    there = x.to(device)
    offset, inverse = torch.randn(geometry.groups), torch.rand(geometry.groups) * 1e4
    inverse[::7] *= 1e4
    with unwritten_shows():
        found = triton_kernels.ranges(there, geometry)
        sums = triton_kernels.moments(there, geometry, offset.to(device), inverse.to(device))
    for got, want in zip(found, kernel_ops.ranges.reference(x, geometry), strict=True):
        assert_same_values(got, want)
    assert torch.equal(sums.cpu(), kernel_ops.moments.reference(x, geometry, offset, inverse))


@contextlib.contextmanager
def unwritten_shows() -> Iterator[None]:
    """Fill fresh memory: `torch.empty` gives NaN and the largest integers."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def check_codes(codes: Tensor, bit_width: int, block_size: int) -> None:
    expected = reference.pack(codes.cpu(), bit_width, block_size)
    packed = filled(packed_bytes(codes.numel(), bit_width, block_size), torch.uint8, codes.device)
    triton_kernels.pack_codes(codes, bit_width, block_size, packed)
    assert torch.equal(packed.cpu(), expected)
    for dtype in (torch.int32, torch.int64)[bit_width == 32 :]:
        unpacked = filled(codes.numel(), dtype, codes.device)
        triton_kernels.unpack_codes(packed, bit_width, block_size, unpacked)
        assert torch.equal(unpacked.cpu(), (codes.cpu().to(torch.int64) & ((1 << bit_width) - 1)).to(dtype))


def check_mask(x: Tensor, grad: Tensor, negative_slope: float) -> None:
    """Masks of a tensor, packed from it or from bools, unpacked and multiplied, equal torch."""
    mask = ~(x <= 0)
    expected = reference.pack(mask.cpu().to(torch.uint8), 1, DEFAULT_BLOCK)
    for source in (x, mask):
        packed = filled(expected.numel(), torch.uint8, x.device)
        triton_kernels.pack_mask(source, packed)
        assert torch.equal(packed.cpu(), expected)
    unpacked = filled(x.numel(), torch.bool, x.device)
    triton_kernels.unpack_mask(packed, unpacked)
    assert torch.equal(unpacked.cpu().view(torch.uint8), mask.cpu().to(torch.uint8))
    result = filled(x.numel(), grad.dtype, x.device)
    triton_kernels.mask_multiply(packed, x.numel(), grad, negative_slope, result)
    other = grad * negative_slope if negative_slope else torch.zeros_like(grad)
    assert_same_values(result, torch.where(mask, grad, other).cpu())
    triton_kernels.mask_multiply(packed, x.numel(), result, negative_slope, result)
    assert_same_values(result, torch.where(mask, grad, other * negative_slope if negative_slope else other).cpu())
