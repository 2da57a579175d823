"""Ops that move, choose or read elements: what they store, and that their gradients are exact at one bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brevact.autograd import region
from tests.autograd.measuring import settings, watch_saved

MAP = (3, 4, 12, 12)
INDEX = torch.randint(0, 12, (3, 4, 12, 5), generator=torch.Generator().manual_seed(0))
PLACES = torch.arange(12).flip(0).repeat(3, 4, 12, 1)
MASK = torch.rand(MAP, generator=torch.Generator().manual_seed(0)) > 0.5
OTHER = torch.randn(MAP, generator=torch.Generator().manual_seed(0))

NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        f"interpolate {mode}": lambda x, mode=mode: F.interpolate(x, scale_factor=1.5, mode=mode)
        for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area")
    },
    "interpolate antialias": lambda x: F.interpolate(x, size=(7, 5), mode="bicubic", antialias=True),
    "interpolate linear": lambda x: F.interpolate(x.flatten(2), size=50, mode="linear", align_corners=True),
    "interpolate trilinear": lambda x: F.interpolate(x[None], size=(3, 6, 7), mode="trilinear"),
    "interpolate area 1-d": lambda x: F.interpolate(x.flatten(2), scale_factor=0.5, mode="area"),
    **{
        f"pad {mode} {dims}-d": lambda x, mode=mode, dims=dims: F.pad(x[None], (1, 2) * dims, mode=mode)[0]
        for mode, dims in (("constant", 2), ("reflect", 3), ("replicate", 3), ("circular", 3))
    },
    "pad reflect 1-d": lambda x: F.pad(x[0], (3, 1), mode="reflect"),
    "pad replicate unbatched": lambda x: F.pad(x[0], (3, 1, 1, 0), mode="replicate"),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 3),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "unfold": lambda x: F.unfold(x, (3, 2), dilation=2, stride=2),
    "fold": lambda x: F.fold(x.flatten(2)[:, :, :36], (7, 7), 2),
    "cat": lambda x: torch.cat([x, 2 * x], 1),
    "stack": lambda x: torch.stack([x, x], -1),
    "add": lambda x: x + OTHER,
    "sub": lambda x: torch.sub(OTHER, x, alpha=2),
    "chunk": lambda x: x.chunk(3, 2)[1],
    "split": lambda x: torch.split(x, [1, 3], 1)[1],
    "roll": lambda x: x.roll((3, 1), (2, 0)),
    "permute": lambda x: x.permute(0, 2, 1, 3).reshape(3, 12, -1),
    "flip": lambda x: x.flip(1, 2),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "sum": lambda x: x.sum((0, 2)),
    "mean": lambda x: x.mean(1),
    "cumsum": lambda x: x.cumsum(2),
    "lerp by a number": lambda x: torch.lerp(x, OTHER, 0.3),
}
#: Bytes of indices; masks at one bit an element.
EXACT: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "where": (lambda x: torch.where(MASK, x, OTHER), MASK.numel() // 8),
    "where on both sides": (lambda x: torch.where(MASK, x, x * 2), MASK.numel() // 8),
    "masked_fill": (lambda x: x.masked_fill(MASK, 0.5), MASK.numel() // 8),
    "masked_select": (lambda x: x.masked_select(MASK), MASK.numel() // 8),
    "index with mask": (lambda x: x[MASK], MASK.numel() // 8),
    "gather": (lambda x: torch.gather(x, 3, INDEX), INDEX.nbytes),
    "gather method": (lambda x: x.gather(-1, INDEX), INDEX.nbytes),
    "take_along_dim": (lambda x: torch.take_along_dim(x, INDEX, dim=3), INDEX.nbytes),
    "take_along_dim from the end": (lambda x: x.take_along_dim(INDEX - 12, -1), INDEX.nbytes),
    "take": (lambda x: x.take(INDEX), INDEX.nbytes),
    "take from the end": (lambda x: x.take(INDEX - 12), INDEX.nbytes),
    "index_select": (lambda x: x.index_select(3, INDEX[0, 0, 0]), 0),
    "index": (lambda x: x[..., INDEX[0, 0]], INDEX[0, 0].nbytes),
    "scatter number": (lambda x: x.scatter(3, INDEX, 0.5), INDEX.nbytes),
    "scatter": (lambda x: torch.zeros(MAP).scatter(3, PLACES, x), PLACES.nbytes),
    "scatter_add": (lambda x: torch.zeros(MAP).scatter_add(3, INDEX, x[..., :5]), INDEX.nbytes),
    "nansum": (torch.nansum, MASK.numel() // 8),
    "nansum of dimensions": (lambda x: x.nansum((0, -1), True), MASK.numel() // 8),
    "nanmean": (lambda x: x.nanmean(1), MASK.numel() // 8),
    "max of a dimension": (lambda x: x.max(1).values, 3 * 12 * 12 * 8),
    "min of a dimension": (lambda x: torch.min(x, dim=1, keepdim=True)[0], 3 * 12 * 12 * 8),
    "topk": (lambda x: x.topk(3)[0], 3 * 4 * 12 * 3 * 8),
    "sort": (lambda x: x.sort(2)[0], 3 * 4 * 12 * 12 * 8),
    "median of a dimension": (lambda x: x.median(1)[0], 3 * 12 * 12 * 8),
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
#: What is compared with saved elements, and has no counterpart.
CHOICES: dict[str, Callable[[Tensor], Tensor]] = {
    "aminmax": lambda x: torch.stack(torch.aminmax(x, dim=1)),
    "median": torch.median,
    "index_select by another type": lambda x: x.index_select(-1, INDEX[0, 0, 0].int()),
    "index from the end": lambda x: x[:, INDEX[0, 0, 0] % 4 - 4],
    "index with uint8": lambda x: x[MASK.byte()],
    "index_put from the end": lambda x: x.index_put((INDEX[0, 0, 0] % 3 - 3,), x[0]),
    "segment maxima": lambda x: torch.segment_reduce(x.flatten(), "max", lengths=torch.full((432,), 4), unsafe=True),
    "segment products": lambda x: torch.segment_reduce(x.flatten(), "prod", lengths=torch.full((432,), 4), unsafe=True),
    "copysign": lambda x: torch.copysign(x, OTHER),
    "fmod": lambda x: torch.fmod(OTHER, x),
    "remainder": lambda x: x.detach().remainder(x),
    "%": lambda x: OTHER % x,
    "%=": lambda x: OTHER.clone().__imod__(x),
    "division rounded": lambda x: torch.div(OTHER, x, rounding_mode="floor") + x,
    "other names": lambda x: x.clamp(-0.9, 0.9).arctanh(),
    "other names in place": lambda x: x.clamp(-0.9, 0.9).arccos_(),
    "an operator by itself": lambda x: torch.ops.aten.log(x.abs() + 0.01),
    "an overload of it": lambda x: torch.ops.aten.log.default(x.abs() + 0.01),
    "lu_factor_ex": lambda x: torch.linalg.lu_factor_ex(x)[0],
    "matrix_power": lambda x: torch.linalg.matrix_power(x, -2),
    "condition number": lambda x: torch.linalg.cond(x),
    "tensorinv": lambda x: torch.linalg.tensorinv(x[0, 0], ind=1),
    "tensorsolve": lambda x: torch.linalg.tensorsolve(x[0, 0], OTHER[0, 0, 0]),
    "householder_product": lambda x: torch.linalg.householder_product(x, OTHER[..., 0].expand(3, 4, 12)),
    "ormqr": lambda x: torch.ormqr(x, OTHER[..., 0], OTHER),
    "svd_lowrank": lambda x: seeded(torch.svd_lowrank, x[0, 0], 3)[1],
    "pca_lowrank": lambda x: seeded(torch.pca_lowrank, x[0, 0], 3)[1],
    "lobpcg": lambda x: torch.lobpcg(x[0, 0] + x[0, 0].mT + 30 * torch.eye(12), 2, X=OTHER[0, 0, :, :2])[0],
    "dropout2d of three dimensions": lambda x: seeded(F.dropout2d, x[0], 0.5),
    "clamp by tensors": lambda x: torch.clamp(x, OTHER - 0.5, OTHER + 0.5),
    "scatter_reduce": lambda x: x.scatter_reduce(3, INDEX, x[..., :5] * 2, "amax"),
    "lp_pool": lambda x: F.lp_pool2d(x, 2, 2),
    "local_response_norm": lambda x: F.local_response_norm(x, 3, alpha=1.0),
    "addcdiv": lambda x: torch.addcdiv(x, OTHER, x),
    "logcumsumexp": lambda x: x.logcumsumexp(2),
    "Bessel function, scaled": torch.special.i1e,
    "entropy": lambda x: torch.special.entr(x.abs()),
    "polygamma": lambda x: torch.polygamma(1, x.abs() + 0.1),
    "eigenvalues": lambda x: torch.linalg.eigvalsh(x + x.mT),
    "rrelu with a generator": lambda x: torch.rrelu(x, 0.1, 0.3, True, generator=torch.Generator().manual_seed(0)),
}


def seeded(function: Callable[..., Any], *args: Any) -> Any:
    torch.manual_seed(0)
    return function(*args)


def run(function: Callable[..., Tensor], inputs: list[Tensor], bit_width: int | None, weights=()):
    """Output, gradients of a weighted sum, and what was stored."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    chosen = None if bit_width is None else settings(bit_width=bit_width)
    activations = [x.clone() for x in leaves]
    with watch_saved() as saved, region(chosen):
        out = function(*activations)
    factor = torch.arange(1.0, out.numel() + 1).sin().view(out.shape).to(out.dtype)
    return out.detach(), torch.autograd.grad((out * factor).sum(), [*leaves, *weights]), saved


def assert_exact(function: Callable[..., Tensor], *inputs: Tensor):
    """Run at one bit an element, against torch; return what was stored."""
    expected_out, expected, _ = run(function, list(inputs), None)
    out, grads, saved = run(function, list(inputs), 1)
    assert torch.equal(out, expected_out) and out.stride() == expected_out.stride()
    for grad, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, reference, equal_nan=True)
    return saved


@pytest.mark.filterwarnings("ignore:Default grid_sample")
@pytest.mark.parametrize("function", NOTHING.values(), ids=NOTHING)
def test_moving_elements_stores_nothing(function):
    assert assert_exact(function, torch.randn(MAP)).tensors == []


@pytest.mark.filterwarnings("ignore:Default grid_sample")
@pytest.mark.parametrize(("function", "nbytes"), EXACT.values(), ids=EXACT)
def test_masks_indices_and_grids_are_all_that_is_stored(function, nbytes):
    saved = assert_exact(function, torch.randn(MAP))
    held = {x.untyped_storage().data_ptr() for x in (INDEX, OTHER)} if nbytes == 0 else set()
    saved.tensors = [x for x in saved.tensors if x.untyped_storage().data_ptr() not in held]
    assert saved.nbytes == nbytes or (saved.holds(INDEX) and nbytes <= INDEX.nbytes)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8", "ignore:dropout2d")
@pytest.mark.parametrize("function", CHOICES.values(), ids=CHOICES)
def test_ops_that_compare_what_they_save_are_exact(function):
    assert_exact(function, torch.randn(MAP))


@pytest.mark.parametrize("function", [torch.maximum, torch.minimum, torch.fmax, torch.fmin, torch.max, torch.min])
def test_ties_and_nan_are_shared_as_torch_shares_them(function):
    nan, inf = float("nan"), float("inf")
    a, b = torch.tensor([nan, 1.0, 2.0, nan, 3.0, inf, inf]), torch.tensor([1.0, nan, 2.0, nan, 1.0, inf, -inf])
    expected = run(lambda a, b: function(a, b).nan_to_num(), [a, b], None)[1]
    grads = run(lambda a, b: function(a, b).nan_to_num(), [a, b], 1)[1]
    for grad, reference in zip(grads, expected, strict=True):
        assert torch.equal(grad, reference)


@pytest.mark.parametrize("bounds", [(-0.5, 0.75), (None, 0.75), (-0.5, None)])
def test_clamp_gives_torchs_gradient_at_its_bounds(bounds):  # which differs between versions
    x = torch.tensor([-1.0, -0.5, 0.0, 0.75, 1.0, float("nan"), float("inf")])
    (expected,), (grad,) = (run(lambda x: x.clamp(*bounds), [x], bit_width)[1] for bit_width in (None, 1))
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("shapes", [((5, 4), (4,)), ((5, 1), (1, 4)), ((), (3,))])
@pytest.mark.parametrize("function", [torch.maximum, torch.fmin])
def test_extremes_of_two_tensors_broadcast(function, shapes):
    a, b = (torch.randn(shape) for shape in shapes)
    assert_exact(function, a, b)
    assert_exact(lambda a: function(a, b), a)
    assert_exact(lambda b: function(a.double(), b), b)


@pytest.mark.parametrize(
    "function",
    [
        torch.max,
        torch.min,
        torch.amax,
        lambda x: x.amax(-1),
        lambda x: x.amin((0, -1), True),
        lambda x: torch.amax(x, dim=(), keepdim=True),
        lambda x: torch.amin(x, dim=[1]),
    ],
)
@pytest.mark.parametrize("x", [torch.randn(4, 5), torch.ones(4, 5), torch.arange(20.0).view(4, 5) % 3])
def test_extremes_share_the_gradient_among_equal_elements(function, x):
    assert_exact(function, x)
    x = x.clone()
    x[1, 2] = float("nan")
    expected, grads = (run(lambda x: function(x), [x], bits)[1] for bits in (None, 1))
    torch.testing.assert_close(grads, expected, equal_nan=True)


def test_extremes_of_one_number():
    for function in (torch.max, torch.amax, torch.min):
        assert_exact(function, torch.tensor(2.0))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("align_corners", [False, True])
def test_grid_sample_gradient_of_the_grid_is_the_formula_on_the_decoded_input(mode, align_corners):
    x, grid = torch.randn(2, 3, 8, 9), torch.rand(2, 5, 6, 2) * 2 - 1

    def sample(x: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(x, grid, mode, "reflection", align_corners)

    expected_out, expected, _ = run(sample, [x, grid], None)
    out, grads, saved = run(sample, [x, grid], 32)
    assert torch.equal(out, expected_out)
    torch.testing.assert_close(grads, expected)
    (_, grad_grid), (_, exact) = run(sample, [x, grid], 2)[1], expected
    assert not torch.allclose(grad_grid, exact, rtol=1e-2)
    assert any(t.dtype is torch.float32 and t.shape == grid.shape for t in saved.tensors)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"padding_idx": 3}, {"scale_grad_by_freq": True}])
def test_embedding_stores_indices_alone(sparse, options):
    if sparse and options.get("scale_grad_by_freq"):
        return  # torch refuses both together
    index = torch.randint(0, 50, (40, 30))
    results = []
    for chosen in (None, settings(bit_width=1)):
        torch.manual_seed(0)
        table = nn.Embedding(50, 16, sparse=sparse, **options)
        with watch_saved() as saved, region(chosen):
            out = table(index)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        results.append((out.detach(), table.weight.grad.to_dense(), table.weight.detach()))
        assert [x.dtype for x in saved.tensors if not saved_is(x, table.weight)] == [torch.int64]
        assert saved.holds(index)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("options", [{}, {"max_norm": 1.0}, {"padding_idx": 3}, {"sparse": True}])
def test_embedding_bag_packs_no_weight(mode, options):
    if options.get("sparse") and mode == "max":
        return  # torch refuses both together
    index, offsets = torch.randint(0, 50, (900,)), torch.arange(0, 900, 9)
    results = []
    for chosen in (None, settings(bit_width=1)):
        torch.manual_seed(0)
        bag = nn.EmbeddingBag(50, 16, mode=mode, **options)
        with watch_saved() as saved, region(chosen):
            out = bag(index, offsets)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        results.append((out.detach(), bag.weight.grad.to_dense()))
        assert all(x.dtype is torch.int64 or saved_is(x, bag.weight) for x in saved.tensors)
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
    _, (expected,), plain = run(function, [x], None)
    _, (grad,), saved = run(function, [x], 8)
    assert plain.nbytes > 3 * saved.nbytes > 0
    step = 8 * (2.0**-8) * x.abs().max() * OTHER.abs().max()  # of a range of some 8 standard deviations
    assert (grad - expected).abs().max() <= 2 * step


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.gather(3, INDEX + 20),
        lambda x: x.gather(5, INDEX),
        lambda x: x.take(INDEX + 9999),
        lambda x: x.masked_select(MASK[0, :2]),
        lambda x: x.amax(7),
        lambda x: x.amax((1, 1)),
        lambda x: torch.max(x, torch.randn(5)),
        lambda x: F.pad(x, (1, 2, 3), mode="reflect"),
        lambda x: F.pad(x, (20, 0, 0, 0), mode="reflect"),
        lambda x: F.grid_sample(x, torch.randn(2, 3, 4, 2), align_corners=False),
        lambda x: F.grid_sample(x, torch.randn(3, 3, 4, 2), mode="cubic"),
        lambda x: F.interpolate(x, (5, 5, 5), mode="area"),
    ],
)
def test_wrong_arguments_get_torchs_own_error(call):
    x = torch.randn(MAP, requires_grad=True)
    with pytest.raises(Exception) as expected:
        call(x)
    with pytest.raises(type(expected.value)) as raised, region(settings()):
        call(x)
    assert str(raised.value).split("\n")[0] == str(expected.value).split("\n")[0]


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


def test_amax_takes_no_dimension_as_all():
    assert_exact(lambda x: torch.amax(x, None), torch.randn(MAP))


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_padding_of_half_precision_under_autocast_has_its_gradient(mode, dtype):
    def pad(x):
        with torch.autocast("cpu", dtype=dtype):
            return F.pad(x, (1, 2, 0, 1), mode)

    assert_exact(pad, torch.randn(MAP).to(dtype))


@pytest.mark.parametrize(
    "function", [torch.nansum, torch.nanmean, lambda x: x.nansum(1), lambda x: torch.nanmean(x, 0)]
)
def test_sums_that_skip_nan_have_torchs_gradient(function):
    x = torch.randn(40, 30)
    x[3, 4], x[17] = float("nan"), float("nan")
    assert_exact(lambda x: function(x).nan_to_num(), x)


def test_norms_do_not_lend_the_rounding_of_long_vectors_to_short_ones():
    # The rows' lengths are powers of ten, and a bucket holds rows of all of them.
    x = torch.randn(64, 32) * torch.logspace(-6, 2, 64)[:, None]
    for function in (lambda x: x.norm(dim=1), lambda x: x.std(1), lambda x: F.normalize(x), lambda x: x.norm(dim=0)):
        (expected,), (grad,) = (run(function, [x], bits)[1] for bits in (None, 8))
        assert (
            grad - expected
        ).norm() < 0.02 * expected.norm()  # half a step of 8 bits, of vectors within 5 deviations


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
        lambda x: torch.dist(x, x.detach()),
    ):
        (expected,), (grad,) = (run(function, [x], bits)[1] for bits in (None, 32))
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
        lambda x: F.pairwise_distance(x, x.flip(0), p=1),
        lambda x: x.view(-1, 3).std(1),
        lambda x: torch.cdist(x, x.flip(0)),
    ],
)
def test_norms_that_choose_and_norms_of_few_elements_are_exact(function):
    assert_exact(function, torch.randn(24, 36))


def test_cosine_similarity_of_pairs_packs_each_vector_once():
    x, y = torch.randn(30, 40), torch.randn(9, 40)

    def pairs(x: Tensor, y: Tensor) -> Tensor:
        return F.cosine_similarity(x[:, None], y[None], dim=-1)

    _, expected, _ = run(pairs, [x, y], None)
    torch.testing.assert_close(run(pairs, [x, y], 32)[1], expected)
    _, grads, saved = run(pairs, [x, y], 8)
    for grad, reference in zip(grads, expected, strict=True):
        assert 0 < (grad - reference).norm() < 6 / 255 * reference.norm()
    small = 4 * (30 + 9 + 30 * 9)  # norms and similarities
    assert saved.nbytes <= x.numel() + y.numel() + 2 * small
