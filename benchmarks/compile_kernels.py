"""Compile the Triton kernels without a GPU; print each one's registers, spills, shared memory and barriers.

    python -m benchmarks.compile_kernels --targets sm_90 --bit-widths 2 4

Launches are built for tensors on the meta device, so the kernels are those that a GPU runs. The exit status is 1 if a
kernel spills registers, or if one whose tensors are aligned moves a plane of elements in other than 128-bit accesses
(64-bit ones of AMD's warps, which are twice as wide).
Columns `loads` and `stores` count the instructions on global memory by width in bits; they include those of the ragged
last block, which are narrow. `alu` counts the instructions an element that run at half rate (integers, comparisons,
selections, extremes, logic) and `instructions` all of them, on the path of whole blocks without anything rare, on
NVIDIA's GPUs. `spills` counts accesses to local memory (NVIDIA) or to scratch memory (AMD). For gfx942
all of it comes from the assembly and its metadata: nothing needs the device.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from benchmarks.offline_compiler import Launch, collected, compile_launch, resources
from benchmarks.records import append_rows, print_table
from brevact import triton_kernels
from brevact.geometry import DEFAULT_BLOCK, Grid, IntegerPlan, Place, Segments
from brevact.quantizers import Granularity, Layout, PackedSpec, ResidualQuantizer, UniformQuantizer
from brevact.quantizers.formats.uniform import plan_of
from brevact.triton_kernels.launch import WARP, WIDEST_ACCESS, Program

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BIT_WIDTHS = range(1, 9)
GRID_OPERATIONS = ("grid_nearest", "grid_stochastic", "grid_dequantize")
NORM_OPERATIONS = ("normalize", "denormalize", "denormalize_add")
TABLE_OPERATIONS = ("map_levels", "look_up", "look_up_multiply")
INTEGER_OPERATIONS = ("fake_quantize", "fake_quantize_backward", "decode_integers")
OPERATIONS = (
    *("nearest", "stochastic", "dithered", "dequantize", "dequantize_multiply"),
    *NORM_OPERATIONS,
    *TABLE_OPERATIONS,
    *("stretched_dithered", "stretched_dequantize"),
    *("masks", "codes"),
    *GRID_OPERATIONS,
    *INTEGER_OPERATIONS,
)
BUCKETS = ("512", "64", "16", "100", "4096", "tensor", "channel", "channels_last", "huge")
"""Bucket sizes; groups of integers' scales and of levels; and "huge": the default size in a tensor of 2^31 elements."""

Row = dict[str, object]


@dataclass(frozen=True)
class Variant:
    """One line of the table."""

    target: str
    operation: str
    dtype: str
    bit_width: int
    bucket: str

    @property
    def exists(self) -> bool:
        """Whether kernels run: dithered buckets lie in blocks, others in tiles."""
        if self.operation.endswith("dithered"):
            return self.bucket in ("512", "64", "16", "100", "4096", "huge")
        return (
            self.bucket.isdigit() or self.bucket == "huge" or self.operation in (*GRID_OPERATIONS, *INTEGER_OPERATIONS)
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", choices=TARGETS, nargs="+", default=list(TARGETS))
    parser.add_argument("--operations", choices=OPERATIONS, nargs="+", default=list(OPERATIONS))
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--bit-widths", type=int, choices=BIT_WIDTHS, nargs="+", default=list(BIT_WIDTHS))
    parser.add_argument("--buckets", choices=BUCKETS, nargs="+", default=list(BUCKETS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: %(default)s)")
    parser.add_argument("--csv", help="append the rows to this file")
    options = parser.parse_args(arguments)
    grid = (options.targets, options.operations, options.dtypes, options.bit_widths, options.buckets)
    variants = [variant for values in itertools.product(*grid) if (variant := Variant(*values)).exists]
    found = itertools.chain.from_iterable(_in_processes(variants, options.jobs))
    rows = list({tuple(row.items()): row for row in found}.values())  # masks, say, do not depend on the bucket size
    print_table(rows)
    if options.csv:
        append_rows(rows, options.csv)
    failures = sum(row["problem"] != "" for row in rows)
    print(f"{len(rows)} kernels with Triton {triton.__version__}, {failures} with a problem")
    return int(failures > 0)


def _in_processes(variants: list[Variant], jobs: int) -> Iterator[list[Row]]:
    """The rows of each variant, compiled by several processes, or by this one."""
    if jobs == 1:
        yield from map(_rows, variants)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        yield from pool.map(_rows, variants)


def _rows(variant: Variant) -> list[Row]:
    target, rows = TARGETS[variant.target], []
    widest = 8 * WIDEST_ACCESS * WARP // target.warp_size
    for launch, loads, stores in _launches(variant):
        needs = resources(compile_launch(launch, target), target)
        problems = ["spills"] * (needs["spills"] != 0)
        for kind, least in (("loads", loads), ("stores", stores)):
            wide = sum(count for bits, count in needs[kind].items() if bits >= widest)
            problems += [f"narrow {kind}"] * (wide < least)
        rows.append(
            {
                "target": variant.target,
                "kernel": launch.program.kernel.__name__,
                "dtype": variant.dtype,
                "threads": launch.program.threads,
                "constants": ",".join(f"{name}={int(value)}" for name, value in launch.program.constants.items()),
                "multiplies": int(_multiplies(launch)),
                "int64": int(any(isinstance(value, int) and value >= 2**31 for value in launch.arguments)),
                **_an_element(launch.program, needs.get("path")),
                **{name: needs[name] for name in ("registers", "spills", "shared", "barriers")},
                "loads": _widths(needs["loads"]),
                "stores": _widths(needs["stores"]),
                "problem": " and ".join(problems),
            }
        )
    return rows


def _an_element(program: Program, path: collections.Counter[str] | None) -> Row:
    """Instructions an element where programs hold whole blocks, of 8 planes of 128-bit accesses."""
    elements = program.constants.get("ROWS", 0) * program.constants.get("BLOCK", DEFAULT_BLOCK) / program.threads
    if not path or not elements:
        return {"alu": "", "instructions": ""}
    return {"alu": f"{path['alu'] / elements:.1f}", "instructions": f"{sum(path.values()) / elements:.1f}"}


def _multiplies(launch: Launch) -> bool:
    names = launch.program.kernel.arg_names  # constants come last
    return "other_ptr" in names and launch.arguments[names.index("other_ptr")] is not None


def _launches(variant: Variant) -> Iterator[tuple[Launch, int, int]]:
    """Launches of a variant, each with its least numbers of widest loads and stores: one per plane."""
    if variant.operation == "masks":
        yield from _mask_launches(DTYPES[variant.dtype])
    elif variant.operation == "codes":
        yield from _code_launches(variant.bit_width)
    elif variant.operation in GRID_OPERATIONS:
        yield from _grid_launches(variant)
    elif variant.operation in INTEGER_OPERATIONS:
        yield from _integer_launches(variant)
    elif variant.operation in NORM_OPERATIONS:
        yield from _norm_launches(variant)
    elif variant.operation in TABLE_OPERATIONS:
        yield from _table_launches(variant)
    else:
        yield from _uniform_launches(variant)


def _mask_launches(dtype: torch.dtype) -> Iterator[tuple[Launch, int, int]]:
    x, bools, packed = _meta(1 << 20, dtype), _meta(1 << 20, torch.bool), _meta(1 << 17, torch.uint8)
    with collected() as launches:
        for source in (x, bools):
            triton_kernels.pack_mask(source, packed)
        triton_kernels.unpack_mask(packed, bools)
        for slope in (0.0, 0.1):
            triton_kernels.mask_multiply(packed, x.numel(), x, slope, x)
    yield from zip(launches, (8, 8, 0, 8, 8), (0, 0, 8, 8, 8), strict=True)


def _code_launches(bit_width: int) -> Iterator[tuple[Launch, int, int]]:
    packed = _meta((1 << 17) * bit_width, torch.uint8)
    for dtype in (torch.uint8, torch.int32, torch.int64):
        codes = _meta(1 << 20, dtype)
        with collected() as launches:
            triton_kernels.pack_codes(codes, bit_width, 512, packed)
            if dtype != torch.uint8:
                triton_kernels.unpack_codes(packed, bit_width, 512, codes)
        for launch, loads in zip(launches, (8, 0), strict=False):
            yield launch, loads, 8 - loads


def _uniform_launches(variant: Variant) -> Iterator[tuple[Launch, int, int]]:
    quantizer, x = _subject(variant)
    spec = PackedSpec.of(quantizer, Layout.of(x))
    plan, buffer = plan_of(spec), spec.empty(x)
    if "dequantize" in variant.operation:
        other = x if variant.operation == "dequantize_multiply" else None
        with collected() as launches:
            triton_kernels.dequantize_uniform(buffer, plan, None, None, None, other, None, x)
        (launch,) = launches
        aligned = launch.program.constants["ROWS"] > 0
        yield launch, 8 * aligned * (other is not None), 8 * aligned
        return
    with collected() as launches:
        triton_kernels.quantize_uniform(x, plan, _seed(quantizer.is_stochastic), None, None, None, buffer)
    for launch in launches:
        yield launch, 8 * (launch.program.constants["ROWS"] > 0), 0


def _norm_launches(variant: Variant) -> Iterator[tuple[Launch, int, int]]:
    """A layer norm's rows, a batch norm's channels of maps and of maps of 28x28, and channels behind each other."""
    if not variant.bucket.isdigit():
        return
    quantizer, x = _subject(variant)
    spec = PackedSpec.of(quantizer, Layout.of(x))
    plan, buffer = plan_of(spec), spec.empty(x)
    maps = (Place(x.numel(), 64, 64 * size, size) for size in (1 << 12, 28 * 28, 1))
    for place in (Place(1024, 1, 1, 1), *maps):
        statistics = _meta(x.numel() // place.outer * place.row, torch.float32)
        decodes = variant.operation != "normalize"
        addend = x if variant.operation == "denormalize_add" else None
        with collected() as launches:
            if decodes:
                triton_kernels.dequantize_uniform(buffer, plan, None, statistics, place, addend, None, x)
            else:
                triton_kernels.quantize_uniform(x, plan, _seed(True), statistics, statistics, place, buffer)
        (launch,) = launches
        wide = 8 * (launch.program.constants["ROWS"] > 0)
        yield launch, 0 if decodes and addend is None else wide, wide if decodes else 0


def _table_launches(variant: Variant) -> Iterator[tuple[Launch, int, int]]:
    """No affine map, a batch norm's channels of maps, and of maps whose planes lie in several segments."""
    if variant.bit_width > 4:
        return
    quantizer, x = _subject(variant)
    spec = PackedSpec.of(quantizer, Layout.of(x))
    plan, buffer, numel = plan_of(spec), spec.empty(x), x.numel()
    for place in (None, Place(numel, 64, 64 * 4096, 4096), Place(numel, 64, 64 * 196, 196)):
        segments = Segments.of(plan.geometry, place)
        factor = None if place is None else _meta(64, torch.float32)
        for dtype in DTYPES.values():
            table = _meta((segments.rows, 1 << variant.bit_width), dtype)
            other = _meta(numel, dtype) if variant.operation == "look_up_multiply" else None
            with collected() as launches:
                if variant.operation == "map_levels":
                    triton_kernels.map_levels(buffer, plan, x.dtype, factor, factor, place, segments, table)
                else:
                    triton_kernels.look_up(buffer, plan, segments, table.float(), other, x)
            for launch in launches:
                aligned = launch.program.constants.get("ROWS", 0) > 0
                wide = 8 * (aligned and other is not None and other.itemsize >= x.itemsize)
                yield launch, wide, 8 * aligned
            if variant.operation == "look_up":
                break


def _grid_launches(variant: Variant) -> Iterator[tuple[Launch, int, int]]:
    if variant.bit_width > 8 or variant.bucket != "tensor":
        return
    quantizer, x = _subject(variant)
    spec = PackedSpec.of(quantizer, Layout.of(x))
    geometry, size = dataclasses.replace(quantizer.geometry(spec.layout), block_size=512), 1 << variant.bit_width
    grid = Grid(_meta((1, size), torch.float32))
    codes, decodes = spec.split(spec.empty(x))[0], variant.operation == "grid_dequantize"
    with collected() as launches:
        if decodes:
            triton_kernels.dequantize_grid(codes, geometry, grid, None, x)
        else:
            triton_kernels.quantize_grid(x, geometry, grid, _seed(variant.operation == "grid_stochastic"), codes)
    (launch,) = launches
    yield launch, 0 if decodes else 8, 8 if decodes else 0


def _integer_launches(variant: Variant) -> Iterator[tuple[Launch, int, int]]:
    """One scale, or one for each channel, of activations behind a ReLU that keep a mask, residuals, or themselves."""
    by_channel = variant.bucket.startswith("channel")
    if variant.bit_width > 8 or not (by_channel or variant.bucket in ("tensor", "huge")):
        return
    _, x = _subject(variant)
    layout = Layout.of(x)
    inner, groups = layout.groups_along(1) if by_channel else (x.numel(), 1)
    top = 2**variant.bit_width - 1
    plan = IntegerPlan(x.numel(), variant.bit_width, 0, top, True, True, False, inner, groups)
    scale, zero, packed = (
        _meta(groups, x.dtype if by_channel else torch.float32),
        _meta((), torch.float32),
        _meta(x.numel(), torch.uint8),
    )
    flag, parts = _meta(1, torch.uint8), _meta((2, -(-x.numel() // 512) * 64), torch.float32)
    residual_of, terms = ResidualQuantizer(bit_width=2), _meta((2, x.numel()), x.dtype)
    given = x, plan, scale, zero
    with collected() as launches:
        if variant.operation == "decode_integers":
            triton_kernels.decode_integers(packed, plan, scale, zero, x)
        elif variant.operation == "fake_quantize":
            triton_kernels.fake_quantize(*given, None, None, x, None, packed, packed, None, flag)
            triton_kernels.fake_quantize(*given, residual_of, _seed(True), x, None, packed, None, packed, flag)
            triton_kernels.fake_quantize(*given, None, None, x, x, packed, None, None, flag)
        else:
            triton_kernels.fake_quantize_backward(*given, None, None, packed, None, None, x, None, None)
            residuals = residual_of, packed, None, None, packed
            triton_kernels.fake_quantize_backward(*given, *residuals, x, None, parts)
            triton_kernels.fake_quantize_backward(*given, None, None, None, x, None, x, terms, None)
    stores = {"decode_integers": (8,), "fake_quantize": (8, 8, 16), "fake_quantize_backward": (8, 8, 24)}
    loads = {"decode_integers": (0,), "fake_quantize": (8, 8, 8), "fake_quantize_backward": (8, 8, 16)}
    for place, launch in enumerate(launches):
        wide = inner % 64 == 0 and (x.itemsize == 4 or variant.operation == "decode_integers")  # else fewer bits
        yield launch, wide * loads[variant.operation][place], wide * stores[variant.operation][place]


def _seed(stochastic: bool) -> Tensor | None:
    return _meta((), torch.int64) if stochastic else None


def _subject(variant: Variant) -> tuple[UniformQuantizer, Tensor]:
    """Quantizer and tensor of a variant."""
    rounding = variant.operation.removeprefix("stretched_")
    settings = {
        "bit_width": variant.bit_width,
        "rounding": rounding if rounding in ("nearest", "dithered") else "stochastic",
    }
    x = _meta((64, 64, 56, 56), DTYPES[variant.dtype])
    if variant.bucket == "tensor":
        return UniformQuantizer(granularity=Granularity.TENSOR, **settings), x
    if variant.bucket.startswith("channel"):
        memory_format = torch.channels_last if variant.bucket == "channels_last" else torch.contiguous_format
        return UniformQuantizer(granularity=Granularity.CHANNEL, **settings), x.to(memory_format=memory_format)
    if variant.bucket == "huge":
        return UniformQuantizer(**settings), _meta(1 << 31, x.dtype)
    quantizer = UniformQuantizer(bucket_size=int(variant.bucket), **settings)
    stretched = variant.operation.startswith("stretched")
    return (quantizer.for_smooth if stretched else quantizer), _meta(1 << 24, x.dtype)


def _meta(shape: int | tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _widths(counts: collections.Counter) -> str:
    return " ".join(f"{count}x{width}" for width, count in sorted(counts.items(), reverse=True))


if __name__ == "__main__":
    sys.exit(main())
