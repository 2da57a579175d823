"""Gradients that are differentiated again: the setting, laws of second derivatives, penalties, MAML."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import brevitas.nn as qnn
import pytest
import torch
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import brevact
from brevact import (
    DitherBackward4bit,
    LosslessBackward,
    StochBackward2bit,
    StochBackward4bit,
    StochBackward6bit,
    StochBackward8bit,
)
from brevact.autograd import BackwardSettings, region
from tests.autograd import op_database
from tests.autograd.database_laws import MOST_ERROR, are_same, error_of, errs_on_average, finite_pairs
from tests.autograd.op_database import KINDS, MISSING, Sample, name_of, run, samples, variants
from tests.autograd.test_op_database import LIMITS

#: Ops of the database whose gradient torch differentiates again; the second derivative of ctc_loss is missing on a CPU.
TWICE = [op for op in op_database.OPS if op.supports_gradgrad and op.name != "nn.functional.ctc_loss"]


def settings_of(quantizer: Any, **others: Any) -> BackwardSettings:
    return BackwardSettings(brevact.quantizer(quantizer), **{"min_numel": 0, "double_backward": True, **others})


def first_sample(op: Any) -> tuple[Sample, str]:
    """The largest of a few samples, and a kind of inputs, for which torch has a second derivative."""
    largest_first = sorted(samples(op, most=6), key=lambda sample: -sum(x.numel() for x in sample.tensors))
    for kind, sample in itertools.product(("activation", *KINDS), largest_first):
        try:
            if run(variants(op)[0], sample, kind, None, twice=True).grads:
                return sample, kind
        except Exception:
            continue
    raise AssertionError(f"no sample of {name_of(op)} has a second derivative")


def broken_laws(op: Any, sample: Sample, kind: str) -> list[str]:
    """First and second derivatives: lossless ones bit-equal, those at 8 bits near; both graphs are in regions."""

    def call(settings: BackwardSettings | None, seed: int) -> Any:
        return run(variants(op)[0], sample, kind, settings, seed, twice=True, in_region=True)

    plain, lossless, eight = (
        call(None, 0),
        *(call(settings_of(each), 0) for each in (LosslessBackward, StochBackward8bit)),
    )
    broken = []
    for outcome in (lossless, eight):
        if not all(itertools.starmap(are_same, zip(outcome.outputs, plain.outputs, strict=True))):
            broken.append("forward")
    if not all(itertools.starmap(are_same, zip(lossless.grads, plain.grads, strict=True))):
        broken.append("lossless")
    if any(error_of(*pair, plain.scale) > MOST_ERROR for pair in finite_pairs(eight, plain)) and errs_on_average(
        lambda seed: call(settings_of(StochBackward8bit), seed), lambda seed: call(None, seed), plain
    ):
        broken.append("8 bits")
    return broken


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("op", TWICE, ids=name_of)
def test_second_derivatives_of_each_op(op):
    allowed: set[str] = LIMITS.get(name_of(op), (set(), ""))[0]
    assert set(broken_laws(op, *first_sample(op))) <= allowed


@pytest.mark.exhaustive
@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
@pytest.mark.parametrize("op", TWICE, ids=name_of)
def test_second_derivatives_of_all_samples(op):
    allowed: set[str] = LIMITS.get(name_of(op), (set(), ""))[0]
    for place, sample in enumerate(samples(op)):
        kind = KINDS[place % len(KINDS)]
        try:
            run(variants(op)[0], sample, kind, None, twice=True)
        except Exception:
            continue
        assert set(broken_laws(op, sample, kind)) <= allowed


class Energy(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(width, width), nn.SiLU(), nn.LayerNorm(width), nn.Linear(width, width), nn.Softplus()),
            *(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum()


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(16, 16, 3, stride=2), nn.GroupNorm(4, 16)),
            *(nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(), nn.LazyLinear(1)),
        )
        self.layers(torch.zeros(1, 3, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).sum()


def penalized(model: nn.Module, x: Tensor, *, in_region: bool = False) -> list[Tensor]:
    """The gradients of |df/dx|^2 + f (R1) by the parameters; the second graph may be made in the model's region."""
    x = x.clone().requires_grad_()
    with brevact.backward_quant(model) if in_region else nullcontext():
        out = model(x)
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
    loss = grad.square().sum() + out
    return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True))


def twins(make: Any, policy: Any, **overrides: Any) -> tuple[nn.Module, nn.Module]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    return models[0], brevact.quantize_backward(models[1], policy, **overrides)


CASES = {"energy": (Energy, (96, 64)), "critic": (Critic, (4, 3, 16, 16))}


@pytest.mark.parametrize("case", CASES)
def test_lossless_gradient_penalties_are_torchs(case):
    make, shape = CASES[case]
    plain, model = twins(make, LosslessBackward, double_backward=True)
    x = torch.randn(shape)
    for in_region in (False, True):
        for grad, expected in zip(penalized(model, x, in_region=in_region), penalized(plain, x), strict=True):
            assert torch.equal(grad, expected)


def error_between(grads: list[Tensor], expected: list[Tensor]) -> float:
    found, exact = (torch.cat([each.flatten() for each in part]) for part in (grads, expected))
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("in_region", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_errors_of_gradient_penalties_fall_with_the_step_of_levels(case, in_region):
    make, shape = CASES[case]
    x, errors = torch.randn(shape), []
    for leaf in (StochBackward8bit, StochBackward6bit, StochBackward4bit):
        plain, model = twins(make, leaf, double_backward=True, min_numel=0)
        errors.append(error_between(penalized(model, x, in_region=in_region), penalized(plain, x)))
    assert 0 < 2 * errors[0] < errors[1] < errors[2] / 2  # the steps differ by factors of four
    assert errors[0] < MOST_ERROR


RECTIFIERS = {
    "relu": F.relu,
    "relu_": lambda x: F.relu(x + 0, inplace=True),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout_": lambda x: F.dropout(x + 0, 0.3, inplace=True),
}


@pytest.mark.parametrize("name", RECTIFIERS)
def test_masks_stand_for_what_rectifiers_save(name):
    """Gradients and second derivatives are exact at 2 bits, infinities and NaN among the elements."""

    def derivatives(settings: BackwardSettings | None) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        x = torch.randn(64, 64)
        x[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        x, nbytes = x.requires_grad_(), 0

        def pack(kept: Tensor) -> Tensor:
            nonlocal nbytes
            nbytes += kept.nbytes
            return kept

        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept), region(settings):
            out = RECTIFIERS[name](x * 1)
        (grad,) = torch.autograd.grad((out.nan_to_num() ** 3).sum(), x, create_graph=True)
        return [grad.detach(), *torch.autograd.grad(grad.nan_to_num().square().sum(), x)], nbytes

    found, nbytes = derivatives(settings_of(StochBackward2bit))
    plain, _ = derivatives(None)
    for a, b in zip(found, plain, strict=True):
        assert are_same(a, b)
    assert nbytes <= 64 * 64 / 8 + 64  # one bit an element, and no more


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize(
    "call", [torch.autograd.grad, lambda out, x, create_graph: out.backward(create_graph=create_graph)]
)
def test_second_graph_keeps_the_codes_of_what_was_decoded(call):
    """Inside a region, the second graph saves decoded tensors as the same codes, gradients as others."""

    def step(inside: bool) -> tuple[set[int], list[Tensor]]:
        weight, x = torch.randn(64, 64, requires_grad=True), torch.randn(512, 64, requires_grad=True)
        saved: list[Tensor] = []

        def pack(kept: Tensor) -> Tensor:
            saved.append(kept)
            return kept

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            with region(settings_of(DitherBackward4bit)):
                y = x @ weight
                out = (y * y.roll(1, 0)).sin().sum()  # the gradient of the product reads both factors
                codes = {kept.data_ptr() for kept in saved if kept.dtype is torch.uint8}
                saved.clear()
                if inside:
                    call(out, x, create_graph=True)
            if not inside:
                call(out, x, create_graph=True)
        return codes, saved

    codes, outside = step(inside=False)
    assert len(codes) == 2 and not any(kept.data_ptr() in codes for kept in outside)
    codes, inside = step(inside=True)
    assert codes <= {kept.data_ptr() for kept in inside}
    assert sum(kept.nbytes for kept in inside) < sum(kept.nbytes for kept in outside) / 2


class Bilinear(nn.Module):
    """Layers whose gradients, and the gradients of those, are linear in each tensor that is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 16), nn.Conv1d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        y = self.second(x.view(-1, 8, 16))
        return torch.einsum("bij,bkj->bik", y, y.flip(1)) * y[..., :4]


def test_second_derivatives_are_unbiased_where_linear_in_what_is_stored():
    """|mean of draws - exact| within five standard errors, of each element but for one in a million."""
    torch.manual_seed(0)
    model, x = Bilinear(), torch.randn(16, 24)
    shape = model(x).shape
    weights, direction, draws = torch.randn(shape), torch.randn(16, 24), 400

    def second(settings: BackwardSettings | None) -> Tensor:
        leaf = x.clone().requires_grad_()
        with region(settings):
            out = model(leaf)
        (grad,) = torch.autograd.grad((out * weights).sum(), leaf, create_graph=True)
        found = torch.autograd.grad((grad * direction).sum(), list(model.parameters()), allow_unused=True)
        return torch.cat([each.flatten() for each in found if each is not None])

    exact = second(None).double()
    found = torch.stack([second(settings_of(StochBackward2bit)) for _ in range(draws)]).double()
    standard_error = found.std(0) / draws**0.5
    noisy = standard_error > 1e-6 * exact.abs().max()  # the others are exact but for the order of sums
    assert noisy.any()
    torch.testing.assert_close(found.mean(0)[~noisy], exact[~noisy], rtol=1e-5, atol=1e-5 * float(exact.abs().max()))
    assert bool(((found.mean(0) - exact).abs() <= 5 * standard_error)[noisy].all())


def adapted(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """The gradients of a MAML step: those of the loss behind one step of descent, by the parameters before it."""
    names, weights = zip(*model.named_parameters(), strict=True)
    half = len(x) // 2

    def loss(given: tuple[Tensor, ...], part: slice) -> Tensor:
        out = torch.func.functional_call(model, dict(zip(names, given, strict=True)), (x[part],))
        return F.mse_loss(out, y[part])

    grads = torch.autograd.grad(loss(weights, slice(half)), weights, create_graph=True)
    moved = tuple(w - 0.1 * g for w, g in zip(weights, grads, strict=True))
    return list(torch.autograd.grad(loss(moved, slice(half, None)), weights))


def regressor() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))


def test_a_step_of_maml():
    x, y = torch.randn(256, 32), torch.randn(256, 1)
    plain, lossless = twins(regressor, LosslessBackward, double_backward=True, min_numel=0)
    expected = adapted(plain, x, y)
    for grad, exact in zip(adapted(lossless, x, y), expected, strict=True):
        assert torch.equal(grad, exact)
    _, packed = twins(regressor, StochBackward8bit, double_backward=True, min_numel=0)
    assert 0 < error_between(adapted(packed, x, y), expected) < MOST_ERROR


def test_without_the_setting_the_error_names_it():
    model = brevact.quantize_backward(Energy(), StochBackward4bit)
    with pytest.raises(RuntimeError, match=r"double backward .*double_backward=True"):
        penalized(model, torch.randn(128, 64))


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_other_values_of_the_setting_are_refused(value):
    with pytest.raises(TypeError, match=r"double_backward: got .* True and False"):
        brevact.quantize_backward(Energy(), StochBackward4bit, double_backward=value)


def test_a_quantizer_that_changes_the_forward_pass_is_refused():
    with pytest.raises(ValueError, match=r"double_backward=True .*quantize_forward"):
        brevact.L2Backward.let(quantize_forward=True, double_backward=True).backward_settings  # noqa: B018


@pytest.mark.parametrize("leaf", [LosslessBackward, StochBackward8bit], ids=lambda x: x.__name__)
def test_checkpoints_inside(leaf):
    class Checkpointed(Energy):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.layers[:4], x, use_reentrant=False)
            return self.layers[4:](x).sum()

    plain, model = twins(Checkpointed, leaf, double_backward=True, min_numel=0)
    x = torch.randn(128, 64)
    error = error_between(penalized(model, x), penalized(plain, x))
    assert error == 0 if leaf is LosslessBackward else 0 < error < MOST_ERROR


@pytest.mark.parametrize("leaf", [LosslessBackward, StochBackward8bit], ids=lambda x: x.__name__)
def test_autocast(leaf):
    plain, model = twins(Critic, leaf, double_backward=True, min_numel=0)
    x = torch.randn(4, 3, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = penalized(plain, x), penalized(model, x)
    error = error_between(found, expected)
    assert error == 0 if leaf is LosslessBackward else 0 < error < MOST_ERROR


def test_fake_quantized_layers():
    """Brevitas' own ops run, which torch differentiates twice."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = (
            qnn.QuantLinear(64, 64, weight_quant=Int8WeightPerTensorFloat, input_quant=Int8ActPerTensorFloat),
            *(nn.SiLU(), qnn.QuantLinear(64, 1, weight_quant=Int8WeightPerTensorFloat)),
        )
        model = nn.Sequential(*layers)
        for _ in range(3):
            model(torch.randn(128, 64))  # statistics of the range
        return model

    def square(model: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return list(torch.autograd.grad(grad.square().sum(), [model[0].weight, model[2].weight]))

    plain, lossless = twins(make, LosslessBackward, double_backward=True, min_numel=0)
    x = torch.randn(128, 64)
    expected = square(plain, x)
    assert all(itertools.starmap(torch.equal, zip(square(lossless, x), expected, strict=True)))
    _, packed = twins(make, StochBackward8bit, double_backward=True, min_numel=0)
    assert 0 < error_between(square(packed, x), expected) < MOST_ERROR


def test_gradients_that_the_second_graph_packs_leave_no_bias():
    """|mean of draws - exact| within five standard errors, where the first gradient is exact and later ones linear."""
    torch.manual_seed(0)
    layer, x, weights = nn.Linear(48, 48, bias=False), torch.randn(64, 48), torch.randn(64, 48)

    def second(settings: BackwardSettings | None) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        with region(settings):
            out = layer(layer(leaf).relu())  # masks are exact, and so is the first gradient
            (grad,) = torch.autograd.grad(out, leaf, weights, create_graph=True)
        return grad.detach(), *torch.autograd.grad(grad, layer.weight, x)

    first, exact = second(None)
    draws = 300
    drawn = [second(settings_of(StochBackward2bit)) for _ in range(draws)]
    assert all(torch.equal(grad, first) for grad, _ in drawn)
    found = torch.stack([each for _, each in drawn]).double()
    standard_error = found.std(0) / draws**0.5
    assert float(standard_error.min()) > 0
    assert bool(((found.mean(0) - exact).abs() <= 5 * standard_error).all())


@pytest.mark.parametrize("function", ["pow", "div", "log", "norm"])
def test_what_singular_gradients_save_stays_as_it_is(function):
    """Nodes of no row of the closed table: their part of the second graph is exact at 2 bits."""
    calls = {
        "pow": lambda x: x**3,
        "div": lambda x: 1 / (2 + x),
        "log": lambda x: (2 + x).log(),
        "norm": lambda x: x.norm(dim=-1),
    }

    def second(settings: BackwardSettings | None) -> Tensor:
        torch.manual_seed(0)
        leaf = torch.rand(64, 64).requires_grad_()
        with region(settings):
            out = calls[function](leaf * 1)
            (grad,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), leaf)[0]

    assert torch.equal(second(settings_of(StochBackward2bit)), second(None))


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(64), nn.LayerNorm(64), nn.GroupNorm(4, 64)], ids=lambda norm: type(norm).__name__
)
def test_norms_pack_their_input(norm):
    model = brevact.quantize_backward(nn.Sequential(nn.Linear(64, 64), norm), DitherBackward4bit, double_backward=True)
    row = brevact.memory_report(model, torch.randn(512, 64)).rows[-1]
    codes, metadata, statistics = 512 * 64 // 2, 512 * 64 // 512 * 6, 2 * 4 * 512 * 4
    assert row.kind == type(norm).__name__ and 0 < row.saved_bytes <= codes + metadata + statistics
