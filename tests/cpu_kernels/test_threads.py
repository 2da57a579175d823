"""Sharing of blocks between threads, from several callers and across a fork."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from brevact.cpu_kernels.threads import SMALLEST_SHARE, share
from brevact.quantizers import UniformQuantizer


@pytest.mark.parametrize("blocks", [0, 1, 2, 7, 300, 1001])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_share_covers_every_block_once(blocks: int, threads: int):
    counts = [0] * blocks

    def count(start: int, stop: int) -> None:
        assert start < stop
        for block in range(start, stop):
            counts[block] += 1  # no two threads have the same block

    share(count, blocks, SMALLEST_SHARE, threads)
    assert counts == [1] * blocks


def test_share_leaves_small_work_to_the_caller():
    seen = []
    share(lambda start, stop: seen.append((start, stop, threading.get_ident())), 3, 512, 8)
    assert seen == [(0, 3, threading.get_ident())]


def test_share_raises_what_a_piece_raised():
    def fail(start: int, stop: int) -> None:
        raise ArithmeticError(f"block {start}")

    with pytest.raises(ArithmeticError, match="block"):
        share(fail, 64, SMALLEST_SHARE, 3)


def test_quantize_from_many_threads_at_once_gives_the_same_bytes():
    x, quantizer = torch.randn(1 << 19), UniformQuantizer(bit_width=2)
    expected = [quantizer.quantize(x, seed=seed).codes for seed in range(6)]
    got: list[torch.Tensor | None] = [None] * 6
    values: list[torch.Tensor | None] = [None] * 6

    def work(seed: int) -> None:
        for _ in range(5):
            packed = quantizer.quantize(x, seed=seed)
            got[seed], values[seed] = packed.codes, packed.dequantize()

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(map(torch.equal, got, expected))
    assert all(((value - x).abs() <= 3.0).all() for value in values)


FORK = """
import os, torch
from brevact.quantizers import UniformQuantizer
torch.set_num_threads(4)
x, quantizer = torch.randn(1 << 20), UniformQuantizer(bit_width=2)
expected = quantizer.quantize(x, seed=1).codes
child = os.fork()
if child == 0:
    torch.set_num_threads(4)
    os._exit(0 if torch.equal(quantizer.quantize(x, seed=1).codes, expected) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert torch.equal(quantizer.quantize(x, seed=1).codes, expected)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")
def test_quantize_after_a_fork():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120)
