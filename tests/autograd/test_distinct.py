"""Pointwise functions of expanded tensors are saved by their distinct elements, exactly where they divide, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, StudentT

from brevact.autograd import region
from tests.autograd.measuring import settings, watch_saved

SHAPE = (64, 128)
COLUMN, ROW = torch.rand(64, 1) + 0.5, torch.rand(128) + 0.5
MAP = torch.randn(SHAPE)

#: A function, and the kilobytes that it saves at 8 bits an element; a float tensor has 32.
CASES = {
    "normal": (lambda x: Normal(x, 0.5).log_prob(MAP), 9),
    "of a parameter's size": (lambda x: Normal(x, nn.Parameter(ROW)).log_prob(MAP), 42),
    "of columns": (lambda x: x / (2 * COLUMN.expand(SHAPE) ** 2), 0),
    "of rows, in half precision": (lambda x: x.half() / ROW.expand(SHAPE).half().clamp(min=0.1), 0),
    "of another order of memory": (lambda x: x / COLUMN.mT.expand(128, 64).mT.sqrt().contiguous(), 0),
    "student": (lambda x: StudentT(3.0, x, 0.7).log_prob(MAP), 41),
    "of none": (lambda x: x / (COLUMN.expand(SHAPE) * ROW.expand(SHAPE)), 32),
    "of bounds that differ": (lambda x: x / torch.clamp(COLUMN.expand(SHAPE), min=MAP), 32),
    "of what has changed": (lambda x: x / COLUMN.expand(SHAPE).exp().add_(MAP.abs()), 32),
}


@pytest.mark.parametrize(("function", "kept"), CASES.values(), ids=CASES)
def test_functions_of_expanded_tensors_are_saved_by_their_distinct_elements(function, kept):
    def step(chosen) -> tuple[Tensor, Tensor, int]:
        leaf = MAP.flip(0).requires_grad_()
        with watch_saved() as saved, region(chosen):
            out = function(leaf * 1)
        (grad,) = torch.autograd.grad(out.sum(), leaf)
        return out, grad, saved.nbytes

    out, grad, nbytes = step(settings(bit_width=8, min_numel=4096))
    expected_out, expected, _ = step(None)
    assert torch.equal(out, expected_out) and out.stride() == expected_out.stride()
    if "log_prob" not in function.__code__.co_names:  # nothing is rounded
        assert torch.equal(grad, expected)
    assert nbytes == pytest.approx(kept * 1024, abs=512)
