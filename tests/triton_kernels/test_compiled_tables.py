"""Kernels of tables compile for GPUs that are not there, without spills and with wide accesses."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is for Linux only")


@pytest.mark.exhaustive
def test_tables_compile():
    from benchmarks.compile_kernels import TABLE_OPERATIONS, main

    options = ["--bit-widths", "4", "--dtypes", "bfloat16", "--buckets", "512", "--jobs", "1"]
    assert main([*options, "--targets", "sm_80", "sm_90", "gfx942", "--operations", *TABLE_OPERATIONS]) == 0
