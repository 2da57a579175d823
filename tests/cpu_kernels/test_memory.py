"""Compiled kernels and their cache on disk."""

from __future__ import annotations

from pathlib import Path

import numba
import pytest

from brevact.cpu_kernels.memory import kernel


def _double(x):
    return 2 * x


def test_kernel_is_cached_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert kernel(_double)(21) == 42
    assert {path.suffix for path in tmp_path.rglob("*.*") if path.is_file()} == {".nbi", ".nbc"}
    again = kernel(_double)
    assert again(21) == 42 and sum(again.stats.cache_hits.values()) == 1


def test_kernel_runs_where_the_cache_can_be_neither_read_nor_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    compiled = kernel(_double)
    (folder,) = tmp_path.iterdir()
    folder.rmdir()
    folder.write_text("no folder any more")
    assert compiled(21) == 42
