"""Norms in a region: gradients are the formula on decoded inputs or normalized values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.utils.checkpoint import checkpoint

import brevact
from brevact import LosslessBackward
from brevact.autograd import BackwardSettings, SaveMode, attach_region, region
from brevact.quantizers import (
    Layout,
    NormalizedQuantizer,
    PackedActivation,
    PackedSpec,
    Rounding,
    UniformQuantizer,
    normalize,
)
from tests.autograd.measuring import EXACT_VALUES, Saved, settings, watch_saved
from tests.autograd.ops import frozen

NEAREST = settings(bit_width=3, rounding=Rounding.NEAREST)


def normalized(min_numel: int = 0, save_mode: SaveMode = SaveMode.SAVE_QUANTIZED, **options: object):
    return BackwardSettings(NormalizedQuantizer(**options), save_mode, min_numel)


class Case(NamedTuple):
    """A norm, and how its formula reads: groups of channels, dimensions with common statistics, shape of the weight."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dims: tuple[int, ...]
    affine: tuple[int, ...]
    groups: int = 0

    def module(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        module = self.make().to(dtype)
        for parameter in module.parameters():
            nn.init.uniform_(parameter, 0.5, 2)
        return module

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.groups, -1)) if self.groups else x

    def statistics(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and inverse deviation in float64, to broadcast over a split tensor."""
        x = self.split(x.double())
        mean = torch.zeros(()) if self.name == "rms_norm" else x.mean(self.dims, keepdim=True)
        return mean, ((x - mean).square().mean(self.dims, keepdim=True) + module.eps).rsqrt()

    def gradients(self, module: nn.Module, x: Tensor, z: Tensor, grad: Tensor) -> list[Tensor]:
        """Gradients of input, weight and bias for a normalized input z, with the statistics of x."""
        _, invstd = self.statistics(module, x)
        z, grad, parameters = z.double(), grad.double(), [p.detach().double() for p in module.parameters()]
        weighted = self.split(grad * parameters[0].view(self.affine) if parameters else grad)
        shared = (weighted * z).mean(self.dims, keepdim=True)
        centred = weighted if self.name == "rms_norm" else weighted - weighted.mean(self.dims, keepdim=True)
        sums = [(grad * z.reshape(grad.shape)).sum_to_size(self.affine), grad.sum_to_size(self.affine)]
        sums = [total.view(p.shape) for total, p in zip(sums, parameters, strict=False)]
        return [(invstd * (centred - z * shared)).reshape(grad.shape), *sums]


MAP = (3, 4, 12, 12)
CASES = [
    Case("batch_norm", lambda: nn.BatchNorm2d(4), MAP, (0, 2, 3), (1, 4, 1, 1)),
    Case("batch_norm 2-d", lambda: nn.BatchNorm1d(37, affine=False), (75, 37), (0,), (1, 37)),
    Case("layer_norm", lambda: nn.LayerNorm((12, 12)), MAP, (2, 3), (12, 12)),
    Case("layer_norm no bias", lambda: nn.LayerNorm(37, bias=False), (5, 7, 37), (2,), (37,)),
    Case("group_norm", lambda: nn.GroupNorm(2, 4, eps=1e-3), MAP, (2, 3, 4), (1, 4, 1, 1), 2),
    Case("group_norm 5-d", lambda: nn.GroupNorm(3, 6, affine=False), (2, 6, 3, 5, 7), (2, 3, 4, 5), (1, 6, 1, 1, 1), 3),
    Case("instance_norm", lambda: nn.InstanceNorm2d(4, affine=True), MAP, (2, 3), (1, 4, 1, 1)),
    Case("instance_norm 3-d", lambda: nn.InstanceNorm1d(4), (3, 4, 151), (2,), (1, 4, 1)),
]
RMS = Case("rms_norm", lambda: nn.RMSNorm((12, 12), eps=1e-3), MAP, (2, 3), (12, 12))
by_name = {"ids": lambda case: case.name}


def forward(function: Callable, x: Tensor, chosen: BackwardSettings | None) -> tuple[Tensor, Tensor, Saved]:
    leaf = x.detach().requires_grad_()
    with watch_saved() as saved, region(chosen):
        out = function(leaf)
    return leaf, out, saved


def weights_like(out: Tensor) -> Tensor:
    return torch.linspace(-1, 1, out.numel(), dtype=torch.float64).sin().view(out.shape).to(out.dtype)


def run(function: nn.Module, x: Tensor, chosen: BackwardSettings | None) -> tuple[Tensor, list[Tensor], Saved]:
    leaf, out, saved = forward(function, x, chosen)
    grads = torch.autograd.grad(out, [leaf, *function.parameters()], weights_like(out))
    return out.detach(), list(grads), saved


def levels_in(case: Case, saved: Saved, x: Tensor, chosen: BackwardSettings) -> Tensor:
    """The decoded normalized values, with the shape and memory order of x."""
    (codes,) = (t for t in saved.tensors if t.dtype is torch.uint8)
    dtype = torch.promote_types(x.dtype, torch.float32)
    settings = chosen if case is RMS else chosen.for_normalized or chosen
    layout = Layout.of(normalize(x, None, torch.ones((), dtype=dtype)))
    return PackedActivation(PackedSpec.of(settings.quantizer, layout), codes).dequantize()


def assert_gradients(found: list[Tensor], expected: list[Tensor], eps: float) -> None:
    # Sums of some hundred products in another order, and statistics rounded to the type: relative to the largest entry.
    for grad, reference in zip(found, expected, strict=True):
        atol = 64 * eps * reference.abs().max().item()
        torch.testing.assert_close(grad.double(), reference.double(), rtol=64 * eps, atol=atol)


def layouts(shape: tuple[int, ...]) -> list[Tensor]:
    """Tensors of a shape, with a mean: contiguous, with gaps, transposed, expanded, channels_last."""
    forms = [
        torch.randn(shape),
        torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2],
        torch.randn(shape[1], shape[0], *shape[2:]).transpose(0, 1),
        torch.randn(*shape[:-2], 1, shape[-1]),
    ]
    if len(shape) == 4:
        forms.append(torch.randn(shape).to(memory_format=torch.channels_last))
    return [form.mul_(2).add_(1).expand(shape) for form in forms]


@pytest.mark.parametrize("case", [*CASES, RMS], **by_name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chosen", [NEAREST, normalized(format="U8")], ids=["uniform", "levels"])
def test_backward_is_the_formula_on_the_decoded_normalized_input(case, dtype, chosen):
    module, eps = case.module(dtype), torch.finfo(dtype).eps
    for x in layouts(case.shape):
        x = x.to(dtype)
        expected_out, exact, _ = run(copy.deepcopy(module), x, None)
        out, grads, saved = run(module, x, chosen)
        assert torch.equal(out, expected_out) and out.stride() == expected_out.stride()
        z = levels_in(case, saved, x, chosen).double()
        mean, invstd = case.statistics(module, x)
        error = (case.split(x.double()) - mean) * invstd - case.split(z)
        step = (error + case.split(z)).aminmax()
        step = 1 / 8 if chosen is not NEAREST else (step.max - step.min).item() / 7
        # Half a step, of an eighth or of no more than the range in 7, and the rounding of the statistics to the type.
        if not (case is RMS and chosen is not NEAREST):  # whose levels are fitted to the values
            assert error.abs().max() <= step / 2 * (1 + 2**-7) + 16 * eps * (1 + (mean.abs() * invstd).max())
        assert_gradients(grads, case.gradients(module, x, case.split(z), weights_like(out)), eps)
        assert [grad.dtype for grad in grads] == [dtype] * len(grads)
        if chosen is NEAREST and invstd.max() < 100:  # of no variance nothing is rounded
            assert not torch.allclose(grads[0], exact[0], rtol=1e-2)


@pytest.mark.parametrize("case", CASES, **by_name)
@pytest.mark.parametrize("name", ["L2", "O4", "U5"])
def test_codes_and_one_number_a_group_are_stored(case, name):
    module, chosen = case.module(), normalized(format=name)
    x = torch.randn(case.shape)
    *_, saved = run(module, x, chosen)
    mine = [t for t in saved.tensors if not any(t.data_ptr() == p.data_ptr() for p in module.parameters())]
    codes, invstd = mine
    assert codes.untyped_storage().nbytes() == (x.numel() + 7) // 8 * int(name[1])
    assert invstd.numel() == case.statistics(module, x)[1].numel()
    assert invstd.untyped_storage().nbytes() == 4 * invstd.numel()


@pytest.mark.parametrize("case", [*CASES, RMS], **by_name)
@pytest.mark.parametrize("save_mode", list(SaveMode))
def test_groups_of_other_scales_do_not_add_their_noise(case, save_mode):
    """Scales of neighbouring groups differ by four orders of magnitude, within buckets."""
    module = case.module()
    for x in layouts(case.shape):
        _, invstd = case.statistics(module, x)
        scale = 10.0 ** (torch.arange(invstd.numel()) % 5 - 2.0)
        x = (case.split(x.double() - 1) * scale.view(invstd.shape)).reshape(x.shape).float()
        _, expected, _ = run(copy.deepcopy(module), x, None)
        _, grads, _ = run(module, x, settings(bit_width=8, bucket_size=512, save_mode=save_mode))
        found, reference = (
            torch.linalg.vector_norm(case.split(part), dim=case.dims) for part in (grads[0] - expected[0], expected[0])
        )
        error = found / reference
        assert error.max() < 2 * 8 / 255  # as above


def test_small_inputs_are_kept_as_they_are():
    norm, x = nn.LayerNorm(16), torch.randn(8, 16)
    _, expected, _ = run(norm, x, None)
    _, grads, saved = run(norm, x, normalized(min_numel=x.numel() + 1))
    assert all(t.dtype is not torch.uint8 for t in saved.tensors)
    assert_gradients(grads, expected, torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("case", [*CASES, RMS], **by_name)
@pytest.mark.parametrize("rounding", [Rounding.NEAREST, Rounding.STOCHASTIC])
def test_quantize_on_backward_gives_the_same_gradients(case, rounding):
    module, x = case.module(), torch.randn(case.shape)
    results = []
    for mode in SaveMode:
        for forwards in (False, rounding is Rounding.NEAREST):
            torch.manual_seed(0)
            options = {"save_mode": mode, "rounding": rounding, "quantize_forward": forwards}
            results.append(run(copy.deepcopy(module), x, normalized(**options)))
    for (out, grads, _), (late_out, late, _) in zip(results[:2], results[2:], strict=True):
        assert torch.equal(out, late_out)
        assert all(torch.equal(a, b) for a, b in zip(grads, late, strict=True))


@pytest.mark.parametrize("case", [*CASES, RMS], **by_name)
@pytest.mark.parametrize("chosen", [NEAREST, normalized()], ids=["input", "normalized"])
def test_graphs_run_twice_and_gradients_accumulate(case, chosen):
    module = case.module()
    inputs = [torch.randn(case.shape) for _ in range(2)]
    single = [run(module, x, chosen)[1] for x in inputs]
    graphs = [forward(module, x, chosen)[:2] for x in inputs]
    for _ in range(2):
        module.zero_grad()
        for leaf, out in graphs:
            leaf.grad = None
            out.backward(weights_like(out), retain_graph=True)
        for (leaf, _), grads in zip(graphs, single, strict=True):
            assert torch.equal(leaf.grad, grads[0])
        for i, parameter in enumerate(module.parameters(), 1):
            assert torch.equal(parameter.grad, single[0][i] + single[1][i])


@pytest.mark.parametrize("case", [*CASES, RMS], **by_name)
@pytest.mark.parametrize("chosen", [NEAREST, normalized()], ids=["input", "normalized"])
def test_no_gradient_is_computed_that_nobody_needs(case, chosen):
    module, x = case.module(), torch.randn(case.shape)
    names = [name for name, _ in module.named_parameters()]
    _, (_, *sums), _ = run(module, x, chosen)
    for name, expected in zip(names, sums, strict=True):
        for parameter in module.parameters():
            parameter.requires_grad_(False)
        parameter = module.get_parameter(name).requires_grad_()
        with watch_saved() as saved, region(chosen):
            out = module(x)
        assert (name == "bias") == (not saved.tensors)
        (grad,) = torch.autograd.grad(out, parameter, weights_like(out))
        torch.testing.assert_close(grad, expected)
    module.requires_grad_(False)
    with watch_saved() as saved, region(chosen):
        module(x)
    assert not saved.tensors


@pytest.mark.parametrize(
    "norm, size",
    [
        (lambda x, b: F.batch_norm(x, None, None, None, b, True), (1, 4, 1, 1)),
        (lambda x, b: F.instance_norm(x, None, None, None, b), (1, 4, 1, 1)),
        (lambda x, b: F.layer_norm(x, (12,), None, b), (12,)),
        (lambda x, b: F.group_norm(x, 2, None, b), (1, 4, 1, 1)),
    ],
    ids=["batch_norm", "instance_norm", "layer_norm", "group_norm"],
)
@pytest.mark.parametrize("chosen", [EXACT_VALUES, normalized(format="U8")], ids=["input", "normalized"])
def test_a_bias_without_a_weight_gets_its_gradient(norm, size, chosen):
    bias = torch.randn(max(size), requires_grad=True)
    leaf, out, _ = forward(lambda x: norm(x, bias), torch.randn(MAP), chosen)
    grad_input, grad = torch.autograd.grad(out, [leaf, bias], weights_like(out))
    torch.testing.assert_close(grad, weights_like(out).sum_to_size(size).flatten())
    assert grad_input.isfinite().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("case", CASES, **by_name)
@pytest.mark.parametrize("forwards", [False, True])
def test_groups_with_nan_have_nan_gradients_as_in_torch(case, value, forwards):
    module, x = case.module(), torch.randn(case.shape)
    x[(0,) * x.dim()] = value
    expected_out, expected, _ = run(copy.deepcopy(module), x, None)
    out, grads, _ = run(module, x, normalized(quantize_forward=forwards))
    assert torch.equal(out.isnan(), expected_out.isnan()) and out.isnan().any()
    for grad, reference in zip(grads, expected, strict=True):
        assert torch.equal(grad.isnan(), reference.isnan())
    assert grads[0].isnan().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("case", [*CASES, RMS], **by_name)
def test_groups_beside_one_that_is_not_finite_have_their_gradients(case, value):
    """All of that group's gradients are NaN, none of the others', though they share buckets."""
    module, x, chosen = case.module(), torch.randn(case.shape), settings(bit_width=8, bucket_size=512)
    x[(0,) * x.dim()] = value
    _, expected, _ = run(copy.deepcopy(module), x, None)
    _, grads, _ = run(module, x, chosen)
    for grad, reference in zip(grads, expected, strict=True):
        assert torch.equal(grad.isfinite(), reference.isfinite())
    finite = expected[0].isfinite()
    assert finite.any() and not finite.all()
    # A step is some 8 deviations in 255; the gradient is linear and quadratic in x^.
    error = (grads[0] - expected[0])[finite].norm() / expected[0][finite].norm()
    assert error < 2 * 8 / 255


@pytest.mark.parametrize("make", [nn.BatchNorm2d, nn.InstanceNorm2d])
@pytest.mark.parametrize("forwards", [False, True])
def test_frozen_statistics_mark_channels_with_nan(make, forwards):
    norm = frozen(make(4, affine=True, track_running_stats=True))
    x = torch.randn(MAP)
    x[0, 1, 2, 3] = float("nan")
    _, expected, _ = run(norm, x, None)
    out, grads, saved = run(norm, x, normalized(quantize_forward=forwards))
    assert any(t.dtype is torch.uint8 for t in saved.tensors)
    assert out.isnan().nonzero().tolist() == [[0, 1, 2, 3]]
    torch.testing.assert_close(grads[0], expected[0])  # statistics are constants: it does not read x
    assert grads[1].isnan().tolist() == [False, True, False, False]
    torch.testing.assert_close(grads[2], expected[2])


@pytest.mark.parametrize("chosen", [NEAREST, normalized(), normalized(quantize_forward=True)])
def test_frozen_instance_norm_runs_twice_before_backward(chosen):
    norm = frozen(nn.InstanceNorm2d(4, affine=True, track_running_stats=True))
    leaves = [forward(norm, torch.randn(MAP), chosen)[:2] for _ in range(2)]  # the forward pass writes to the buffers
    for leaf, out in leaves:
        out.sum().backward()
        assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("case", [*CASES, RMS], **by_name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_weights_in_float32_with_inputs_of_16_bits(case, dtype):
    module, x = case.module(), torch.randn(case.shape).to(dtype)
    expected_out, expected, _ = run(copy.deepcopy(module), x, None)
    for chosen in (EXACT_VALUES, normalized(format="U8")):
        out, grads, _ = run(module, x, chosen)
        assert torch.equal(out, expected_out)
        assert [g.dtype for g in grads] == [g.dtype for g in expected]
        if chosen is EXACT_VALUES:
            assert_gradients(grads, expected, torch.finfo(dtype).eps / 8)


@pytest.mark.parametrize("case", [*CASES, RMS], **by_name)
@pytest.mark.parametrize("forwards", [False, True])
def test_autocast_runs_as_torch_does(case, forwards):
    module, x = case.module(), torch.randn(case.shape).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected_out, expected, _ = run(copy.deepcopy(module), x, None)
        out, grads, _ = run(module, x, EXACT_VALUES)
        assert torch.equal(out, expected_out) and out.dtype is expected_out.dtype
        assert_gradients(grads, expected, torch.finfo(torch.bfloat16).eps / 8)
        out, _, saved = run(module, x, normalized(quantize_forward=forwards))
        assert out.dtype is expected_out.dtype
        assert any(t.dtype is torch.uint8 for t in saved.tensors)


def test_norms_of_a_parameter_are_exact():
    table, norm = nn.Parameter(torch.randn(5000, 4)), nn.LayerNorm(4)
    with watch_saved() as saved, region(settings(min_numel=1000)):
        out = norm(table)
    assert all(t.dtype is not torch.uint8 for t in saved.tensors)
    (grad,) = torch.autograd.grad(out, table, weights_like(out))
    torch.testing.assert_close(grad, torch.autograd.grad(norm(table), table, weights_like(out))[0], rtol=0, atol=0)


def test_norms_share_what_they_normalize_alike_and_no_other_op_does():
    norms, linear, x = [nn.LayerNorm(64), nn.LayerNorm(64)], nn.Linear(64, 8), torch.randn(32, 64, requires_grad=True)
    others = [nn.LayerNorm(64, eps=1e-3), nn.RMSNorm(64)]
    for functions, count in ((norms, 1), ([*norms, others[0]], 2), ([*norms, *others], 3), ([*norms, linear], 2)):
        with watch_saved() as saved, region(NEAREST):
            shared = x * 1
            for function in functions:
                function(shared)
        assert len({t.data_ptr() for t in saved.tensors if t.dtype is torch.uint8}) == count


ROUNDED = normalized(format="L4", quantize_forward=True)


def affine(case: Case, module: nn.Module, levels: Tensor) -> Tensor:
    parameters = [p.detach().view(case.affine) for p in module.parameters()]
    out = levels * parameters[0] if parameters else levels
    return out + parameters[1] if len(parameters) > 1 else out


@pytest.mark.parametrize("case", CASES, **by_name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_forward_is_the_affine_step_on_the_stored_levels(case, dtype):
    module = case.module(dtype)
    for x in layouts(case.shape):
        x = x.to(dtype)
        plain = copy.deepcopy(module)
        expected_out, _, _ = run(plain, x, None)
        out, grads, saved = run(module, x, ROUNDED)
        levels = levels_in(case, saved, x, ROUNDED)
        assert torch.equal(out, affine(case, module, levels).to(dtype))
        assert out.stride() == expected_out.stride() and out.dtype is expected_out.dtype
        eps = torch.finfo(dtype).eps
        assert_gradients(grads, case.gradients(module, x, case.split(levels), weights_like(out)), eps)
        for key, value in plain.state_dict().items():  # running statistics
            assert torch.equal(module.state_dict()[key], value), key
        for disabled in (torch.no_grad, torch.inference_mode):
            with watch_saved() as saved, disabled(), region(ROUNDED):
                again = module(x)
            assert torch.equal(again, out) and not saved.tensors


@pytest.mark.parametrize("make", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_frozen_norms_round_by_their_own_statistics(make):
    norm = frozen(make(4, affine=True, track_running_stats=True, eps=1e-3))
    nn.init.uniform_(norm.weight, 0.5, 2)
    for x in layouts(MAP):
        view = [1, 4, 1, 1]
        mean, var, weight, bias = (
            t.detach().view(view) for t in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        )
        z = (x - mean) * torch.rsqrt(var + norm.eps)
        levels = ROUNDED.quantizer.for_normalized.quantize(z).dequantize()
        out, grads, saved = run(norm, x, ROUNDED)
        assert torch.equal(out, levels * weight + bias)
        g = weights_like(out)
        stored = x.numel() // (x.shape[2] if x.stride(2) == 0 else 1)  # once where dimension 2 is expanded
        expected = [g * weight * torch.rsqrt(var + norm.eps), (g * levels).sum((0, 2, 3)), g.sum((0, 2, 3))]
        assert_gradients(grads, expected, torch.finfo(x.dtype).eps)
        assert sum(t.untyped_storage().nbytes() for t in saved.tensors if t.dtype is torch.uint8) == stored // 2
        with torch.no_grad(), region(ROUNDED):
            assert torch.equal(norm(x), out)


def test_inputs_of_any_size_are_rounded():
    norm, x = nn.BatchNorm1d(4), torch.randn(8, 4)
    large = normalized(min_numel=10**6, quantize_forward=True)
    out, _, saved = run(norm, x, large)
    assert torch.equal(out, levels_in(CASES[0], saved, x, large) * norm.weight + norm.bias)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8))


def functional(model: nn.Sequential, x: Tensor) -> Tensor:
    for layer in model:
        rounds = isinstance(layer, nn.BatchNorm2d | nn.GroupNorm)
        with region(ROUNDED if rounds else None):
            x = layer(x)
    return x


def test_a_model_evaluates_as_it_trains():
    model, x = brevact.quantize_backward(network(), ROUNDED), torch.randn(4, 3, 14, 14)
    plain = copy.deepcopy(model)
    brevact.restore_backward(plain)
    for mode in (True, False):
        model.train(mode), plain.train(mode)
        for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
            with context():
                out, expected, without = model(x), functional(plain, x), copy.deepcopy(plain)(x)
            assert torch.equal(out, expected) and not torch.equal(out, without)


def test_an_evaluated_model_packs_nothing_but_what_it_rounds():
    model = brevact.quantize_backward(network(), ROUNDED).eval()
    x = torch.randn(4, 3, 14, 14)
    with watch_saved() as saved:
        out = model(x)
    assert sum(t.dtype is torch.uint8 for t in saved.tensors) == 2  # the two norms; no convolution, no ReLU
    out.sum().backward()
    model[3].train()  # a module that trains inside
    with watch_saved() as saved:
        model(x)
    assert sum(t.dtype is torch.uint8 for t in saved.tensors) == 3


def test_rules_for_other_layers_do_not_apply_in_eval_mode():
    other = settings(bit_width=2)
    for rules in ({nn.Conv2d: other, "*": ROUNDED}, {nn.BatchNorm2d: ROUNDED, "*": other}, {"1": None, "*": ROUNDED}):
        model = brevact.quantize_backward(network(), rules).eval()
        with watch_saved() as saved:
            rounded = model(torch.ones(4, 3, 14, 14))
        norms = 2 if nn.Conv2d in rules else 1
        assert sum(t.dtype is torch.uint8 for t in saved.tensors) == norms
        with torch.no_grad():
            assert torch.equal(model(torch.ones(4, 3, 14, 14)), rounded)


def test_checkpointed_layers_recompute_what_they_rounded():
    model, x = brevact.quantize_backward(network(), ROUNDED), torch.randn(4, 3, 14, 14)
    reference = copy.deepcopy(model)
    out = model[0](x)
    out = checkpoint(model[1:], out, use_reentrant=False)
    expected = reference(x)
    assert torch.equal(out, expected)
    grads, references = (
        torch.autograd.grad(y, list(net.parameters()), weights_like(y))
        for y, net in ((out, model), (expected, reference))
    )
    assert all(torch.equal(a, b) for a, b in zip(grads, references, strict=True))


def test_attached_regions_round_in_eval_mode_and_leave_no_trace():
    norm, x = nn.BatchNorm2d(4).eval(), torch.randn(MAP)
    attach_region(norm, ROUNDED)
    with torch.no_grad():
        rounded = norm(x)
    z = x / (1 + norm.eps) ** 0.5
    assert torch.equal(rounded, ROUNDED.quantizer.for_normalized.quantize(z).dequantize())
    assert brevact.autograd.current_region() is None and torch._C._len_torch_function_stack() == 0


def test_other_quantizers_do_not_round_the_forward_pass():
    assert not BackwardSettings(UniformQuantizer()).quantizes_forward
    assert BackwardSettings(UniformQuantizer()).for_normalized is None
    assert not normalized().quantizes_forward and ROUNDED.quantizes_forward
    assert ROUNDED.for_normalized.quantizer == NormalizedQuantizer(format="L4").for_normalized


def test_rms_norm_has_no_form_of_its_own_for_levels():
    chosen = normalized(quantize_forward=True)
    norm, x = nn.RMSNorm(64), torch.randn(32, 64)
    out, _, saved = run(norm, x, chosen)
    assert torch.equal(out, F.rms_norm(x, (64,), norm.weight))
    (codes,) = (t for t in saved.tensors if t.dtype is torch.uint8)
    _, invstd = torch.ops.aten._fused_rms_norm(x, (64,), norm.weight, norm.eps)
    assert torch.equal(codes, chosen.quantizer.quantize(x * invstd).buffer)


def test_group_norm_reads_weights_with_gaps():
    x, weight, bias = torch.randn(MAP), torch.randn(8)[::2], torch.randn(8)[::2]
    grads = []
    for chosen in (None, settings(bit_width=32)):
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
        with region(chosen):
            out = F.group_norm(leaves[0], 2, *leaves[1:])
        grads.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    assert torch.equal(grads[1][0], grads[0][0])
    for grad, reference in zip(grads[1][1:], grads[0][1:], strict=True):
        torch.testing.assert_close(grad, reference)


@pytest.mark.parametrize(
    "make", [lambda: nn.LayerNorm((6, 6)), lambda: nn.GroupNorm(2, 8), lambda: nn.InstanceNorm2d(8, affine=True)]
)
def test_norms_give_gradients_for_each_sample(make):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(4, 8, 3), make(), nn.SiLU()), torch.randn(20, 4, 8, 8)
    found = []
    for chosen in (None, LosslessBackward):
        copied = copy.deepcopy(net)
        if chosen is not None:
            brevact.quantize_backward(copied, chosen, min_numel=0)
        call_for_per_sample_grads(copied, batch_size=20, loss_reduction="sum")(x).sum().backward()
        found.append([p.grad_sample for p in copied.parameters()])
    assert all(torch.equal(*grads) for grads in zip(*found, strict=True))
