"""Ops that add or copy rows by an index save the index alone, and have gradients to the last bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import brevact
from brevact import LosslessBackward
from brevact.autograd import BackwardSettings, region
from tests.autograd.measuring import settings, watch_saved

ROWS, SIZE, WIDTH = 300, 40, 7
INDEX = torch.randint(SIZE - 2, (ROWS,), generator=torch.Generator().manual_seed(0))  # two places get nothing


REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_add": lambda x, s: x.index_add(0, INDEX, s),
    "index_add alpha": lambda x, s: torch.index_add(x, -2, INDEX, s, alpha=0.3),
    "index_add_": lambda x, s: x.index_add_(0, INDEX, s),
    "index_copy": lambda x, s: x.index_copy(0, torch.arange(SIZE).flip(0), s[:SIZE]),
    "index_copy_": lambda x, s: x.index_copy_(0, torch.arange(5), s[:5]),
}


def run(function: Callable[[Tensor, Tensor], Tensor], trains: tuple[bool, bool], chosen: BackwardSettings | None):
    """Output, and gradients of those of both tensors that train; many elements are equal, some are 0."""
    generator = torch.Generator().manual_seed(1)
    leaves = [torch.randint(-3, 4, (n, WIDTH), generator=generator).float() for n in (SIZE, ROWS)]
    leaves = [x.requires_grad_(needed) for x, needed in zip(leaves, trains, strict=True)]
    with region(chosen):
        out = function(*(x * 1 for x in leaves))
    grad = torch.randn(out.shape, generator=generator)
    return out.detach(), torch.autograd.grad(out, [x for x in leaves if x.requires_grad], grad)


@pytest.mark.parametrize("trains", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_gradients_are_torchs_to_the_last_bit(name, trains):
    expected_out, expected = run(REDUCTIONS[name], trains, None)
    for chosen in (settings(bit_width=1), BackwardSettings(brevact.quantizer(LosslessBackward), min_numel=0)):
        out, grads = run(REDUCTIONS[name], trains, chosen)
        assert torch.equal(out, expected_out)
        for grad, reference in zip(grads, expected, strict=True):
            assert torch.equal(grad, reference) and grad.stride() == reference.stride()


@pytest.mark.parametrize("name", REDUCTIONS)
def test_what_is_kept(name):
    x, source = torch.zeros(SIZE, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=True) * 1
    with watch_saved() as saved, region(settings()):
        REDUCTIONS[name](x, source)
    assert not any(t.is_floating_point() for t in saved.tensors)


def test_other_arguments_are_torchs():
    x, source = torch.randn(SIZE, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH, requires_grad=True)
    expected = (x * 1).index_add(0, INDEX[:7], source[:7] * 1)
    with region(settings()):
        out = (x * 1).index_add(0, INDEX[:7], source[:7] * 1)
        with pytest.raises(IndexError):
            (x * 1).index_add(5, INDEX, source)
    assert torch.equal(out, expected)
    assert torch.equal(*(torch.autograd.grad(y.sum(), source)[0] for y in (expected, out)))
