"""Kernels of tables compile for GPUs that are not there, without spills and with wide accesses."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is for Linux only")


@pytest.mark.parametrize(
    "targets", [["sm_90"], pytest.param(["sm_80", "gfx942"], marks=pytest.mark.exhaustive)], ids=" ".join
)
def test_tables_compile(targets: list[str]):
    from benchmarks.compile_kernels import TABLE_OPERATIONS, main

    options = ["--bit-widths", "4", "--dtypes", "bfloat16", "--buckets", "512", "--jobs", "1"]
    assert main([*options, "--targets", *targets, "--operations", *TABLE_OPERATIONS]) == 0
