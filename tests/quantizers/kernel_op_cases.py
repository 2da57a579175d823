"""Arguments of every kernel op, and the comparison of a launcher with the reference of its name."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from brevact.cpu_kernels import launch as launch_on_cpu
from brevact.geometry import Grid, IntegerPlan, Place, Segments, UniformPlan, packed_bytes
from brevact.quantizers import Layout, PackedSpec, ResidualQuantizer, UniformQuantizer, integer_ops, kernel_ops
from brevact.quantizers.backends import without_kernels
from brevact.quantizers.formats.uniform import plan_of
from tests.quantizers.grid_cases import buckets, random_grid, values_around

REFERENCES = {
    name: value.reference
    for module in (kernel_ops, integer_ops)
    for name, value in vars(module).items()
    if hasattr(value, "reference")
}
NAMES = tuple(REFERENCES)
SEED = -0x123456789ABCDEF
_N = 1095


@dataclass(frozen=True)
class Unwritten:
    """An array that the op writes."""

    numel: int
    dtype: torch.dtype = torch.uint8
    pattern: int = 0xFF
    shape: tuple[int, ...] | None = None


def arguments_of(name: str) -> list[tuple[Any, ...]]:
    torch.manual_seed(0)
    x, other = torch.randn(_N) * 3 + 1, torch.linspace(-3, 5, _N)
    x[7], x[300], x[301] = float("nan"), float("inf"), 0.0
    if name in ("pack_codes", "unpack_codes"):
        codes, packed = torch.randint(0, 2**31, (_N,)), torch.randint(0, 256, (packed_bytes(_N, 5, 600),)).byte()
        calls = (codes, 5, 600, Unwritten(packed.numel())), (packed, 5, 600, Unwritten(_N, torch.int32))
        return [calls[name == "unpack_codes"]]
    if name in ("pack_mask", "unpack_mask", "mask_multiply"):
        packed = torch.randint(0, 256, (packed_bytes(_N, 1, 512),)).byte()
        if name == "pack_mask":
            return [(source, Unwritten(packed.numel())) for source in (x, x.bfloat16(), x > 0)]
        if name == "unpack_mask":
            return [(packed, Unwritten(_N, torch.bool))]
        return [(packed, _N, y, slope, Unwritten(_N, y.dtype)) for y in (x, x.half()) for slope in (0.0, -0.3)]
    if name.startswith(("fake_quantize", "decode_integers")):
        return _of_integers(name)
    if name.endswith("_grid"):
        return _of_groups(name, other)
    return _of_uniform(name, x, other)


def _of_groups(name: str, other: Tensor) -> list[tuple[Any, ...]]:
    geometry = buckets(_N, 3, 100)
    grid = random_grid(8)
    x = values_around(grid, _N, torch.float32)
    if name == "quantize_grid":
        return [(x, geometry, grid, seed, Unwritten(geometry.code_bytes)) for seed in (None, SEED, torch.tensor(SEED))]
    codes = torch.empty(geometry.code_bytes, dtype=torch.uint8)
    kernel_ops.quantize_grid.reference(x, geometry, grid, SEED, codes)
    return [(codes, geometry, grid, factor, Unwritten(_N, torch.float32)) for factor in (None, other)]


def _of_integers(name: str) -> list[tuple[Any, ...]]:
    """Ends, one scale and one for each of some groups, with a ReLU in front or not."""
    return [call for number in range(3) for call in _of_ends(name, number)]


def _of_ends(name: str, number: int) -> list[tuple[Any, ...]]:
    ends = ((4, 0, 15, False), (4, -7, 7, True), (8, -128, 127, False), (2, -2, 1, False), (3, -3, 3, True))
    calls: list[tuple[Any, ...]] = []
    of_float32 = (_N, _N, 1), (_N, 73, 15), (2048, 1, 8), (_N, 73, 5), (1600, 64, 5)
    divisions = *of_float32, (_N, _N, 1), (_N, 73, 5), (1600, 1, 8)
    types = *[torch.float32] * len(of_float32), torch.bfloat16, torch.float16, torch.bfloat16
    for place, ((numel, inner, groups), dtype) in enumerate(zip(divisions, types, strict=True)):
        bit_width, lowest, highest, spare = ends[(number + place) % len(ends)]
        rectifies, clips = bool(place % 2), bool((number + place) % 3)
        plan = IntegerPlan(numel, bit_width, lowest, highest, rectifies, clips, spare, inner, groups)
        x, scale = (torch.randn(numel) * highest).to(dtype), torch.rand(groups) + 0.3
        scale = scale.to(dtype) if groups > 1 else scale
        x[:6] = torch.tensor((0.0, -0.0, 0.5, -0.5, -1.5, float("nan") if spare or name == "fake_quantize" else 1.0))
        zero_point = torch.randint(0, highest + 1, (groups,)).to(dtype) if place in (1, 7) else torch.zeros(1)
        residual_of = ResidualQuantizer(bit_width=2 + (number + place) % 7)
        sizes = [packed_bytes(numel, width, 512) for width in (bit_width, 1, residual_of.bit_width)]
        floats, one = Unwritten(numel, dtype), Unwritten(1, pattern=0)
        given = plan, scale, zero_point
        if name == "fake_quantize":
            masked = x, *given, None, None, floats, floats if rectifies else None, *map(Unwritten, sizes[:2]), None, one
            kept = x, *given, residual_of, SEED, floats, None, Unwritten(sizes[0]), None, Unwritten(sizes[2]), one
            calls += [masked, kept, (x, *given, None, None, floats, *[None] * 5)]
            of_two_bits = ResidualQuantizer(bit_width=2), SEED, floats, None, Unwritten(sizes[0]), None
            calls.append(
                (x, plan._replace(clips=True), *given[1:], *of_two_bits, Unwritten(packed_bytes(numel, 2, 512)), one)
            )
            continue
        out, codes, mask, residual, missing = (torch.zeros(size, dtype=dtype) for size in (numel, *sizes, 1))
        packed = codes.byte(), mask.byte(), residual.byte()
        missing = missing.byte()
        integer_ops.fake_quantize.reference(x, *given, residual_of, SEED, out, None, *packed, missing)
        if name == "decode_integers":
            calls.append((packed[0], *given, floats))
            continue
        grad, x = torch.randn(numel).to(dtype), x.relu() if rectifies else x
        for rows in (2, 4):  # of zero points that learn, too
            terms = Unwritten(rows * numel, dtype, shape=(rows, -1))
            parts = Unwritten(64 * rows * -(-numel // 512), torch.float32, shape=(rows, -1))
            calls += [
                (grad, *given, None, None, None, x, None, floats, terms, None),
                (grad, *given, None, None, None, x, None, floats, None, parts),
                (grad, *given, residual_of, packed[0], None, None, packed[2], floats, terms, None),
                (grad, *given, residual_of, packed[0], None, None, packed[2], floats, None, parts),
            ]
        calls += [
            (grad, *given, None, None, packed[1], None, None, floats, None, None),
            (grad, *given, None, None, packed[1], None, None, floats, terms, None),
        ]
    return calls


def _of_uniform(name: str, x: Tensor, other: Tensor) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []
    mean, factor, place = torch.randn(15), torch.rand(15), Place(219, 3, 219, 73)
    bits = torch.randint(0, 256, (packed_bytes(_N, 1, 512),)).byte()
    of_segments = name in ("map_levels", "look_up")
    sizes = (64, 100, 256) if of_segments else (64, 100, 512)
    quantizers: list[Any] = [UniformQuantizer(bit_width=3, bucket_size=bucket_size) for bucket_size in sizes]
    for quantizer in quantizers + [quantizers[0].for_smooth] * of_segments:
        spec = PackedSpec.of(quantizer, Layout.of(x))
        plan, buffer = plan_of(spec), torch.zeros(spec.nbytes, dtype=torch.uint8)
        kernel_ops.quantize_uniform.reference(x, plan, SEED, None, None, None, buffer)
        empty, target = Unwritten(spec.nbytes, pattern=0), Unwritten(_N, torch.float32)
        if of_segments:
            calls += _of_segments(name, buffer, plan, mean, factor, other)
            continue
        calls += {
            "quantize_uniform": [
                *((x, plan, seed, None, None, None, empty) for seed in (None, SEED, torch.tensor(SEED))),
                *((x, plan, SEED, m, factor, place, empty) for m in (None, mean)),
            ],
            "dequantize_uniform": [
                *((buffer, plan, None, None, None, each, None, target) for each in (None, other)),
                *(
                    (buffer, plan, m, factor, place, addend, mask, target)
                    for m, addend, mask in (
                        (None, None, None),
                        (mean, other, None),
                        (None, None, bits),
                        (mean, other, bits),
                    )
                ),
            ],
        }[name]
    return calls


def _of_segments(
    name: str, buffer: Tensor, plan: UniformPlan, mean: Tensor, factor: Tensor, other: Tensor
) -> list[tuple[Any, ...]]:
    """Segments in every relation of the groups' runs to those of the statistics."""
    calls: list[tuple[Any, ...]] = []
    places = (None, Place(219, 3, 219, 73), Place(128, 1, 1, 1), Place(365, 1, 1, 1), Place(_N, 1, _N, _N))
    types = (torch.float32, torch.bfloat16, torch.float16)
    for number, place in enumerate(places):
        segments = Segments.of(plan.geometry, place)
        size = segments.rows << plan.geometry.bit_width
        if name == "map_levels":
            for k, dtype in enumerate(types):
                affine = (None, None) if place is None else (mean if (number + k) % 2 else None, factor)
                table = Unwritten(size, types[(number + k) % 3], shape=(segments.rows, -1))
                calls.append((buffer, plan, dtype, *affine, place, segments, table))
            continue
        values = torch.randn(segments.rows, size // segments.rows)
        factors = (None, *(other.to(dtype) for dtype in types))
        for k, kind in enumerate(types):
            calls.append((buffer, plan, segments, values, factors[(number + k) % 4], Unwritten(_N, kind)))
    return calls


#: Passes whose definitions are ops of torch on the device: sums, and numbers of another type, are its own there.
_ON_DEVICE = frozenset(("fake_quantize", "fake_quantize_backward", "decode_integers"))


def _has_16_bits(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16)


def check_kernel_op(
    name: str, launchers: ModuleType, device: torch.device | str = "cpu", most: int | None = None
) -> None:
    """A launcher has the parameters of its reference, writes and returns the same, and leaves the same alone."""
    reference, launch = REFERENCES[name], getattr(launchers, name)
    assert list(inspect.signature(launch).parameters) == list(inspect.signature(reference).parameters)
    calls = arguments_of(name)
    for arguments in calls[:: max(-(-len(calls) // (most or len(calls))), 1)]:
        there, here = _placed(arguments, device), _placed(arguments, device if name in _ON_DEVICE else "cpu")
        with without_kernels():
            returned, expected = launch(*there), reference(*here)
        is_of_integers = any(isinstance(each, IntegerPlan) for each in arguments)
        if is_of_integers and launchers is launch_on_cpu and any(map(_has_16_bits, there)):
            assert returned is NotImplemented  # integers of these types have no kernel on a CPU
            continue
        assert returned is not NotImplemented
        found = [x for x in there if isinstance(x, Tensor)] + list(_tensors(returned))
        wanted = [x for x in here if isinstance(x, Tensor)] + list(_tensors(expected))
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got.cpu(), want.cpu(), rtol=0, atol=0, equal_nan=True)


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return () if result is None else (result,) if isinstance(result, Tensor) else result


def _placed(arguments: tuple[Any, ...], device: torch.device | str) -> list[Any]:
    placed = []
    for argument in arguments:
        if isinstance(argument, Unwritten):
            memory = torch.full((argument.numel * argument.dtype.itemsize,), argument.pattern, dtype=torch.uint8)
            shape = argument.shape or (argument.numel,)
            argument = memory.to(device).view(argument.dtype).view(shape)
        elif isinstance(argument, Grid):
            argument = Grid(argument.levels.to(device), marks=argument.marks)
        placed.append(argument.to(device, copy=True) if isinstance(argument, Tensor) else argument)
    return placed
