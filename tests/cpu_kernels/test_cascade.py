"""Sums in the order of `torch.sum`."""

from __future__ import annotations

import pytest
import torch

from brevact.cpu_kernels.fake_quantize_backward import BLOCK, adds_as_torch, cascade_sum, runs_of

SIZES = (8, 31, 100, BLOCK, 16 * BLOCK - 9, 32768, 70_001, 256 * BLOCK, 289 * BLOCK + 40, 4097 * BLOCK)


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3], indirect=True)
def test_cascade_sum_is_that_of_torch(threads):
    found = []
    for numel in (*SIZES, threads * 256 * BLOCK):
        x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) + 0.1
        runs = runs_of(numel, threads)
        if runs is not None:
            assert torch.equal(cascade_sum(x, runs, threads), x.sum())
            found.append(numel)
    assert {8, BLOCK, threads * 256 * BLOCK} <= set(found)


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
def test_adds_as_torch_where_the_suite_runs(threads):
    assert adds_as_torch(threads)


def test_runs_are_refused_that_do_not_hold_whole_blocks_or_are_too_short():
    assert runs_of(7, 1) is None
    assert runs_of(70_001, 2) is None
    assert runs_of((1 << 24) + BLOCK, 1) is None
    assert runs_of(2 * 128 * BLOCK, 2) == (128 * BLOCK, 2)
