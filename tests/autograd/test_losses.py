"""Cross entropy and NLL: the formulas on the stored probabilities, for every argument that torch takes."""

from __future__ import annotations

import functools
import gc
import math

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributions import Categorical, kl_divergence
from torch.nn import functional as F

import brevact
from brevact.autograd import region
from tests.autograd.measuring import EXACT_VALUES, assert_loss_as_torch, run_loss, settings, watch_saved
from tests.crosses import taking_turns

SIZES = {"classes": (7,), "samples": (9, 7), "maps": (2, 7, 3, 5)}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_cross_entropy_gradients_are_torchs_own(sizes, weighted, reduction, label_smoothing):
    x = torch.randn(sizes, dtype=torch.float64)
    dim = min(1, x.dim() - 1)
    indices = torch.randint(0, 7, x.select(dim, 0).shape)
    weight = torch.rand(7, dtype=x.dtype) if weighted else None
    options = {"weight": weight, "reduction": reduction, "label_smoothing": label_smoothing}
    for target in (indices, torch.rand_like(x).softmax(dim)):
        assert_loss_as_torch(lambda x, target=target: F.cross_entropy(x, target, **options), x)
    if x.dim() > 1:
        assert_loss_as_torch(lambda x: F.cross_entropy(x, indices, ignore_index=3, **options), x)
        negative = indices.where(indices != 2, -100)
        assert_loss_as_torch(lambda x: F.cross_entropy(x, negative, **options), x)
        if not label_smoothing:
            del options["label_smoothing"]
            assert_loss_as_torch(lambda x: F.nll_loss(F.log_softmax(x, dim), negative, **options), x)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_cross_entropy_of_ignored_targets_has_no_gradient(reduction, label_smoothing):
    target = torch.full((9,), -100)
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    assert_loss_as_torch(lambda x: F.cross_entropy(x, target, **options), torch.randn(9, 7))
    assert_loss_as_torch(lambda x: F.cross_entropy(x, target, weight=torch.rand(7), **options), torch.randn(9, 7))


@pytest.mark.parametrize("value", [float("-inf"), float("inf"), float("nan")])
def test_cross_entropy_of_masked_logits_is_torchs_own(value):
    x, target = torch.randn(9, 7), torch.arange(9) % 3
    x[2, 5] = value
    x[4, 1] = value  # the target itself
    assert_loss_as_torch(lambda x: F.cross_entropy(x, target, reduction="none"), x)
    assert_loss_as_torch(lambda x: F.log_softmax(x, 1), x)
    assert_loss_as_torch(lambda x: F.softmax(x, 1), x)


def test_masked_logits_have_probability_zero_at_one_bit():
    x = torch.randn(32, 64)
    x[:, 40:] = float("-inf")
    for function in (lambda x: F.cross_entropy(x, torch.arange(32)), lambda x: F.softmax(x, 1)):
        _, grad = run_loss(function, x, settings(bit_width=1))
        assert grad.isfinite().all() and (grad[:, 40:] == 0).all() and (grad[:, :40] != 0).any()


@pytest.mark.parametrize("device_dtype", [torch.bfloat16, torch.float16])
def test_cross_entropy_runs_in_torchs_dtypes_under_autocast(device_dtype):
    target, weight = torch.randint(0, 7, (40,)), torch.randn(12, 7)

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", device_dtype):
            return F.cross_entropy(x @ weight, target)

    x = torch.randn(40, 12)
    expected_out, expected = run_loss(function, x, None)
    out, grad = run_loss(function, x, EXACT_VALUES)
    assert out.dtype == expected_out.dtype and torch.equal(out, expected_out)
    eps = torch.finfo(device_dtype).eps
    torch.testing.assert_close(grad, expected, rtol=8 * eps, atol=8 * eps * expected.abs().max().item())


def test_mean_over_many_samples_of_half_precision_is_finite():
    x, target = torch.randn(70000, 2, dtype=torch.float16), torch.zeros(70000, dtype=torch.int64)
    _, grad = run_loss(lambda x: F.cross_entropy(x.float(), target), x, EXACT_VALUES)
    _, half = run_loss(lambda x: F.cross_entropy(x, target), x, EXACT_VALUES)
    smallest = 2.0**-24  # gradients of 1e-5 are subnormal in float16
    torch.testing.assert_close(half, grad, rtol=0, atol=2 * smallest)


def test_cross_entropy_stores_codes_and_targets():
    x, target = torch.randn(64, 100, requires_grad=True), torch.randint(0, 100, (64,))
    chosen = settings(bit_width=2, bucket_size=100)
    with watch_saved() as saved, region(chosen):
        F.cross_entropy(x * 1, target + 0)
    codes = [t for t in saved.tensors if t.dtype is torch.uint8]
    assert [t.nbytes for t in saved.tensors if t.dtype is torch.int8] == [64] and len(saved.tensors) == 3
    assert [t.numel() for t in codes] == [chosen.quantizer.quantize(x).nbytes, 64 // 8]


@pytest.mark.parametrize("sizes, label_smoothing", [((4096, 10), 0.0), ((4096, 10), 0.1), ((8, 10, 512), 0.0)])
def test_cross_entropy_of_sure_logits_has_the_noise_of_others(sizes, label_smoothing):
    """Where probabilities are near 0 and 1, as in a trained network, errors are not those of numbers near 1."""
    target = torch.randint(0, 10, (sizes[0], *sizes[2:]))
    logits = torch.randn(sizes) + 4 * F.one_hot(target, 10).movedim(-1, 1)

    def noise(scale: float) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            return F.cross_entropy(x, target, label_smoothing=label_smoothing)

        x = logits * scale
        _, want = run_loss(loss, x, None)
        _, got = run_loss(loss, x, settings(bit_width=6))
        return (got - want).norm() / want.norm()

    assert noise(4.0) < 3 * noise(0.5)


def _divergence_of_exponentials(x: Tensor, target: Tensor) -> Tensor:
    log_p = x.log_softmax(1)
    return (log_p.exp() * (log_p - target.log())).sum(1).mean()


def _jensen_shannon(x: Tensor, target: Tensor) -> Tensor:
    p = x.softmax(1)
    middle = (p + target) / 2
    return (p * (p / middle).log() + target * (target / middle).log()).sum(1).mean() / 2


def _jensen_shannon_of_logarithms(x: Tensor, target: Tensor) -> Tensor:
    log_p, log_t = x.view(8, 64, 10).log_softmax(2)[:, :], target.log().view(8, 64, 10)
    middle = torch.stack([log_p, log_t]).logsumexp(0) - math.log(2)
    divergence = functools.partial(F.kl_div, middle, reduction="none", log_target=True)
    return (divergence(log_p) + divergence(log_t)).sum() / 1024


def _of_positions(x: Tensor, target: Tensor) -> Tensor:
    chosen = target.view(8, 64, 10)[:, 1:, 0] > 0.05
    log_p = (x.view(8, 64, 10).log_softmax(2)[:, :-1].contiguous() / 2)[chosen]
    return -(target.view(8, 64, 10)[:, :-1][chosen] * log_p).sum() / 512


def _mutual(x: Tensor, target: Tensor) -> Tensor:
    other = x[256:] - x[256:].detach() + target[:256].log()
    return F.kl_div(x[:256].log_softmax(1), other.softmax(1), reduction="batchmean")


def _of_categorical(x: Tensor, target: Tensor, *, is_reversed: bool = False) -> Tensor:
    pair = Categorical(probs=target), Categorical(logits=x)
    return kl_divergence(*(pair[::-1] if is_reversed else pair)).mean()


NEAR = {
    "positions": _of_positions,
    "Categorical": _of_categorical,
    "reversed Categorical": functools.partial(_of_categorical, is_reversed=True),
    "logarithm of softmax": lambda x, target: -(target * (x.softmax(1) + 1e-8).log()).sum(1).mean(),
    "Jensen-Shannon of logarithms": _jensen_shannon_of_logarithms,
    "reversed kl_div": lambda x, target: F.kl_div(target.log(), x.log_softmax(1), reduction="sum", log_target=True),
    "mutual kl_div": _mutual,
    "cross-entropy": F.cross_entropy,
    "smoothing": lambda x, target: F.cross_entropy(x, target.argmax(1), label_smoothing=0.1),
    "kl_div": lambda x, target: F.kl_div(F.log_softmax(x / 2, 1), (target.log() / 2).softmax(1), reduction="batchmean"),
    "kl_div none": lambda x, target: F.kl_div(x.log_softmax(1), target, reduction="none").sum(1).mean(),
    "soft cross-entropy": lambda x, target: -(target * x.log_softmax(1)).sum(1).mean(),
    "divergence": lambda x, target: (target * (target.log() - x.log_softmax(1))).sum(1).mean(),
    "reversed divergence": lambda x, target: (x.softmax(1) * (x.log_softmax(1) - target.log())).sum(1).mean(),
    "Jensen-Shannon": _jensen_shannon,
    "divergence of exponentials": _divergence_of_exponentials,
    "Charbonnier": lambda x, target: ((x.log_softmax(1) - target.log()) ** 2 + 1e-6).sqrt().mean(),
    "kl_div log_target": lambda x, target: F.kl_div(x.log_softmax(1), target.log(), reduction="sum", log_target=True),
}


@pytest.mark.parametrize("name", NEAR)
def test_losses_near_their_targets_have_little_noise(name):
    """A student near its teacher: a gradient is small beside the probabilities, whose errors it must not have."""
    logits = torch.randn(512, 10) * 2
    target = (logits + torch.randn(512, 10) / 20).softmax(1)
    if name == "smoothing":
        logits = F.one_hot(target.argmax(1), 10).mul(0.9).add(0.01).log() + torch.randn(512, 10) / 20

    def loss(x: Tensor) -> Tensor:
        return NEAR[name](x, target)

    (_, want), (_, got) = run_loss(loss, logits, None), run_loss(loss, logits, settings(bit_width=4))
    assert 0 < (got - want).norm() < 0.3 * want.norm()
    _, exact = run_loss(loss, logits, EXACT_VALUES)
    eps = 64 * torch.finfo(torch.float32).eps  # some roundings of probabilities; gradients are a twentieth of these
    assert (exact - want).norm() < 20 * eps * want.norm()


def _of_chosen(x: Tensor, target: Tensor) -> Tensor:
    chosen = torch.arange(511, -1, -1)
    return -(target[chosen] * torch.index_select(dim=0, index=chosen, input=x.log_softmax(1))).sum()


FUNCTIONS_OF_LOGARITHMS = {
    "log-sum-exp times a number": lambda x, of_rows, target: F.kl_div(
        torch.sub(x, of_rows, alpha=2), target, reduction="sum"
    ),
    "log-sum-exp first": lambda x, of_rows, target: F.kl_div(
        torch.sub(other=x, input=of_rows), target, reduction="sum"
    ),
    "keywords in another order": lambda x, of_rows, target: _of_chosen(x, target),
}


@pytest.mark.parametrize("name", FUNCTIONS_OF_LOGARITHMS)
def test_functions_of_logarithms_by_keyword_have_the_plain_gradient(name):
    x = torch.randn(512, 32)

    def loss(x: Tensor) -> Tensor:
        return FUNCTIONS_OF_LOGARITHMS[name](x, x.logsumexp(1, keepdim=True), target)

    target = (x + torch.randn(512, 32)).softmax(1)
    (_, want), (_, got) = run_loss(loss, x, None), run_loss(loss, x, settings(bit_width=8))
    assert (got - want).norm() < 0.1 * want.norm()


def test_a_kept_log_sum_exp_keeps_no_codes():
    def count() -> int:
        gc.collect()
        return sum(type(each) is Tensor and each.dtype is torch.uint8 for each in gc.get_objects())

    before, leaf = count(), torch.randn(512, 64, requires_grad=True)
    with region(settings(bit_width=4)):
        x = leaf * 2
        of_rows = x.logsumexp(1, keepdim=True)
        loss = ((x - of_rows) * leaf.detach().softmax(1)).sum()
    assert count() > before
    loss.backward()
    del x, loss
    assert count() == before and of_rows.shape == (512, 1)


@pytest.mark.parametrize("margin", [0, 6])
def test_factors_far_from_probabilities_are_saved_by_themselves(margin):
    """A focal loss written out: its factors are almost 1, and their sum times errors of probabilities is large."""
    classes = torch.arange(512) % 64
    of_class = F.one_hot(classes, 64)

    def loss(x: Tensor) -> Tensor:
        return -((1 - x.softmax(1)) ** 2 * x.log_softmax(1) * of_class).sum(1).mean()

    logits = torch.randn(512, 64) * 2 + margin * of_class
    (_, want), (_, got) = run_loss(loss, logits, None), run_loss(loss, logits, settings(bit_width=4))
    assert 0 < (got - want).norm() < 0.3 * want.norm()


def _magnitudes(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x)
    return (spectrum.real**2 + spectrum.imag**2 + 1e-7).sqrt().log()


def _powers(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x)
    return (spectrum.real * spectrum.real + spectrum.imag * spectrum.imag + 1e-7).log()


def _mel(x: Tensor) -> Tensor:
    return (torch.view_as_real(torch.fft.rfft(x)).pow(2).sum(-1) + 1e-9).sqrt().clamp(min=1e-5).log()


def _edges(x: Tensor) -> Tensor:
    return ((x[1:, :-1] - x[:-1, :-1]) ** 2 + (x[:-1, 1:] - x[:-1, :-1]) ** 2 + 1e-6).sqrt()


def _images(x: Tensor) -> Tensor:
    return x.view(8, 1, 64, 64)


def _similarity(x: Tensor, target: Tensor) -> Tensor:
    """SSIM."""
    u, v, squares, other, products = (F.avg_pool2d(y, 7, 1) for y in (x, target, x * x, target**2, x * target))
    means = (2 * u * v + 1e-4) / (u**2 + v**2 + 1e-4)
    return 1 - (means * (2 * (products - u * v) + 9e-4) / (squares - u**2 + other - v**2 + 9e-4)).mean()


def _contrast(x: Tensor, target: Tensor) -> Tensor:
    """SupCon, written out, of classes that lie apart."""
    of_class = (torch.arange(512) % 8).view(-1, 1) == torch.arange(512) % 8
    x = F.normalize(0.3 * x + 8 * F.one_hot(torch.arange(512) % 8, 64))
    products = x @ x.mT / 0.07
    products = products - products.amax(1, keepdim=True).detach()
    logs = products - (products.exp() * (1 - torch.eye(512))).sum(1, keepdim=True).log()
    return -(logs * of_class).sum(1).mean()


def _log_sigmoids(x: Tensor, target: Tensor) -> Tensor:
    x = x + 6 * target.sign()
    return -torch.where(target > 0, F.logsigmoid(x), F.logsigmoid(-x)).mean()


def _distillation(target: Tensor, logs: Tensor) -> Tensor:
    return -(target.softmax(1) * logs).sum(1).mean()


def _gaussians(x: Tensor) -> Tensor:
    return torch.exp(-(((x.unsqueeze(2) - torch.linspace(-2, 2, 8)) / 0.5) ** 2))


DIFFERENCES = {
    "Gaussians": lambda x, target: F.mse_loss(_gaussians(x), _gaussians(target)),
    "magnitudes": lambda x, target: F.l1_loss(_magnitudes(x), _magnitudes(target)),
    "powers": lambda x, target: F.l1_loss(_powers(x), _powers(target)),
    "mel": lambda x, target: F.l1_loss(_mel(x), _mel(target)),
    "edges": lambda x, target: F.l1_loss(_edges(x), _edges(target)),
    "similarity": lambda x, target: _similarity(_images(x) / 10 + 0.5, _images(target) / 10 + 0.5),
    "similarity of views": lambda x, target: _similarity(_images(x / 10 + 0.5), _images(target / 10 + 0.5)),
    "similarity of casts": lambda x, target: _similarity(
        (_images(x) / 10 + 0.5).bfloat16().float(), _images(target) / 10 + 0.5
    ),
    "masked logs": lambda x, target: _distillation(target, x.log_softmax(1).masked_fill(x < -2, 0)),
    "chosen logs": lambda x, target: _distillation(target, torch.where(x < -2, 0.0, x.log_softmax(1))),
    "contrast": _contrast,
    "log-sigmoids": _log_sigmoids,
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_losses_that_divide_by_small_differences_have_little_noise(name):
    """Magnitudes near 0, variances, sums of exponentials that are near to one of these."""
    x = torch.randn(512, 64)
    target = x + torch.randn(512, 64) / 10

    def loss(x: Tensor) -> Tensor:
        return DIFFERENCES[name](x * 1, target)

    (_, want), (_, got) = run_loss(loss, x, None), run_loss(loss, x, settings(bit_width=4))
    assert (got - want).norm() < 0.3 * want.norm()


class _Classes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.classes = 1
        return x - 2

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize("loss", ["kl_div", "kl_div none", "soft cross-entropy", "divergence"])
def test_log_probabilities_have_their_own_gradient_near_the_target(loss):
    """Not that of the logits, which is as small as the difference."""
    x, chosen = torch.randn(512, 10).requires_grad_(), settings(bit_width=8)
    target = x.detach().softmax(1)

    class Logits:
        log_softmax = staticmethod(lambda dim: log_p)

    with region(chosen):
        log_p = x.log_softmax(1)
        value = F.kl_div(log_p, target, reduction="batchmean") if loss == "kl_div" else NEAR[loss](Logits, target)
    (grad,) = torch.autograd.grad(value, log_p, retain_graph=True)
    log_p.retain_grad()
    value.backward()
    assert torch.equal(log_p.grad, grad)
    step = (1 + 2**-7) / 255  # of probabilities at 8 bits; the target's distance to these is none
    assert 0 < (512 * grad + target).abs().max() <= 10 * step


def test_kl_div_keeps_gradients_of_other_functions():
    x, target = torch.randn(512, 10, requires_grad=True), torch.rand(512, 10)
    with region(EXACT_VALUES):
        F.kl_div(_Classes.apply(x), target, reduction="sum").backward()
    assert torch.equal(x.grad, -target)


def test_sums_of_targets_may_exceed_what_float16_probabilities_hold():
    x, target = torch.randn(16, 64).half(), torch.rand(16, 64) * 1e6

    def loss(x: Tensor) -> Tensor:
        return (x.log_softmax(1) * target).mul(2**-13).sum()

    (_, want), (_, got) = run_loss(loss, x, None), run_loss(loss, x, settings(bit_width=24))
    assert (got - want).norm() < 4 * torch.finfo(torch.float16).eps * want.norm()


def test_variables_times_log_probabilities_stay_exact():
    x, t = (torch.randn(16, 64, requires_grad=True) for _ in range(2))
    with region(settings(bit_width=4)):
        log_p = x.log_softmax(1)
        out = log_p * t
    assert torch.equal(torch.autograd.grad(out.sum(), log_p)[0], t)


ROWS, CLASSES = 4133, 2053  # two chunks
TYPES, REDUCTIONS = (torch.float32, torch.bfloat16, torch.float16, torch.float64), ("mean", "sum", "none")


@pytest.mark.parametrize("dtype, reduction, autocast", taking_turns(TYPES, REDUCTIONS, [False, True]), ids=str)
def test_logits_in_chunks_of_rows_have_torchs_loss_and_gradient(dtype, reduction, autocast):
    x, target = torch.randn(ROWS, CLASSES, dtype=dtype) * 3, torch.randint(0, CLASSES, (ROWS,))
    target[::7] = -100

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return F.cross_entropy(x * 1, target, reduction=reduction)

    expected_out, expected = run_loss(function, x, None)
    out, grad = run_loss(function, x, EXACT_VALUES)
    assert out.dtype is expected_out.dtype and torch.equal(out, expected_out)
    eps = torch.finfo(dtype).eps  # products of probabilities with factors, rounded to the type
    torch.testing.assert_close(grad, expected, rtol=8 * eps, atol=8 * eps * expected.abs().max().item())


def test_logits_in_chunks_of_rows_may_be_passed_twice():
    x, target = torch.randn(ROWS, CLASSES, requires_grad=True), torch.randint(0, CLASSES, (ROWS,))
    with region(EXACT_VALUES):
        loss = F.cross_entropy(x * 1, target, reduction="none")
    ones = torch.ones_like(loss)
    (first,) = torch.autograd.grad(loss, x, ones, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x, ones, retain_graph=True)
    assert torch.equal(first, second)


def test_no_more_than_logits_and_their_gradient_is_there_at_once():
    model = brevact.quantize_backward(nn.Linear(8, 4096, bias=False), "DEFAULT")
    batch = torch.randn(4096, 8), torch.randint(0, 4096, (4096,))
    logits = 4096 * 4096 * 4
    loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    report = brevact.step_report(model, batch, loss, rounds=2)
    packed = 0.2 * logits  # of probabilities, at 6 bits and less
    chunks = 4 * logits / 4  # probabilities, their products and their copies
    assert report.packed_peak < 2 * logits + packed + chunks
    assert report.plain_peak > 2.9 * logits  # log-probabilities, too


def test_recomputed_logits_become_their_gradient_in_its_memory():
    model = brevact.quantize_backward(nn.Linear(8, 4096, bias=False), "RECOMPUTE")
    batch = torch.randn(4096, 8), torch.randint(0, 4096, (4096,))
    logits = 4096 * 4096 * 4
    loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    report = brevact.step_report(model, batch, loss, rounds=2)
    assert report.packed_peak < 1.1 * (logits + logits / 4)  # the logits of a chunk, and a tenth for all else


@pytest.mark.parametrize("ignored, reduction", taking_turns([0, 3, CLASSES - 1, CLASSES + 7, -1], REDUCTIONS))
def test_logits_in_chunks_of_rows_ignore_any_index(ignored, reduction):
    x, target = torch.randn(ROWS, CLASSES), torch.randint(0, CLASSES, (ROWS,))
    target[::7] = ignored
    assert_loss_as_torch(lambda x: F.cross_entropy(x * 1, target, ignore_index=ignored, reduction=reduction), x)


@pytest.mark.parametrize("ignored", [-100, 0, 200])
def test_logits_in_chunks_of_rows_have_targets_that_are_bytes(ignored):
    x, target = torch.randn(ROWS, CLASSES), torch.randint(0, 256, (ROWS,), dtype=torch.uint8)
    target[:8] = 156  # -100 of a byte
    assert_loss_as_torch(lambda x: F.cross_entropy(x * 1, target, ignore_index=ignored), x)


def test_chunks_of_rows_are_packed_where_the_whole_is():
    x, target = torch.randn(ROWS, CLASSES, requires_grad=True), torch.randint(0, CLASSES, (ROWS,))
    with watch_saved() as saved, region(settings(min_numel=ROWS * CLASSES)):
        F.cross_entropy(x * 1, target)
    kept = [x for x in saved.tensors if x.dtype is not torch.int64]
    assert kept and all(x.dtype is torch.uint8 for x in kept)


def test_graphs_serve_losses_of_any_number_of_rows():
    layer = nn.Linear(24, 128)

    def run(x: Tensor, target: Tensor) -> Tensor:
        with brevact.backward_quant("DEFAULT"):
            return F.cross_entropy(layer(x), target)

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    graph = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    for rows in (64, 80, 96):
        graph(torch.randn(rows, 24, requires_grad=True), torch.randint(0, 128, (rows,))).backward()
    assert counter.frame_count == 1


def test_logits_without_memory_have_a_loss_and_a_gradient():
    layer, x = nn.Linear(8, CLASSES, device="meta"), torch.empty(ROWS, 8, device="meta", requires_grad=True)
    with brevact.backward_quant("RECOMPUTE"):
        loss = F.cross_entropy(layer(x), torch.empty(ROWS, dtype=torch.long, device="meta"))
    loss.backward()
    assert x.grad.is_meta and x.grad.shape == x.shape


def test_wrong_targets_of_logits_in_chunks_get_torchs_error():
    x, target = torch.randn(ROWS, CLASSES, requires_grad=True), torch.full((ROWS,), CLASSES)
    with region(EXACT_VALUES), pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(x * 1, target)


@pytest.mark.parametrize(
    "ignored, made, dtype",
    [
        *((-100, torch.clone, torch.int8), (255, torch.clone, torch.uint8), (-300, torch.clone, torch.int16)),
        *(
            (1 << 40, torch.clone, torch.int64),
            (-100, Tensor.contiguous, torch.int64),
            (-100, Tensor.long, torch.int64),
        ),
    ],
)
def test_nll_loss_stores_targets_alone(ignored, made, dtype):
    """Those of the batch, whoever passes them on, take no memory of their own."""
    x, target = torch.randn(64, 100, requires_grad=True), torch.randint(0, 100, (64,))
    target[::5] = ignored
    with watch_saved() as saved, region(settings()):
        loss = F.nll_loss(x * 1, made(target)[:], ignore_index=ignored)
    assert [t.dtype for t in saved.tensors] == [dtype] and saved.holds(target) is (made is not torch.clone)
    expected = F.nll_loss(x, target, ignore_index=ignored)
    assert all(map(torch.equal, torch.autograd.grad(loss, x), torch.autograd.grad(expected, x)))


def test_target_probabilities_that_train_get_torchs_gradient():
    x, t = torch.randn(64, 10, requires_grad=True), torch.rand(64, 10, requires_grad=True)
    expected = torch.autograd.grad(F.cross_entropy(x, t), (x, t))
    with region(settings(bit_width=1)):
        out = F.cross_entropy(x, t)
    for grad, reference in zip(torch.autograd.grad(out, (x, t)), expected, strict=True):
        assert torch.equal(grad, reference)
