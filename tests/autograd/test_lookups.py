"""Ops that look elements up: the indices, masks and grids that they store, and exact gradients at one bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brevact.autograd import region
from tests.autograd.exactness import INDEX, MAP, MASK, OTHER, assert_exact, run_exactly
from tests.autograd.measuring import settings, watch_saved

PLACES = torch.arange(12).flip(0).repeat(3, 4, 12, 1)

#: Bytes of indices, one byte each among 12, two among 1,728; masks at one bit an element.
EXACT: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "where": (lambda x: torch.where(MASK, x, OTHER), MASK.numel() // 8),
    "where on both sides": (lambda x: torch.where(MASK, x, x * 2), MASK.numel() // 8),
    "masked_fill": (lambda x: x.masked_fill(MASK, 0.5), MASK.numel() // 8),
    "masked_select": (lambda x: x.masked_select(MASK), MASK.numel() // 8),
    "index with mask": (lambda x: x[MASK], MASK.numel() // 8),
    "gather": (lambda x: torch.gather(x, 3, INDEX), INDEX.numel()),
    "gather method": (lambda x: x.gather(-1, INDEX), INDEX.numel()),
    "take_along_dim": (lambda x: torch.take_along_dim(x, INDEX, dim=3), INDEX.numel()),
    "take_along_dim from the end": (lambda x: x.take_along_dim(INDEX - 12, -1), INDEX.numel()),
    "take": (lambda x: x.take(INDEX * 144), 2 * INDEX.numel()),
    "take from the end": (lambda x: x.take(INDEX * 144 - 1728), 2 * INDEX.numel()),
    "index_select": (lambda x: x.index_select(3, INDEX[0, 0, 0]), 5),
    "index": (lambda x: x[..., INDEX[0, 0]], INDEX[0, 0].numel()),
    "scatter number": (lambda x: x.scatter(3, INDEX, 0.5), INDEX.numel()),
    "scatter": (lambda x: torch.zeros(MAP).scatter(3, PLACES, x), PLACES.numel()),
    "scatter_add": (lambda x: torch.zeros(MAP).scatter_add(3, INDEX, x[..., :5]), INDEX.numel()),
    "index_add": (lambda x: torch.zeros(MAP).index_add(3, INDEX[0, 0, 0], x[..., :5]), 5),
    "gather by an expanded index": (lambda x: x.gather(3, INDEX[:, :, :1].expand(-1, -1, 12, -1)), 3 * 4 * 5),
    "max of a dimension": (lambda x: x.max(1).values, 3 * 12 * 12),
    "min of a dimension": (lambda x: torch.min(x, dim=1, keepdim=True)[0], 3 * 12 * 12),
    "topk": (lambda x: x.topk(3)[0], 3 * 4 * 12 * 3),
    "sort": (lambda x: x.sort(2)[0], 3 * 4 * 12 * 12),
    "median of a dimension": (lambda x: x.median(1)[0], 3 * 12 * 12),
    "nearest grid_sample": (lambda x: F.grid_sample(x, OTHER[:, :2].permute(0, 2, 3, 1).tanh(), "nearest"), 3456),
    "grid_sample": (lambda x: F.grid_sample(x, OTHER[:, :2].permute(0, 2, 3, 1).tanh()), 3456),
    "grid_sampler_2d": (
        lambda x: torch.grid_sampler_2d(x, OTHER[:, :2].permute(0, 2, 3, 1).tanh(), 0, 1, True),
        3456,
    ),
    "grid_sampler_3d": (
        lambda x: torch.grid_sampler_3d(x[None], OTHER[:, :3].permute(0, 2, 3, 1)[None].tanh(), 0, 1, False),
        5184,
    ),
    "grid_sample 3-d": (
        lambda x: F.grid_sample(x[None], OTHER[:, :3].permute(0, 2, 3, 1)[None].tanh(), padding_mode="border"),
        5184,
    ),
}


@pytest.mark.filterwarnings("ignore:Default grid_sample")
@pytest.mark.parametrize(("function", "nbytes"), EXACT.values(), ids=EXACT)
def test_masks_indices_and_grids_are_all_that_is_stored(function, nbytes):
    assert assert_exact(function, torch.randn(MAP)).nbytes == nbytes


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("align_corners", [False, True])
def test_grid_sample_gradient_of_the_grid_is_the_formula_on_the_decoded_input(mode, align_corners):
    x, grid = torch.randn(2, 3, 8, 9), torch.rand(2, 5, 6, 2) * 2 - 1

    def sample(x: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(x, grid, mode, "reflection", align_corners)

    expected_out, expected, _ = run_exactly(sample, [x, grid], None)
    out, grads, saved = run_exactly(sample, [x, grid], 32)
    assert torch.equal(out, expected_out)
    torch.testing.assert_close(grads, expected)
    (_, grad_grid), (_, exact) = run_exactly(sample, [x, grid], 2)[1], expected
    assert not torch.allclose(grad_grid, exact, rtol=1e-2)
    assert any(t.dtype is torch.float32 and t.shape == grid.shape for t in saved.tensors)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"padding_idx": 3}, {"scale_grad_by_freq": True}])
def test_embedding_stores_indices_alone(sparse, options):
    if sparse and options.get("scale_grad_by_freq"):
        return  # torch refuses both together
    index = torch.randint(0, 50, (40, 30))
    results = []
    for chosen, dtype in ((None, torch.int64), (settings(bit_width=1), torch.int8)):
        torch.manual_seed(0)
        table = nn.Embedding(50, 16, sparse=sparse, **options)
        with watch_saved() as saved, region(chosen):
            out = table(index)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        results.append((out.detach(), table.weight.grad.to_dense(), table.weight.detach()))
        assert [x.dtype for x in saved.tensors if not saved_is(x, table.weight)] == [dtype]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"padding_idx": 3}, {"sparse": True}])
def test_embedding_bag_packs_no_weight(mode, options):
    if options.get("sparse") and mode == "max":
        return  # torch refuses both together
    index, offsets = torch.randint(0, 50, (900,)), torch.arange(0, 900, 9)
    results = []
    for chosen, dtype in ((None, torch.int64), (settings(bit_width=1), torch.int16)):
        torch.manual_seed(0)
        bag = nn.EmbeddingBag(50, 16, mode=mode, **options)
        with watch_saved() as saved, region(chosen):
            out = bag(index, offsets)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        results.append((out.detach(), bag.weight.grad.to_dense()))
        assert all(x.dtype is dtype or saved_is(x, bag.weight) for x in saved.tensors)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def saved_is(x: Tensor, weight: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def test_embedding_bag_weights_of_samples_have_torchs_gradient():
    index, bag = torch.randint(0, 50, (30, 9)), nn.EmbeddingBag(50, 16, mode="sum")

    def function(weights: Tensor) -> Tensor:
        return bag(index, per_sample_weights=weights)

    assert_exact(function, torch.rand(30, 9))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.lerp(x, OTHER, x.detach()),
        lambda x: torch.addcmul(x, OTHER, x),
        lambda x: torch.addcmul(OTHER, x, x, value=0.5),
        lambda x: x.var(1),
    ],
)
def test_products_store_their_factors_packed(function):
    x = torch.randn(MAP)
    _, (expected,), plain = run_exactly(function, [x], None)
    _, (grad,), saved = run_exactly(function, [x], 8)
    assert plain.nbytes > 3 * saved.nbytes > 0
    step = 8 * (2.0**-8) * x.abs().max() * OTHER.abs().max()  # of a range of some 8 standard deviations
    assert (grad - expected).abs().max() <= 2 * step


@pytest.mark.parametrize(
    "call",
    [
        lambda x, out: torch.take(x, INDEX, out=out),
        lambda x, out: torch.take_along_dim(x, INDEX, 3, out=out),
        lambda x, out: torch.masked_select(x, MASK, out=out),
        lambda x, out: torch.gather(x, 3, INDEX, out=out),
        lambda x, out: torch.abs(x, out=out),
        lambda x, out: torch.amax(x, (1,), out=out),
        lambda x, out: torch.softmax(x, 1, out=out),
        lambda x, out: torch.matmul(x, x, out=out),
        lambda x, out: F.linear(x, OTHER[0, 0], out=out),
    ],
)
def test_out_is_written_where_no_gradient_is_needed(call):
    x = torch.randn(MAP)
    expected, out = torch.empty(0), torch.empty(0)
    call(x, expected)
    with region(settings()):
        call(x, out)
    assert torch.equal(out, expected)
