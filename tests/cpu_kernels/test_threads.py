"""Sharing of blocks between threads, from several callers and across a fork."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

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


class _Pieces:
    """Counts the threads that are in a piece, and lets the caller wait until another one is."""

    def __init__(self, in_helper, in_caller) -> None:
        self.in_helper, self.in_caller = in_helper, in_caller
        self.caller = threading.get_ident()
        self.helper_came = threading.Event()
        self.lock = threading.Lock()
        self.running = self.calls = 0

    def __call__(self, start: int, stop: int) -> None:
        if threading.get_ident() == self.caller:
            assert self.helper_came.wait(timeout=30)
            self.in_caller()
            return
        with self.lock:
            self.running, self.calls = self.running + 1, self.calls + 1
            is_first = self.calls == 1
        self.helper_came.set()
        if is_first:
            self.in_helper()
        time.sleep(0.05)
        with self.lock:
            self.running -= 1


def _interrupt() -> None:
    raise KeyboardInterrupt


def _interrupt_caller() -> None:
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # unlike interrupt_main, it ends a wait


def _interrupt_later() -> None:
    time.sleep(0.3)  # by then the caller has nothing left to do but to wait
    _interrupt_caller()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """An interrupt raises KeyboardInterrupt, also where the process was started in the background of a shell."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param(lambda: _Pieces(lambda: None, _interrupt), id="in a piece of the caller"),
        pytest.param(lambda: _Pieces(_interrupt_caller, lambda: time.sleep(1)), id="while the caller sleeps"),
        pytest.param(lambda: _Pieces(_interrupt_later, lambda: None), id="while the caller waits"),
    ],
)
def test_share_interrupted_leaves_nobody_at_work(pieces, interruptible):
    work = pieces()
    with pytest.raises(KeyboardInterrupt):
        share(work, 1000, SMALLEST_SHARE, 3)
        time.sleep(5)  # an interrupt of the main thread is raised at the latest here
    assert work.running == 0
    calls = work.calls
    time.sleep(0.1)
    assert work.calls == calls <= 12  # three threads by four pieces
    share(lambda start, stop: None, 64, SMALLEST_SHARE, 3)


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
expected = bytes(quantizer.quantize(x, seed=1).buffer.numpy())
child = os.fork()
if child == 0:  # no parallel op of PyTorch's own: after a fork, OpenMP waits for its team for ever
    os._exit(0 if bytes(quantizer.quantize(x, seed=1).buffer.numpy()) == expected else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert bytes(quantizer.quantize(x, seed=1).buffer.numpy()) == expected
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork on Windows")
def test_quantize_after_a_fork():
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120)
