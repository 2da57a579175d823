"""Launches of functions: no more than are known to be needed."""

from __future__ import annotations

import importlib.util

import pytest

import brevact

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is for Linux only")
#: Launches of the forward and the backward pass: plain, and packed by `DEFAULT`; then under autocast.
COUNTS = {
    "linear": ((1, 3), (2, 4), (4, 6), (5, 8)),
    "relu": ((1, 1), (2, 1), (1, 1), (2, 1)),
    "gelu": ((1, 1), (2, 2), (1, 1), (2, 3)),
    "silu": ((1, 1), (2, 2), (1, 1), (2, 3)),
    "layer_norm": ((1, 1), (3, 5), (1, 1), (3, 5)),
    "batch_norm": ((2, 1), (4, 5), (2, 1), (4, 5)),
    "sdpa": ((1, 2), (11, 6), (4, 5), (14, 9)),
    "cross_entropy": ((3, 2), (12, 19), (3, 2), (12, 19)),
    "residual_block": ((9, 7), (16, 18), (12, 11), (19, 24)),
}


@pytest.mark.parametrize("name", COUNTS)
def test_launches_are_few(name):
    from benchmarks.launches import launches_of

    ways = [(policy, autocast) for autocast in (False, True) for policy in (None, brevact.DEFAULT)]
    for way, (forward, backward) in zip(ways, COUNTS[name], strict=True):
        found = launches_of(name, *way)
        if way[0] is not None:  # what plain PyTorch launches is its own affair
            assert found[0].total() <= forward and found[1].total() <= backward, (way, found)


def test_main_prints_a_row_for_each_way(capsys):
    from benchmarks.launches import main

    assert main(["--functions", "linear", "--names"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "quantize+addmm" in lines[1] and " bf16 " in lines[2]
