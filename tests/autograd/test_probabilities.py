"""Softmax and log-softmax: the formulas on the probabilities that are stored."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from brevact.autograd import SaveMode, region
from brevact.quantizers import Rounding
from tests.autograd.measuring import assert_loss_as_torch, run_loss, settings, watch_saved
from tests.crosses import some_of


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax, F.softmax, F.softmin, Tensor.softmax])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
def test_probabilities_take_a_dtype(function, dtype):
    assert_loss_as_torch(lambda x: function(x, 1, dtype=dtype), torch.randn(9, 70))
    assert_loss_as_torch(lambda x: function(x, -1, dtype=dtype), torch.randn(2, 9, 70).bfloat16())


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_probabilities_of_one_number(function):
    assert_loss_as_torch(lambda x: function(x, 0), torch.randn(()))
    assert_loss_as_torch(lambda x: function(x, 0), torch.randn(0, 4))


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_torch_chooses_the_dimension():
    assert_loss_as_torch(F.softmax, torch.randn(9, 70))


@pytest.mark.parametrize("hard", [False, True])
def test_gumbel_softmax_draws_torchs_numbers(hard):
    assert_loss_as_torch(lambda x: F.gumbel_softmax(x, tau=0.7, hard=hard), torch.randn(9, 70))


@pytest.mark.parametrize("rounding", Rounding)
def test_attention_gradient_is_the_formula_on_the_decoded_probabilities_over_their_sum(rounding):
    # d(p v)/dv for v = 1 is the decoded p, of the same copy.
    x, v = torch.randn(2, 64, 64).requires_grad_(), torch.eye(64).expand(2, 64, 64).clone().requires_grad_()
    x.data[0, :, -1], x.data[1, :, 7] = -torch.inf, -1e9  # masks
    g = torch.randn(2, 64, 64)
    with region(settings(bit_width=4, rounding=rounding)):
        p = torch.softmax(x * 1, -1)
        of_v = torch.autograd.grad(p @ v, v, torch.eye(64).expand_as(v), retain_graph=True)[0].mT
        (of_x,) = torch.autograd.grad(p @ v, x, g)
    q = of_v / of_v.sum(-1, keepdim=True)
    torch.testing.assert_close(of_x, q * (g - (q * g).sum(-1, keepdim=True)))
    assert (of_v[p == 0] == 0).all() and not torch.equal(of_v, p)


@pytest.mark.parametrize(
    "shape", [(4, 64, 64), (512, 8), (2, 20, 16, 16)], ids=str
)  # attention, router, map of classes
def test_confident_probabilities_have_gradients_of_their_size(shape):
    # Attention, router, map of classes: an error e of a p near 1 is one of e g, where the gradient is nearly 0.
    dim = 1 if len(shape) == 4 else -1
    x, g = torch.randn(shape).mul(30).requires_grad_(), torch.randn(shape)
    with region(settings(bit_width=4, rounding=Rounding.DITHERED, bucket_size=512)):
        (found,) = torch.autograd.grad(torch.softmax(x * 1, dim), x, g)
    (expected,) = torch.autograd.grad(torch.softmax(x, dim), x, g)
    assert 0 < (found - expected).norm() < 0.5 * expected.norm()


def _dice(x: Tensor, y: Tensor) -> Tensor:
    p, target = x.softmax(1), F.one_hot(y, 10).float()
    return 1 - (2 * (p * target).sum(0) / (p.sum(0) + target.sum(0))).mean()


@pytest.mark.parametrize(
    "loss",
    [
        _dice,
        lambda x, y: F.nll_loss(F.log_softmax(x, 1), y),
        lambda x, y: (torch.logsumexp(x, 1) - x.gather(1, y.unsqueeze(1)).squeeze(1)).mean(),
        lambda x, y: -torch.distributions.Categorical(logits=x).log_prob(y).mean(),
    ],
)
@pytest.mark.parametrize("scale", [2.0, 4.0])
def test_sure_classes_have_gradients_of_their_size(loss, scale):
    """The error of a probability near 1 was as large as the gradient or larger: 0.7 and 1.4 of it; Dice 0.4."""
    target = torch.randint(0, 10, (2048,))
    x = ((torch.randn(2048, 10) + 4 * F.one_hot(target, 10)) * scale).requires_grad_()
    with region(settings(bit_width=4, rounding=Rounding.DITHERED, bucket_size=512)):
        (found,) = torch.autograd.grad(loss(x * 1, target), x)
    (expected,) = torch.autograd.grad(loss(x, target), x)
    assert 0 < (found - expected).norm() < 0.3 * expected.norm()


def _logits(classes, bit_width):
    """Logits (C, 2); 16-bit metadata store the minimum and the scale of their probabilities exactly."""
    levels, least = 2**bit_width - 1, 2.0**-10
    most = least + levels * 2.0 ** -(bit_width + (bit_width > 1))
    rest, flat = 1 + 0.3 * torch.rand(classes - 2), 1 + 0.5 * torch.rand(classes)
    first = torch.cat([torch.tensor([most, least]), rest * (1 - most - least) / rest.sum()])
    return torch.stack([first, flat / flat.sum()], 1).log(), (most - least) / levels


def _assert_unbiased(function, bit_width, rounding, classes, g=None):
    """The mean gradient of copies of a row (C, 2) along dim 1 is torch's: each copy is a draw.

    ``g``: gradient of the output; None for that of the sum of squares, which reads the output in the region.
    """
    draws, (row, step) = 40000, _logits(classes, bit_width)
    row = -row if function is F.softmin else row
    x, leaf = row.repeat(draws, 1, 1).requires_grad_(), row.clone().requires_grad_()
    with region(settings(bit_width=bit_width, rounding=rounding, bucket_size=row.numel())):
        out = function(x * 1, 1)
        out, of_out = (out.square().sum(), None) if g is None else (out, g.expand_as(out))
    (grads,) = torch.autograd.grad(out, x, of_out)
    p = function(leaf[None], 1)
    g = 2 * p.detach() if g is None else g
    (expected,) = torch.autograd.grad(p, leaf, g.view_as(p))
    of_squares = 2.0**-9 * step**2 * g.abs().max()  # 16 bits of minimum and scale of the squares of errors
    allowed = 5 * grads.std(0) / draws**0.5 + of_squares + 1e-5
    assert grads.std(0).max() > 0
    assert ((grads.mean(0) - expected).abs() <= allowed).all()


@pytest.mark.parametrize("is_even, bit_width", [(False, 1), (True, 4)])
def test_products_of_log_probabilities_are_unbiased(is_even, bit_width):
    """At 4 bits the gradient is quadratic in probabilities if that of the products varies."""
    t, g = torch.rand(10, 2), torch.ones(10, 2) if is_even else torch.randn(10, 2)
    _assert_unbiased(lambda x, dim: t.repeat(len(x), 1, 1) * x.log_softmax(dim), bit_width, Rounding.DITHERED, 10, g)


@pytest.mark.parametrize("classes", some_of([4, 10, 100], quick=[4, 10]))
@pytest.mark.parametrize("rounding", [Rounding.STOCHASTIC, Rounding.DITHERED])
@pytest.mark.parametrize("bit_width", [1, 4])
@pytest.mark.parametrize("function", [torch.softmax, F.softmin])
def test_softmax_over_more_classes_is_unbiased(function, classes, rounding, bit_width):
    _assert_unbiased(function, bit_width, rounding, classes, torch.randn(classes, 2))


def test_gumbel_softmax_is_the_softmax_of_classes_that_it_ends_with():
    x, g, found = torch.randn(512, 10).requires_grad_(), torch.randn(512, 10), []
    for function in (
        lambda x: F.gumbel_softmax(x, 0.5, hard=True),
        lambda x: torch.softmax((x - torch.empty_like(x).exponential_().log()) / 0.5, -1),
    ):
        torch.manual_seed(0)
        with region(settings(bit_width=4)):
            out = function(x * 1)
        found += torch.autograd.grad(out, x, g)
    assert torch.equal(*found)


@pytest.mark.parametrize("function", [torch.softmax, lambda x, dim: F.gumbel_softmax(x, dim=dim)])
def test_softmax_is_packed_under_double_backward(function):
    x = torch.randn(16, 64, requires_grad=True)
    with watch_saved() as saved, region(settings(double_backward=True)):
        (grad,) = torch.autograd.grad(function(x * 1, 1)[:, 0].sum(), x, create_graph=True)
    assert saved.nbytes < x.nbytes
    assert torch.autograd.grad(grad.square().sum(), x)[0].any()


@pytest.mark.parametrize("classes", [4, 10])
def test_softmax_is_unbiased_before_a_loss_that_reads_it(classes):
    # The loss is quadratic in p: its gradient has the noise of its own copy, independent of that of the softmax.
    _assert_unbiased(torch.softmax, 2, Rounding.DITHERED, classes)


def test_softmax_over_more_classes_stores_a_bit_more_an_element_and_the_class():
    x = torch.randn(4, 10, 32, 32, requires_grad=True)
    for bits in (2, 4):
        with watch_saved() as saved, region(settings(bit_width=bits, bucket_size=512)):
            torch.softmax(x * 1, 1)
        assert saved.nbytes <= x.numel() * (bits + 1 + 4 / 10 + 2 * 48 / 512) / 8


@pytest.mark.parametrize("rounding", [Rounding.STOCHASTIC, Rounding.DITHERED])
def test_softmax_over_more_classes_rounds_alike_at_once_and_on_backward(rounding):
    x, weights, found = torch.randn(3, 6, 20, 20), torch.randn(3, 6, 20, 20), []
    for mode in SaveMode:
        torch.manual_seed(0)
        leaf = x.clone().requires_grad_()
        with region(settings(bit_width=2, rounding=rounding, save_mode=mode)):
            (torch.softmax(leaf * 1, 1) * weights).sum().backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "shape, dim",
    [((4, 2, 30, 40), 1), ((4, 3, 30, 40), -3), ((40, 3), -1), ((2, 50), 0), ((4, 5, 30, 40), 1), ((60, 20), -1)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_over_classes_at_8_bits_is_close_with_the_strides_of_torch(shape, dim, dtype):
    x, weights = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    x = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x
    found = []
    for chosen in (settings(bit_width=8), None):
        leaf = x.clone().requires_grad_()
        with nullcontext() if chosen is None else region(chosen):
            out = torch.softmax(leaf * 1.0, dim)
            (grad,) = torch.autograd.grad(out, leaf, weights)
        found.append((out, grad))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1].stride() == found[1][1].stride()
    assert (found[0][1] - found[1][1]).norm() <= 0.05 * found[1][1].norm()


def test_log_softmax_gradient_is_the_formula_on_the_decoded_probabilities():
    chosen = settings(bit_width=3, rounding=Rounding.NEAREST)
    x = torch.randn(8, 64)
    _, grad = run_loss(lambda x: torch.log_softmax(x, 1), x, chosen)
    p = chosen.quantizer.quantize(x.log_softmax(1).exp()).dequantize()
    weights = torch.arange(1.0, x.numel() + 1).sin().view(x.shape)
    torch.testing.assert_close(grad, weights - p * weights.sum(1, keepdim=True))


@pytest.mark.parametrize(("dim", "keepdim"), [(1, False), (-2, True), ((0, 2), False), ((2, 1), True)])
def test_logsumexp_gradient_is_the_formula_on_the_decoded_probabilities(dim, keepdim):
    chosen = settings(bit_width=3, rounding=Rounding.NEAREST)
    x = torch.randn(8, 16, 4)
    x[0, :2], x[:, 3, 1] = -torch.inf, -1e9
    out, grad = run_loss(lambda x: torch.logsumexp(x, dim, keepdim), x, chosen)
    of_rows = x.logsumexp(dim, True)
    p = (x - of_rows).exp()
    sure = (p > 0.5) & isinstance(dim, int)  # stored by what is left to 1
    p = chosen.quantizer.quantize(torch.where(sure, 1 - p, p)).dequantize()
    p = torch.where(sure, 1 - p, p)
    torch.testing.assert_close(grad, p * torch.arange(1.0, out.numel() + 1).sin().view_as(of_rows))


def test_logsumexp_gradient_has_torchs_strides():
    x, chosen = torch.randn(8, 4, 16).movedim(-1, 1), settings(bit_width=3, rounding=Rounding.NEAREST)
    seen = []
    leaf = x.detach().requires_grad_()
    for inside in (nullcontext(), region(chosen)):
        y = leaf * 1
        y.register_hook(lambda grad: seen.append(grad.stride()))
        with inside:
            torch.logsumexp(y, 1).sum().backward()
    assert seen[0] == seen[1] == x.stride()


def test_logsumexp_of_infinities_and_numbers_is_torchs():
    x = torch.zeros(4, 8)
    x[1], x[2, 3] = -torch.inf, torch.inf
    assert_loss_as_torch(lambda x: torch.logsumexp(x, 1)[[0, 1, 3]], x)
    assert_loss_as_torch(lambda x: x.logsumexp(0), torch.randn(()))


def test_attention_written_out_is_packed_once_at_4_bits_or_more():
    """At 2 bits its gradient was too small by a fifth."""
    scores, value = 3 * torch.randn(4, 64, 64), torch.randn(4, 64, 32)

    def step(chosen: object, seed: int = 0) -> tuple[Tensor, int]:
        torch.manual_seed(seed)
        leaf = scores.clone().requires_grad_()
        with watch_saved() as saved, region(chosen):
            out = torch.softmax(leaf * 1, -1) @ value
        return torch.autograd.grad(out.sin().sum(), leaf)[0], saved.nbytes - value.nbytes

    expected, _ = step(None)
    parts = (
        torch.stack([(step(settings(bucket_size=512), seed)[0] * expected).sum() for seed in range(32)])
        / expected.square().sum()
    )
    assert (parts.mean() - 1).abs() <= 5 * parts.std() / 32**0.5 + 0.03
    assert step(settings(bucket_size=512))[1] <= scores.numel() // 2 + 6 * scores.numel() // 512 + value.numel()


def test_softmax_shares_its_copy_with_the_next_op():
    x, linear = torch.randn(4, 8, 64, requires_grad=True), torch.nn.Linear(64, 3)
    with watch_saved() as saved, region(settings()):
        linear(torch.softmax(x * 1, -1))
    codes = [t for t in saved.tensors if t.dtype is torch.uint8]
    assert len({t.untyped_storage().data_ptr() for t in codes}) == 1 and len(codes) == 2
