"""Norms of vectors and cosines between them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from brevact.autograd import region
from brevact.autograd.region.rows import OP_NAMES
from tests.autograd.exactness import assert_exact, run_exactly
from tests.autograd.measuring import settings


def test_norms_do_not_lend_the_rounding_of_long_vectors_to_short_ones():
    # The rows' lengths are powers of ten, and a bucket holds rows of all of them.
    x = torch.randn(64, 32) * torch.logspace(-6, 2, 64)[:, None]
    for function in (lambda x: x.norm(dim=1), lambda x: x.std(1), lambda x: F.normalize(x), lambda x: x.norm(dim=0)):
        (expected,), (grad,) = (run_exactly(function, [x], bits)[1] for bits in (None, 8))
        assert (
            grad - expected
        ).norm() < 0.02 * expected.norm()  # half a step of 8 bits, of vectors within 5 deviations


@pytest.mark.parametrize(
    "multiply",
    [
        lambda x, y: x * F.normalize(y).detach(),
        lambda x, y: x * F.normalize(y.detach()),
        lambda x, y: (x @ F.normalize(y.detach()).T).diagonal(),
    ],
)
def test_products_of_near_embeddings_have_little_noise(multiply):
    """A gradient is of the size of their difference, and errors of embeddings must not be larger."""
    x = torch.randn(64, 128)

    def similarity(x: torch.Tensor) -> torch.Tensor:
        return multiply(F.normalize(x * 1), x + x.roll(1, 1) / 10).sum()

    (expected,), (grad,) = (run_exactly(similarity, [x], bits)[1] for bits in (None, 4))
    assert 0 < (grad - expected).norm() < 0.4 * expected.norm()


def test_zero_vectors_have_torchs_gradient():
    x = torch.randn(64, 32)
    x[::3] = 0
    y = torch.randn(64, 32)
    for function in (
        lambda x: x.norm(dim=1),
        lambda x: torch.linalg.vector_norm(x, dim=1),
        lambda x: x.std(1),
        lambda x: F.normalize(x, eps=0.1),
        lambda x: F.cosine_similarity(x, y, dim=1, eps=0.1),
    ):
        (expected,), (grad,) = (run_exactly(function, [x], bits)[1] for bits in (None, 32))
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.norm(p=1, dim=1),
        lambda x: x.norm(float("inf")),
        lambda x: x.view(-1, 3).norm(dim=1),
        lambda x: torch.linalg.norm(x, 2),
        lambda x: torch.linalg.vector_norm(x, 3, dim=1),
        lambda x: F.normalize(x, p=1),
        lambda x: F.pairwise_distance(x, x.flip(0)),
        torch.linalg.matrix_norm,
        lambda x: x.view(-1, 3).std(1),
        lambda x: torch.cdist(x, x.flip(0)),
    ],
)
def test_norms_that_choose_and_norms_of_few_elements_are_exact(function):
    assert_exact(function, torch.randn(24, 36))


def test_cosine_similarity_across_a_dimension_of_one_tensor_is_torchs():
    x, y = torch.randn(32, 30, 40), torch.randn(40)
    assert_exact(lambda x, y: F.cosine_similarity(x, y, dim=0), x, y)


def test_vectors_whose_norm_overflows_have_the_gradients_of_torch():
    """Their cosine is 0 to torch, and so are the gradients."""
    x = (torch.randn(64, 64) * 1e30).requires_grad_()
    grads = []
    for chosen in (None, settings(bit_width=2)):
        with region(chosen):
            out = F.cosine_similarity(x * 1, x.roll(1, 0), dim=-1)
        grads.append(torch.autograd.grad(out.sum(), x)[0])
    assert grads[0].isfinite().all() and torch.equal(grads[1], grads[0])


def test_rules_name_norms_apart():
    functions = torch.norm, torch.linalg.norm, torch.linalg.vector_norm
    assert [OP_NAMES[function] for function in functions] == ["norm", "norm", "vector_norm"]


def test_cosines_near_1_have_little_noise():
    """A gradient is a hundredth of the unit vectors, whose errors it must not have."""
    x = torch.randn(64, 64)
    y = x + torch.randn(64, 64) / 100

    def run(bits):
        return run_exactly(lambda x: F.cosine_similarity(x, y), [x], bits)

    (expected,), (grad,) = run(None)[1], run(4)[1]
    assert 0 < (grad - expected).norm() < 0.3 * expected.norm()
    assert run(4)[2].nbytes < x.numel()
