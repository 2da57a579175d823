"""Fixtures of the tests of regions."""

import pytest
import torch

from brevact.cpu_kernels import launch

collect_ignore = ["interpreted_fla.py", "interpreted_liger.py"]  # import libraries, for seconds, and have no examples


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def sums_of_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the kernel, which adds terms in another order: gradients of batch norms are then ATen's bit for bit.

    Only for comparisons with ATen's formula: without the kernel, the way of a call may change a gradient.
    """
    monkeypatch.setattr(launch, "batch_norm_backward", lambda *arguments: NotImplemented)
