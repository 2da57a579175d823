"""Kernels of fake quantization compile for GPUs that are not there, without spills and with wide accesses."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton", reason="Triton is for Linux only")


def test_decoding_of_integers_compiles():
    from benchmarks.compile_kernels import main

    options = ["--targets", "sm_90", "--bit-widths", "4", "--dtypes", "bfloat16", "--buckets", "tensor", "--jobs", "1"]
    assert main([*options, "--operations", "decode_integers"]) == 0


@pytest.mark.first
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "target, bit_width, dtype", [("sm_80", "2", "float32"), ("sm_90", "8", "bfloat16"), ("gfx942", "2", "float16")]
)
def test_fake_quantization_and_tables_compile_for_every_device(target: str, bit_width: str, dtype: str):
    from benchmarks.compile_kernels import INTEGER_OPERATIONS, TABLE_OPERATIONS, main

    options = ["--targets", target, "--bit-widths", bit_width, "--dtypes", dtype]
    options += ["--buckets", "tensor", "channels_last", "512", "--jobs", "1"]
    assert main([*options, "--operations", *INTEGER_OPERATIONS, *TABLE_OPERATIONS]) == 0
