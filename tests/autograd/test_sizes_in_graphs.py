"""The sizes of mixtures in graphs follow from torch's seed, whatever was compiled before."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import brevact
from brevact import StochBackward2bit4bitMix
from tests.autograd.measuring import watch_saved

X = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(96, 96), nn.Linear(96, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.silu(self.first(x)))


def codes(seed: int, steps: int = 2) -> list[str]:
    """Digests of what each step of a newly compiled model stores."""
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model = torch.compile(
        brevact.quantize_backward(Net(), StochBackward2bit4bitMix, bucket_size=64), backend="aot_eager"
    )
    found = []
    for _ in range(steps):
        with watch_saved() as saved:
            model(X.clone().requires_grad_() * 1)
        packed = [x for x in saved.tensors if x.dtype is torch.uint8]
        assert len(packed) == 3
        found.append(hashlib.sha256(b"".join(x.numpy().tobytes() for x in packed)).hexdigest())
    return found


def test_a_seed_fixes_the_codes_of_graphs_and_steps_differ():
    first = codes(1)
    assert first[0] != first[1]
    assert codes(2) != first
    assert codes(1) == first  # what was compiled in between does not matter


@pytest.mark.exhaustive
def test_fresh_processes_store_the_same_codes():
    program = "from tests.autograd.test_sizes_in_graphs import codes; print(codes(5))"
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True) for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout == f"{codes(5)}\n"
