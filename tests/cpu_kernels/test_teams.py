"""Kernels on PyTorch's own OpenMP team, and in the caller alone where there is none."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading

import pytest
import torch

from brevact.cpu_kernels import teams
from brevact.cpu_kernels.packing import pack_mask_blocks
from brevact.cpu_kernels.teams import SMALLEST_SHARE, share
from brevact.quantizers import UniformQuantizer
from tests.cpu_kernels.example_kernels import count


@pytest.fixture(params=["team", "caller"])
def on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "caller":
        monkeypatch.setattr(teams, "_parallel", None)
    return request.param


def test_share_covers_every_block_once(on: str, monkeypatch: pytest.MonkeyPatch):
    for case in itertools.product([0, 1, 2, 7, 300, 100_003], [1, 512, SMALLEST_SHARE], [1, 2, 5]):
        blocks, block_size, threads = case
        counts = torch.zeros(blocks + 1, dtype=torch.int64)
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        share(count, (counts.data_ptr(), 3), blocks, block_size)
        assert counts.tolist() == [3] * blocks + [0], case


def test_quantize_from_many_threads_at_once_gives_the_same_bytes(on: str):
    x, quantizer = torch.randn(1 << 19), UniformQuantizer(bit_width=2)
    expected = [quantizer.quantize(x, seed=seed).codes for seed in range(6)]
    got: list[torch.Tensor | None] = [None] * 6

    def work(seed: int) -> None:
        for _ in range(5):
            got[seed] = quantizer.quantize(x, seed=seed).codes

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(map(torch.equal, got, expected))


SMALL_STACKS = """
import torch
from brevact.quantizers import UniformQuantizer, pack_codes, unpack_codes
torch.set_num_threads(2)
x = torch.randn(1 << 17).to(torch.float16)
for bit_width in (5, 8):
    packed = UniformQuantizer(bit_width=bit_width, bucket_size=4096).quantize(x, seed=0)
    packed.dequantize_multiply(packed.dequantize())
unpack_codes(pack_codes(torch.arange(1 << 17), 17, 4096), 17, 1 << 17, 4096)
"""
FORK = """
import os, torch
from brevact.quantizers import UniformQuantizer
torch.set_num_threads(4)
x, quantizer = torch.randn(1 << 20), UniformQuantizer(bit_width=2)
expected = bytes(quantizer.quantize(x, seed=1).buffer.numpy())
child = os.fork()
if child == 0:  # no parallel op of PyTorch's own: after a fork, OpenMP waits for its team for ever
    os._exit(0 if bytes(quantizer.quantize(x, seed=1).buffer.numpy()) == expected else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert bytes(quantizer.quantize(x, seed=1).buffer.numpy()) == expected
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("code", [SMALL_STACKS, FORK], ids=["largest blocks on small stacks", "after a fork"])
@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")
def test_quantize_in_another_process(code: str):
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "OMP_STACKSIZE": "64k"}, check=True, timeout=120)


@pytest.mark.parametrize("blocks", [1, 1 << 12])
def test_a_kernel_refuses_another_number_of_arguments(blocks: int):
    """Words that are left out would be 0: no step from block to block, and no end."""
    with pytest.raises(TypeError, match="pack_mask_blocks takes 6 arguments, and got 5"):
        share(pack_mask_blocks, (0, 0, 0), blocks, 512)
