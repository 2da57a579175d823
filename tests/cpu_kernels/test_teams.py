"""Kernels on PyTorch's own OpenMP team."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from brevact.cpu_kernels.fill import fill_blocks
from brevact.cpu_kernels.teams import SMALLEST_SHARE, share
from tests.cpu_kernels.example_kernels import count


@pytest.mark.parametrize("blocks", [0, 1, 2, 7, 300, 100_003])
@pytest.mark.parametrize("block_size", [1, 512, SMALLEST_SHARE])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_share_covers_every_block_once(blocks: int, block_size: int, threads: int):
    counts = torch.zeros(blocks + 1, dtype=torch.int64)
    share(count, (counts.data_ptr(), 3), blocks, block_size, threads)
    assert counts.tolist() == [3] * blocks + [0]


def test_share_from_many_threads_at_once():
    counts = torch.zeros(8, 10_000, dtype=torch.int64)

    def work(row: torch.Tensor) -> None:
        for _ in range(20):
            share(count, (row.data_ptr(), 1), row.numel(), 512, 3)

    workers = [threading.Thread(target=work, args=(row,)) for row in counts]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert (counts == 20).all()


SMALL_STACKS = """
import torch
from brevact.quantizers import UniformQuantizer, pack_codes, unpack_codes
torch.set_num_threads(2)
x = torch.randn(1 << 17).to(torch.float16)
for bit_width in (5, 12):
    packed = UniformQuantizer(bit_width=bit_width, bucket_size=4096).quantize(x, seed=0)
    packed.dequantize_multiply(packed.dequantize())
unpack_codes(pack_codes(torch.arange(1 << 17), 17, 4096), 17, 1 << 17, 4096)
"""


@pytest.mark.exhaustive
def test_largest_blocks_fit_small_stacks():
    environment = {**os.environ, "OMP_STACKSIZE": "64k"}
    run = subprocess.run([sys.executable, "-c", SMALL_STACKS], env=environment, timeout=120, check=False)
    assert run.returncode == 0


@pytest.mark.parametrize("blocks", [1, 1 << 12])
def test_a_kernel_refuses_another_number_of_arguments(blocks: int):
    """Words that are left out would be 0: no step from block to block, and no end."""
    with pytest.raises(TypeError, match="fill_blocks takes 7 arguments, and got 6"):
        share(fill_blocks, (0, 0, 4, 0), blocks, 512, 2)
