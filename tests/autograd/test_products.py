"""Laws of matrix products in a region: torch's own result, factors packed once, gradients linear in decoded factors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from brevact.autograd import region
from brevact.quantizers import Rounding
from tests.autograd.measuring import EXACT_VALUES, settings, watch_saved


def run(product, leaves, chosen, weights=None, autocast=False):
    with region(chosen), torch.autocast("cpu", enabled=autocast):
        out = product(*(leaf * 1 for leaf in leaves))
    weights = torch.linspace(-1, 1, out.numel()).sin().view(out.shape).to(out.dtype) if weights is None else weights
    return out, torch.autograd.grad((out * weights).sum(), leaves)


def check(product, *shapes: tuple[int, ...], dtype=torch.float32, autocast=False, counts: bool = True) -> None:
    """Compare with torch: the result bit for bit, the gradients up to the order of sums."""
    leaves = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    expected_out, expected = run(product, leaves, None, autocast=autocast)
    out, grads = run(product, leaves, EXACT_VALUES, autocast=autocast)
    assert torch.equal(out, expected_out) and out.stride() == expected_out.stride() and out.dtype == expected_out.dtype
    if counts:
        assert "Formula" in out.grad_fn.name()
    # sums of at most some hundred products in another order, in the type that torch multiplies in
    eps = 64 * torch.finfo(expected_out.dtype).eps
    for grad, reference in zip(grads, expected, strict=True):
        assert grad.shape == reference.shape and grad.dtype == reference.dtype
        top = reference.abs().max().item() if reference.numel() else 1.0
        torch.testing.assert_close(grad, reference, rtol=0, atol=eps * max(top, 1.0))


VECTORS = [((5,), (5,)), ((5,), (5, 4)), ((3, 5), (5,)), ((2, 3, 5), (5,)), ((5,), (2, 5, 4)), ((6, 2, 3, 5), (5,))]
products = pytest.mark.parametrize("product", [torch.matmul, Tensor.__matmul__, torch.linalg.matmul])


@products
@pytest.mark.parametrize("shapes", VECTORS)
def test_matmul_of_vectors_gives_torchs_gradients(product, shapes):
    check(product, *shapes, counts=False)


@examples(max_examples=60, deadline=None)
@given(
    batch=st.lists(st.tuples(st.integers(1, 3), st.sampled_from("abc")), max_size=3),
    lengths=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    sizes=st.tuples(*(st.integers(1, 6) for _ in range(3))),
)
def test_matmul_broadcasts_batches(batch, lengths, sizes):
    # a size that only one factor has, both have, or the other one has; leading dimensions may be missing
    first = tuple(1 if kind == "b" else size for size, kind in batch)[lengths[0] :]
    second = tuple(1 if kind == "c" else size for size, kind in batch)[lengths[1] :]
    n, k, m = sizes
    check(torch.matmul, (*first, n, k), (*second, k, m))


@pytest.mark.parametrize(
    "product, shapes",
    [
        (torch.mm, ((3, 4), (4, 5))),
        (lambda a, b: a.mm(mat2=b), ((3, 4), (4, 5))),
        (torch.bmm, ((2, 3, 4), (2, 4, 5))),
        (lambda a, b, c: torch.addmm(a, b, c, beta=0.5, alpha=2), ((5,), (3, 4), (4, 5))),
        (lambda a, b, c: torch.addbmm(a, b, c, alpha=3), ((1, 5), (2, 3, 4), (2, 4, 5))),
        (lambda a, b, c: torch.baddbmm(a, b, c, beta=0), ((3, 1), (2, 3, 4), (2, 4, 5))),
        (lambda a, b: a.transpose(1, 2) @ b.transpose(1, 2).mT, ((2, 6, 3, 4), (2, 6, 3, 4))),
        (lambda a, b: a @ b[:, None].expand(2, 3, 4, 5), ((2, 3, 6, 4), (2, 4, 5))),
        (lambda a: a @ a.mT, ((2, 3, 4),)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_products_give_torchs_gradients(product, shapes, dtype):
    check(product, *shapes, dtype=dtype)


@pytest.mark.parametrize(
    "equation, shapes",
    [
        ("ij,jk->ik", ((3, 4), (4, 5))),
        ("ij,jk", ((3, 4), (4, 5))),
        ("ba, c a -> b c", ((3, 4), (5, 4))),
        ("bhqd,bhkd->bhqk", ((2, 3, 4, 5), (2, 3, 6, 5))),
        ("bqhd,bkhd->bhqk", ((2, 4, 3, 5), (2, 6, 3, 5))),
        ("i,j->ij", ((3,), (4,))),
        ("ij,ij->", ((3, 4), (3, 4))),
        ("ij,k->k", ((3, 4), (5,))),
        ("bij,bk->i", ((2, 3, 4), (2, 5))),
        ("ij,->ij", ((3, 4), ())),
    ],
)
def test_einsum_gives_torchs_gradients(equation, shapes):
    check(lambda a, b: torch.einsum(equation, a, b), *shapes)
    check(lambda a, b: torch.einsum(equation, [a, b]), *shapes)


@pytest.mark.parametrize(
    "equation, shapes",
    [
        ("...ij,...jk->...ik", ((2, 3, 4), (2, 4, 5))),
        ("ii,ij->j", ((3, 3), (3, 4))),
        ("ij,jk->ik", ((3, 1), (4, 5))),
        ("ij,jk,kl->il", ((3, 4), (4, 5), (5, 2))),
    ],
)
def test_other_equations_are_left_to_torch(equation, shapes):
    check(lambda *operands: torch.einsum(equation, *operands), *shapes, counts=False)


@pytest.mark.parametrize("product", [torch.matmul, lambda a, b: torch.einsum("ij,jk->ik", a, b), torch.mm])
def test_products_under_autocast_are_torchs(product):
    check(product, (6, 8), (8, 5), autocast=True)


def test_autocast_caches_no_copy_without_a_graph():
    weight, x = nn.Parameter(torch.randn(8, 8)), torch.randn(8, 8)
    with region(settings()), torch.autocast("cpu"):
        (x @ weight).sum()
        out = (x @ weight).float().sum() + F.linear(x, weight).float().sum()
    assert torch.autograd.grad(out, weight)[0] is not None


def test_matmul_backward_is_the_formula_on_decoded_factors():
    chosen = settings(bit_width=2, rounding=Rounding.NEAREST)
    leaves = [torch.randn(4, 8, 16, requires_grad=True), torch.randn(4, 16, 8, requires_grad=True)]
    weights = torch.randn(4, 8, 8)
    _, (of_a, of_b) = run(torch.matmul, leaves, chosen, weights)
    a, b = (chosen.quantizer.quantize(leaf.detach()).dequantize() for leaf in leaves)
    torch.testing.assert_close(of_a, weights @ b.mT)
    torch.testing.assert_close(of_b, a.mT @ weights)


@pytest.mark.parametrize(
    "product",
    [lambda a, b: a @ b, lambda a, b: (a @ a.mT) + b.mT @ b, lambda a, b: torch.einsum("ij,jk->k", a, b)],
    ids=["matmul", "squares", "einsum"],
)
def test_product_gradients_are_unbiased(product):
    draws, leaves = 300, [torch.randn(12, 16, requires_grad=True), torch.randn(16, 12, requires_grad=True)]
    weights = torch.randn(product(*leaves).shape)
    _, expected = run(product, leaves, None, weights)
    samples = [run(product, leaves, settings(bit_width=2), weights)[1] for _ in range(draws)]
    for i, reference in enumerate(expected):
        values = torch.stack([grads[i] for grads in samples]).double()
        error = (values.mean(0) - reference).abs()
        # 5 standard errors, and entries whose rarer level was not drawn: as in test_functions
        jump = (values.amax(0) - values.amin(0)).max()
        assert (error <= 5 * values.std(0) / draws**0.5 + 16 / draws * jump + 1e-5 * reference.abs().max()).all()


def stored(product, *shapes: tuple[int, ...]) -> int:
    leaves = [torch.randn(shape, requires_grad=True) * 1 for shape in shapes]
    with watch_saved() as saved, region(settings(bit_width=2, bucket_size=512)):
        product(*leaves)
    return saved.nbytes


def packed_bytes(*shapes: tuple[int, ...]) -> int:
    return sum(settings(bit_width=2, bucket_size=512).quantizer.quantize(torch.randn(shape)).nbytes for shape in shapes)


HEADS = (2, 64, 4, 32)


@pytest.mark.parametrize(
    "product",
    [
        lambda q, k: q @ k.mT,
        lambda q, k: q.transpose(1, 2) @ k.transpose(1, 2).mT,
        lambda q, k: (q @ k.mT, k @ q.mT),
        lambda q, k: (q.transpose(1, 2) @ k.transpose(1, 2).mT, q @ k.mT, torch.einsum("bqhd,bkhd->bhqk", q, k)),
    ],
)
def test_views_of_a_factor_are_packed_once(product):
    assert stored(product, HEADS, HEADS) == packed_bytes(HEADS, HEADS)


def test_a_tensor_times_itself_is_packed_once():
    assert stored(lambda x: x @ x.mT, HEADS) == packed_bytes(HEADS)


def test_expanded_factors_are_packed_without_copies():
    shape = (2, 1, 64, 32)
    assert stored(lambda q, k: q @ k.expand(2, 8, 64, 32).mT, (2, 8, 4, 32), shape) == packed_bytes(
        (2, 8, 4, 32), shape
    )


def test_softmax_attention_stores_each_tensor_once_and_dropout_one_bit():
    shape, scores = (2, 64, 4, 32), (2, 4, 64, 64)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.dropout(F.softmax(q @ k.transpose(-2, -1) * 0.2, dim=-1), 0.1) @ v

    # the probabilities before and after dropout, and its mask
    bound = packed_bytes(shape, shape, shape, scores, scores) + scores[0] * scores[1] * 64 * 64 // 8
    assert stored(attend, shape, shape, shape) <= bound


def test_weights_in_products_are_not_packed():
    weight, x = nn.Parameter(torch.randn(64, 64)), torch.randn(64, 64, requires_grad=True) * 1
    for product in (lambda: x @ weight, lambda: weight.t() @ x, lambda: torch.einsum("ij,kj->ik", x, weight * 2)):
        with watch_saved() as saved, region(settings()):
            out = product()
        assert [t.dtype for t in saved.tensors].count(torch.uint8) == 1
        out.sum().backward(retain_graph=True)


def test_products_of_weights_alone_are_weights():
    a, b = nn.Parameter(torch.randn(64, 8)), nn.Parameter(torch.randn(8, 64))
    x = torch.randn(32, 64, requires_grad=True) * 1
    with watch_saved() as saved, region(settings()):
        x @ (a @ b)
    assert [t.dtype for t in saved.tensors].count(torch.uint8) == 1


def test_nan_in_a_factor_reaches_the_gradients():
    leaves = [torch.randn(8, 64, requires_grad=True), torch.randn(64, 8, requires_grad=True)]
    leaves[0].data[3, 5] = float("nan")
    _, expected = run(torch.matmul, leaves, None)
    _, grads = run(torch.matmul, leaves, settings(bit_width=2))
    assert grads[1][5].isnan().all() and expected[1][5].isnan().all() and not grads[0].isnan().any()


@pytest.mark.parametrize("shapes", [((0, 4), (4, 5)), ((3, 0), (0, 5)), ((2, 0, 4), (4, 5)), ((0,), (0,))])
def test_empty_factors(shapes):
    check(torch.matmul, *shapes, counts=False)  # torch's own run


@pytest.mark.parametrize("bit_width", [8, 32])
def test_empty_factors_with_gaps_have_gradients(bit_width):
    a, b = torch.randn(2, 4, 0, 2)[..., 0].requires_grad_(), torch.randn(0, 2)[..., 0].requires_grad_()
    with region(settings(bit_width=bit_width)):
        out = torch.matmul(a.view_as(a), b.view_as(b))
    grads = torch.autograd.grad(out.sum(), (a, b))
    assert [grad.shape for grad in grads] == [a.shape, b.shape]
