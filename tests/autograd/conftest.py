"""Fixtures of the tests of regions."""

from collections.abc import Iterator

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor import cpu_vec_isa

from brevact.cpu_kernels import launch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def sums_of_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of batch norms are ATen's bit for bit, on decoded inputs: the kernel adds terms in another order.

    It hides the kernel, and with it the law of `test_ways.py`, that the way of a call changes no gradient: only for a
    test that compares with ATen's own formula.
    """
    monkeypatch.setattr(launch, "packed_batch_norm_backward", lambda *arguments: NotImplemented)


@pytest.fixture
def scalar_code() -> Iterator[None]:
    """Inductor writes loops without vectors, and compiles no file for each kind of vectors to see whether it can."""
    with inductor_config.patch({"cpp.vec_isa_ok": False}):
        cpu_vec_isa.valid_vec_isa_list.cache_clear()
        yield
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
