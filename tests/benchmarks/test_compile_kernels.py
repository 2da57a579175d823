from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is for Linux only")


@pytest.mark.parametrize(
    "bit_width, targets, operations",
    [
        (3, ["sm_90"], ["dequantize_multiply"]),
        pytest.param(3, ["sm_80", "gfx942"], ["stochastic", "dequantize_multiply"], marks=pytest.mark.exhaustive),
        pytest.param(5, ["sm_90"], ["dithered"], marks=pytest.mark.exhaustive),  # needs more than 128 registers
    ],
)
def test_main_compiles_kernels_without_spills_and_narrow_loads(
    bit_width: int, targets: list[str], operations: list[str], capsys: pytest.CaptureFixture[str]
):
    from benchmarks.compile_kernels import TARGETS, main

    options = ["--bit-widths", str(bit_width), "--dtypes", "bfloat16", "--buckets", "512"]
    options += ["--jobs", str(len(targets))]
    assert main([*options, "--targets", *targets, "--operations", *operations]) == 0
    header, *rows, summary = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {row[header.index("target")] for row in rows} == set(targets) <= set(TARGETS)
    assert {row[header.index("spills")] for row in rows} == {"0"}
    assert int(summary[0]) == len(rows) == len(targets) * len(operations)


HALF_RATE = {
    "nearest": 7,
    "stochastic": 10,
    "dithered": 12,
    "dequantize": 6,
    "dequantize_multiply": 8,
    "normalize": 12,
    "denormalize": 8,
    "denormalize_add": 10,
    "stretched_dithered": 12,
    "stretched_dequantize": 11,
    "look_up": 9,
    "fake_quantize": 39,
    "fake_quantize_backward": 24,
}
"""The most instructions an element that run at half rate: bfloat16, 4 bits, buckets of 512, fake quantization's one
scale, with residuals of 2 bits.
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "target, operation",
    [
        *(("sm_90" if place % 2 else "sm_80", each) for place, each in enumerate(HALF_RATE)),
        *(("gfx942", each) for each in ("dithered", "normalize", "fake_quantize_backward")),
    ],
)
def test_kernels_of_whole_blocks_stay_within_their_budgets(target: str, operation: str):
    """128 registers of a thread are four programs on a processor; AMD's instructions are not counted."""
    from benchmarks import compile_kernels

    bucket = "tensor" if operation.startswith("fake") else "512"
    for row in compile_kernels._rows(compile_kernels.Variant(target, operation, "bfloat16", 4, bucket)):
        assert float(row["alu"] or 0) <= HALF_RATE[operation] and bool(row["alu"]) == target.startswith("sm"), row
        assert row["registers"] <= 128, row
        assert row["problem"] == "", row


@pytest.mark.exhaustive
def test_main_compiles_kernels_of_odd_buckets():
    from benchmarks.compile_kernels import main

    if importlib.metadata.version("triton").startswith("3.6"):
        pytest.skip("Triton 3.6 spills four registers for buckets of 100")
    options = ["--targets", "sm_90", "--bit-widths", "4", "--dtypes", "float16", "--jobs", "1"]
    assert main([*options, "--buckets", "100", "--operations", "nearest"]) == 0


@pytest.mark.exhaustive
def test_main_compiles_kernels_of_grids_without_spills_and_narrow_loads():
    from benchmarks.compile_kernels import GRID_OPERATIONS, main

    options = ["--targets", "sm_80", "gfx942", "--bit-widths", "4", "--dtypes", "bfloat16", "--buckets", "tensor"]
    assert main([*options, "--jobs", "1", "--operations", *GRID_OPERATIONS]) == 0


@pytest.mark.exhaustive
def test_rows_name_narrow_loads(monkeypatch: pytest.MonkeyPatch):
    from benchmarks import compile_kernels, offline_compiler

    monkeypatch.setattr(offline_compiler, "ALIGNMENT", 4)
    (row,) = compile_kernels._rows(compile_kernels.Variant("sm_90", "dequantize", "float32", 2, "512"))
    assert row["problem"] == "narrow stores"
