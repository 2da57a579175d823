"""Ops of torch's own database in compiled regions: each is in the table rightly, or keeps its tensors.

Lossless packing leaves gradients bit-equal to the plain compiled ones. At 2 bits the mean of draws is the gradient,
within five standard errors; smooth functions of packed tensors bias it by at most 2 %, also of wide values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from brevact import DitherBackward4bit, LosslessBackward, StochBackward2bit, StochBackward8bit
from brevact.compiler import packing
from tests.autograd.database_laws import Outcome, are_same, bias_of, error_of, finite_pairs
from tests.autograd.op_database import (
    MISSING,
    OPS,
    WIDE,
    Sample,
    Variant,
    larger_samples,
    name_of,
    variants,
    with_wide_values,
)
from tests.compiler.compiled_ops import DRAWS, Call, activation, errors_of_mean, sample_of
from tests.crosses import some_of

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

_QUICK = (
    "mul exp softmax einsum where nn.functional.conv2d nn.functional.batch_norm nn.functional.gelu "
    "nn.functional.cross_entropy nn.functional.max_pool2d"
)
_OTHERS = (
    "div pow amax std nn.functional.prelu "
    "sigmoid tanh sin log atan cumsum cumprod addcdiv lerp gather sort index_add linalg.vector_norm linalg.inv "
    "fft.rfft masked_fill bmm nn.functional.linear nn.functional.conv_transpose1d nn.functional.layer_norm "
    "nn.functional.group_norm nn.functional.softplus nn.functional.silu nn.functional.hardswish "
    "nn.functional.hardsigmoid nn.functional.glu nn.functional.huber_loss nn.functional.cosine_similarity "
    "nn.functional.avg_pool2d nn.functional.grid_sample nn.functional.bilinear"
)
QUICK = frozenset(_QUICK.split())
#: One of each kind.
KINDS = QUICK.union(_OTHERS.split())
#: Smooth functions, whose arguments or results are packed.
CURVED = frozenset(("softmax", "nn.functional.gelu"))
#: The database seeds the generator inside of these, so that all draws are one and a graph's own seed changes theirs.
SEEDED = {
    "nn.functional.rrelu",
    "nn.functional.scaled_dot_product_attention",
    "nn.functional.multi_head_attention_forward",
    "pca_lowrank",
    "svd_lowrank",
}


@pytest.fixture(autouse=True)
def packs_small_masks(monkeypatch):
    monkeypatch.setattr(packing, "_LEAST_MASK", 0)


def tiers(quick: frozenset[str], of: frozenset[str] | None = None) -> Any:
    """All ops, or those of some names, the quick ones outside of the exhaustive tier."""
    ops = [op for op in OPS if name_of(op) not in SEEDED and (of is None or name_of(op) in of)]
    marks = [() if name_of(op) in quick else pytest.mark.exhaustive for op in ops]
    return pytest.mark.parametrize(
        "op", [pytest.param(op, marks=mark, id=name_of(op)) for op, mark in zip(ops, marks, strict=True)]
    )


def is_near(outcome: Outcome, plain: Outcome, eps: float) -> bool:
    """Whether results are the same but for the order of some roundings."""
    pairs = finite_pairs(Outcome([], list(outcome.outputs), 1), Outcome([], list(plain.outputs), 1))
    return all(error_of(*pair, 1) < 64 * eps for pair in pairs)


def check(op: Any, dtype: torch.dtype) -> None:
    found = sample_of(op, dtype)
    if found is None:
        pytest.skip(f"no sample of {dtype} has a gradient")
    try:
        call = Call(*found, None)
        plain, other = call(0), call(1)
    except (NotImplementedError, AttributeError, torch._dynamo.exc.TorchDynamoException) as error:
        pytest.skip(f"torch cannot compile it: {error}")
    lossless = Call(*found, LosslessBackward)(0)
    assert all(map(are_same, lossless.outputs, plain.outputs))
    assert all(map(are_same, lossless.grads, plain.grads))
    packed = Call(*found, StochBackward2bit)
    drawn = packed(0)
    assert all(grad.isfinite().all() for grad, _ in finite_pairs(drawn, plain))
    if not all(map(are_same, plain.outputs, other.outputs)):
        return  # it draws random numbers of its own
    eps = torch.finfo(dtype).eps
    assert is_near(drawn, plain, eps)
    eps = max(eps, torch.finfo(torch.float32).eps)  # float64 is packed as float32
    is_smooth = any(row.bits and row.use not in ("", "linear") for row in packed.rows)
    for error, standard in errors_of_mean(packed, plain):
        assert error <= 5 * standard + 64 * eps + (0.02 if is_smooth else 0)


@tiers(QUICK)
def test_the_mean_of_draws_is_the_gradient(op):
    check(op, torch.float32)


@tiers(frozenset(("softmax", "nn.functional.silu")), KINDS - {"pow"})  # it overflows float16 next to a rounded value
def test_other_dtypes(op):
    """Of types that take turns."""
    check(op, (torch.float64, torch.bfloat16, torch.float16)[OPS.index(op) % 3])


def wide_biases(op: Any) -> dict[str | float, float]:
    """Bias at 4 bits by the values of the largest sample's tensors, where an op is defined there."""
    largest = max(larger_samples(op), key=lambda sample: sum(x.numel() for x in sample.tensors), default=None)
    found: dict[str | float, float] = {}
    for each in WIDE[::2] if largest is not None else ():
        for is_positive in (False, True) if isinstance(each, str) or each > 0 else (False,):
            sample, odd = with_wide_values(largest, each, is_positive=is_positive)
            try:
                call = Call(variants(op)[0], sample, None)
                plain, other = call(0), call(1)
            except Exception:  # torch refuses the values
                continue
            is_random = not all(map(are_same, plain.outputs, other.outputs))
            if is_random or not all(grad is None or grad.isfinite().all() for grad in plain.grads):
                continue
            found[each] = bias_of(Call(variants(op)[0], sample, DitherBackward4bit), plain, odd)
            break
    return found


@tiers(CURVED, KINDS)
def test_a_few_values_that_take_the_range_bias_no_op(op):
    assert {each: bias for each, bias in wide_biases(op).items() if bias > 0.02} == {}


def packed_rows(function: Any, *inputs: Tensor) -> dict[str, int]:
    """Bits of the tensors that backward reads, by op."""
    call = Call(Variant("", function), Sample(inputs, {}), StochBackward2bit)
    call()
    return {row.op: row.bits for row in call.rows}


X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)
LSTM = nn.LSTM(16, 4)
FUNCTIONS = {
    "integers of it": lambda x: x.gather(1, (x * 3).long().clamp(0, 15)) * x,
    "a floor of a quotient": lambda x: torch.div(x * 5, x.abs() + 0.5, rounding_mode="floor") * x,
    "a divisor": lambda x: x / x.roll(1),
    "an exponent": lambda x: (x / 4).exp().exp(),
    "a maximum": lambda x: (x - x.amax(-1, keepdim=True)).exp(),
    "a comparison": lambda x: torch.where(x > x.roll(1), x * x, x),
    "scores": lambda x: F.scaled_dot_product_attention(x.view(1, 2, 8, 8), x.view(1, 2, 8, 8), x.view(1, 2, 8, 8)),
    "a saturated function": lambda x: (30 * x).tanh() * (30 * x).tanh().roll(1),
    "exponential units": lambda x: F.elu(3 * x) * F.selu(x.roll(1)) + F.celu(x, 0.5).square(),
    "waves": lambda x: (30 * x).sin() * (30 * x.roll(1)).cos(),
    "saturated gates": lambda x: (20 * x[:, :8]).sigmoid() * (20 * x[:, 8:]).tanh(),
    "between graphs": lambda x: LSTM(x[None])[0],
}


@pytest.mark.parametrize("name", some_of(FUNCTIONS, quick=4))
def test_chains_of_ops(name):
    variant, sample = Variant("", FUNCTIONS[name]), Sample((X,), {})
    plain = Call(variant, sample, None)()
    lossless = Call(variant, sample, LosslessBackward)()
    assert all(map(are_same, lossless.grads, plain.grads))
    for error, standard in errors_of_mean(Call(variant, sample, StochBackward2bit), plain):
        assert error <= 5 * standard + 0.02


@pytest.mark.parametrize("name", ["hardswish", "hardsigmoid", "silu"])
def test_a_function_that_pytorchs_list_of_overridable_ones_lacks_is_packed(name):
    assert packed_rows(getattr(F, name), X)


def _norm(x: Tensor) -> Tensor:
    x = (x.t() @ x.detach()).repeat(8, 8)
    return F.layer_norm(x, x.shape[-1:])


def _parts(x: Tensor) -> Tensor:
    q, k, v = x.repeat(16, 3).view(1, 2, 64, 48).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v)


def _convolution_of_norm(x: Tensor) -> Tensor:
    return F.conv1d(F.batch_norm(x[None].repeat(8, 1, 8), None, None, training=True), torch.ones(4, 8, 3))


def _instance_norm(x: Tensor) -> Tensor:
    return F.instance_norm((x.t() @ x.detach()).repeat(8, 8).view(2, 4, -1))


def _norm_of_copy(x: Tensor) -> Tensor:
    """Rows of very different sizes, which are neighbours only in another order."""
    parts = (x.t() @ x.detach()).repeat(16, 8).view(8, 32, 128) * torch.logspace(-4, 0, 32)[:, None]
    return F.rms_norm(activation(parts).transpose(0, 1).reshape(32, 1024), (1024,))


def _softmax(x: Tensor) -> Tensor:
    return F.cross_entropy((x @ x.detach().t()).repeat(1, 8), torch.arange(8), reduction="none")


#: Functions, an op, and the uses and bits of its results that a policy of 2 bits saves.
SAVED = {
    # A norm's gradient is quadratic by a sum over many elements: its normalized input takes the policy's bits.
    "a norm of many": (_norm, "aten.repeat", {("averaged", 2)}),
    "a norm of few": (lambda x: F.layer_norm((x @ x.t())[:, :4] * 3, (4,)), "aten.mul", {("smooth", 4)}),
    "a convolution of a norm": (_convolution_of_norm, "aten.repeat", {("averaged", 2)}),
    "query and key, value": (_parts, "aten.split", {("scores", 8), ("linear", 2)}),
    "probabilities of losses": (_softmax, "aten.where", {("linear", 2)}),
    "a loss's gradients": (lambda x: _softmax(x).mean(), "aten.sum", {("linear", 2)}),
    "a norm of a copy": (_norm_of_copy, "aten.view", {("smooth", 4)}),
    "a norm of a view": (_instance_norm, "aten.repeat", {("averaged", 2)}),
    "a function that follows from its argument": (lambda x: F.softplus(x @ x.t()) @ x.detach(), "aten.where", set()),
}


@pytest.mark.parametrize("name", some_of(SAVED, quick=2))
def test_uses_and_bits(name):
    function, op, expected = SAVED[name]
    variant, sample = Variant("", function), Sample((X,), {})
    call, plain = Call(variant, sample, StochBackward2bit), Call(variant, sample, None)()
    for error, standard in errors_of_mean(call, plain):
        assert error <= 5 * standard + 0.02
    assert {(row.use, row.bits) for row in call.rows if row.op == op and row.bits} == expected


def _attend(x: Tensor, dropout_p: float = 0.2) -> Tensor:
    q, k, v = x.repeat(16, 3).view(1, 2, 64, 48).chunk(3, -1)
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True)


def _errors_of_attention(
    x: Tensor, function: Callable[[Tensor], Tensor] = _attend, policy: Any = StochBackward2bit
) -> tuple[Tensor, float, Call]:
    """Errors of gradients, their norm, and the call; masks of a seed are the plain graph's, so that codes err alone."""
    call, plain = (Call(Variant("", function), Sample((x,), {}), each) for each in (policy, None))
    errors = torch.stack([call(seed).grads[0] - plain(seed).grads[0] for seed in range(DRAWS)])
    return errors, float(plain(0).grads[0].norm()), call


def test_attention_with_dropout_computes_its_probabilities_again():
    errors, norm, call = _errors_of_attention(X)
    standard = float(errors.std(0).norm()) / DRAWS**0.5
    assert float(errors.mean(0).norm()) <= 5 * standard + 0.02 * norm
    assert {row.bits for row in call.rows if row.use == "scores" and row.bits} == {8}
    assert max(math.prod(row.shape) for row in call.rows if row.bits > 1) < 2 * 64 * 64


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
def test_probabilities_computed_again_from_wide_scores_sum_to_one(dropout_p):
    attend = functools.partial(_attend, dropout_p=dropout_p)
    errors, norm, _ = _errors_of_attention((30 * X).detach().requires_grad_(), attend, StochBackward8bit)
    assert float(errors.flatten(1).norm(dim=1).max()) < 2 * norm


def test_what_keys_have_in_common_adds_no_noise():
    def attend(x: Tensor, offset: float = 0.0) -> Tensor:
        q, k, v = x.view(3, 1, 2, 64, 32)
        return F.scaled_dot_product_attention(q, activation(k + offset * torch.linspace(-1, 1, 32)), v)

    x = torch.randn(3 * 2 * 64, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    errors = []
    for offset in (0.0, 30.0):
        of_draws, norm, _ = _errors_of_attention(x, functools.partial(attend, offset=offset), StochBackward8bit)
        errors.append(float(of_draws.flatten(1).norm(dim=1).mean()) / norm)
    assert errors[1] < 2 * errors[0]


def test_far_keys_that_are_masked_out_add_no_noise():
    """Each key is a bucket of its own: others decode as if the far ones were not there."""

    def attend(x: Tensor, size: float = 1.0) -> Tensor:
        q, k, v = x.view(3, 1, 2, 64, 32)
        far = (torch.arange(64) >= 58)[:, None]
        return F.scaled_dot_product_attention(q, activation(torch.where(far, k * size, k)), v, ~far.mT.expand(64, 64))

    x = torch.randn(3 * 2 * 64, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    policy, errors = StochBackward8bit.let(bucket_size=32), []
    for size in (1.0, 1e10):
        of_draws, norm, _ = _errors_of_attention(x, functools.partial(attend, size=size), policy)
        errors.append(float(of_draws.flatten(1).norm(dim=1).mean()) / norm)
    assert errors[1] < 1.1 * errors[0]


def _squared_dice(x: Tensor) -> Tensor:
    p, mask = x.sigmoid(), (x.detach() > 0).float()
    return 1 - 2 * (p * mask).sum() / ((p * p).sum() + mask.sum())


def _near(x: Tensor) -> Tensor:
    return x.detach() + 0.02 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))


def _from_teacher(x: Tensor) -> Tensor:
    teacher = _near(x).softmax(1)  # first, for its generator breaks the graph
    return F.kl_div(x.log_softmax(1), teacher, reduction="batchmean")


def _pairs(x: Tensor) -> Tensor:
    """SigLIP against frozen embeddings."""
    x = activation((x - 6 * x.detach().sign()).view(256, 32))
    other = x.detach() + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    products = F.normalize(x, dim=1) @ F.normalize(other, dim=1).mT
    return -F.logsigmoid((2 * torch.eye(len(x)) - 1) * 10 * (products - 1)).sum(1).mean()


def _discrepancy(x: Tensor) -> Tensor:
    """Maximum mean discrepancy of samples that are near those of a target."""
    x = activation((x - 6 * x.detach().sign()).view(256, 32))
    other = x.detach() + 0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) + 0.1

    def similarity(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-(torch.cdist(a, b) ** 2) / 64).mean()

    return similarity(x, x) - 2 * similarity(x, other)


def _similarity(x: Tensor) -> Tensor:
    """SSIM."""
    turn = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(2)))[0]
    x = (activation(x - 6 * x.detach().sign()) @ turn).view(8, 1, 32, 32) / 10 + 0.5
    other = x.detach() + 0.01 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    means, squares, products = (F.conv2d(y, torch.ones(1, 1, 7, 7) / 49) for y in (x, x * x, x * other))
    of_other, other_squares = (F.conv2d(y, torch.ones(1, 1, 7, 7) / 49) for y in (other, other * other))
    found = (2 * means * of_other + 1e-4) / (means**2 + of_other**2 + 1e-4)
    found = found * (2 * (products - means * of_other) + 9e-4)
    return -(found / (squares - means**2 + other_squares - of_other**2 + 9e-4)).mean()


def _wide_rows(x: Tensor) -> Tensor:
    """Rows of a layer, one number of which is far larger than the others."""
    generator = torch.Generator().manual_seed(1)
    turn = torch.linalg.qr(torch.randn(16, 16, generator=generator))[0]
    far = torch.where(torch.arange(16) == 3, 6000 * torch.randn(512, 1, generator=generator), 0)
    return (x @ turn.mT + far @ turn.mT) @ turn


def _norm_of_far_groups(x: Tensor) -> Tensor:
    scale = torch.where(torch.arange(512) % 16 < 2, 1000, 1)[:, None]
    return F.group_norm(activation(x * scale).view(32, 16, 16), 8, *torch.linspace(1, 2, 32).view(2, 16))


def _group_norm(x: Tensor, groups: int) -> Tensor:
    return F.group_norm(activation(x).view(512, 16, 1), groups, *torch.linspace(1, 2, 32).view(2, 16))


#: Functions whose gradients are small beside the tensors that they are computed from.
SURE = {
    "softplus written out": lambda x: x.exp().log1p(),
    "sigmoid written out": lambda x: 1 / (1 + (-x).exp()),
    "a fraction of exponentials": lambda x: x.exp() / (1 + x.exp()),
    "roots of squares": lambda x: ((x - 6 * x.detach().sign()).square() + 1e-6).sqrt(),
    "wide rows over their norms": lambda x: (lambda x: x / x.norm(dim=-1, keepdim=True))(_wide_rows(x)),
    "norms of far groups": _norm_of_far_groups,
    "norms of two": lambda x: _group_norm(x, 8),
    "norms of four": lambda x: _group_norm(x, 4),
    "norms of four rows": lambda x: F.batch_norm(activation(x).view(4, 2048), None, None, training=True),
    "cross-entropy of probabilities": lambda x: F.binary_cross_entropy(x.sigmoid(), (x.detach() > 0).float()),
    "squared Dice": _squared_dice,
    "divergence from a teacher": _from_teacher,
    "the same written out": lambda x: (_near(x).softmax(1) * (_near(x).log_softmax(1) - x.log_softmax(1))).sum(),
    "pairs of embeddings": _pairs,
    "discrepancy": _discrepancy,
    "similarity of images": _similarity,
    "divergence to probabilities": lambda x: F.kl_div(_near(x).log_softmax(1), x.softmax(1), reduction="sum"),
    "cosine similarity": lambda x: (1 - F.cosine_similarity(x, _near(x))).mean(),
}


@pytest.mark.parametrize("name", some_of(SURE, quick=4))
def test_gradients_beside_large_tensors_have_little_noise(name):
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    errors, norm, _ = _errors_of_attention((x + 6 * x.sign()).requires_grad_(), SURE[name], DitherBackward4bit)
    assert float(errors.flatten(1).norm(dim=1).mean()) < 0.5 * norm
    assert float(errors.mean(0).norm()) <= 5 * float(errors.std(0).norm()) / DRAWS**0.5 + 0.05 * norm


def _gated_steps(x: Tensor) -> Tensor:
    """An LSTM's steps, written out."""
    state = cell = x.new_zeros(len(x), 16)
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    for part in x.chunk(4, 1):
        i, f, g, o = (part + activation(state @ weight)).chunk(4, 1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        state = o.sigmoid() * cell.tanh()
    return state


def _layer_of_silu(x: Tensor) -> Tensor:
    return F.silu(activation(x / 3)) @ torch.randn(256, 32, generator=torch.Generator().manual_seed(1))


GATES = {
    "glu": F.glu,
    "an LSTM's steps": _gated_steps,
    "tanh of a part": lambda x: x[:, :64].tanh() * x[:, 64:128],
    "SiLU before a layer": _layer_of_silu,
}


@pytest.mark.parametrize("name", some_of(GATES, quick=4))
def test_gates_of_parts_of_wide_tensors_are_biased_by_less_than_2_percent(name):
    x = (30 * torch.randn(64, 256, generator=torch.Generator().manual_seed(0))).requires_grad_()
    variant, sample = Variant("", GATES[name]), Sample((x,), {})
    plain = Call(variant, sample, None)()
    assert bias_of(Call(variant, sample, DitherBackward4bit), plain, [None]) < 0.02


def _of_classes(x: Tensor) -> Tensor:
    return F.cross_entropy(x, torch.arange(len(x)) % x.shape[1], reduction="none")


def _attend_surely(x: Tensor) -> Tensor:
    return torch.softmax(x.view(8, 64, 64), -1) @ torch.linspace(1, 2, 64)


def _route(x: Tensor) -> Tensor:
    return (torch.softmax(x / 0.5, -1) * torch.linspace(1, 2, x.shape[1])).sum(-1)


@pytest.mark.parametrize(
    ("function", "classes", "bits"), [(_of_classes, 10, 4), (_route, 10, 8), (_attend_surely, 64, 4)]
)
def test_gradients_of_sure_networks_have_little_noise(function, classes, bits):
    x = torch.randn(512, classes, generator=torch.Generator().manual_seed(0))
    logits = (2 * (x + 5 * F.one_hot(torch.arange(512) % classes, classes))).requires_grad_()
    errors, norm, call = _errors_of_attention(logits, function, DitherBackward4bit)
    assert float(errors.flatten(1).norm(dim=1).mean()) < 0.4 * norm
    assert float(errors.mean(0).norm()) <= 5 * float(errors.std(0).norm()) / DRAWS**0.5 + 0.02 * norm
    assert max(row.nbytes for row in call.rows) < 512 * classes * (bits + 0.2) / 8


def test_a_tensor_that_several_norms_broadcast_is_packed_as_it_is():
    """A mixture of Gaussians: no row of the result has the statistics of the tensor alone."""
    mean, scale = torch.randn(2, 4, 1, generator=torch.Generator().manual_seed(0))

    def standardize(x: Tensor) -> Tensor:
        return ((x.view(1, -1) - mean) * scale.square().add(1).rsqrt()).pow(3)

    call = Call(Variant("", standardize), Sample((X,), {}), StochBackward2bit)
    call()
    assert {row.nbytes for row in call.rows if row.bits} == {X.numel() // 2 + 6}


UNITS = {"elu": F.elu, "selu": F.selu, "celu": lambda x: F.celu(x, 0.5)}


@pytest.mark.parametrize("name", some_of(UNITS, quick=3))
def test_exponential_units_are_read_from_their_results(name):
    unit, weight = UNITS[name], torch.randn(16, 16, requires_grad=True)
    assert packed_rows(lambda x: unit(x) @ weight, X) == {"aten.where": 2, "aten.le": 1}


def test_comparisons_that_differ_stay_apart():
    """Integers above 2**24 are rounded where they become floats; results of a graph share no memory."""
    large = torch.tensor([2**24 + 1, 2**24]).repeat(8)

    def compare(x: Tensor) -> tuple[Tensor, ...]:
        masks = large > 2**24, large > float(2**24), large * 1.0 > 2**24, x > 0, x * 1 > 0
        return (functools.reduce(lambda y, mask: torch.where(mask, y.sin(), y), masks, x), *masks)

    call = Call(Variant("", compare), Sample((X,), {}), StochBackward2bit)
    assert all(map(torch.equal, call().outputs, Call(Variant("", compare), Sample((X,), {}), None)().outputs))
    assert len({mask.data_ptr() for mask in call.call([X])[1:]}) == 5


def test_lookups_in_weights_are_computed_again():
    positions, x = nn.Embedding(64, 64), torch.randn(4, 64, 64, requires_grad=True)

    def call(x: Tensor) -> Tensor:
        return F.layer_norm(activation(x) + positions(torch.arange(64)), (64,)).square()

    assert "aten.embedding" not in packed_rows(call, x)


def test_an_op_that_the_table_lacks_keeps_its_tensors():
    call = Call(Variant("", lambda x: torch.cdist(x, x.flip(0))), Sample((X,), {}), StochBackward2bit)
    call()
    assert {(row.bits, row.use) for row in call.rows} == {(0, "exact: aten._cdist_backward reads it")}
