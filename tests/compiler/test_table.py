"""Ops of torch's own database in compiled regions: each is in the table rightly, or keeps its tensors.

Lossless packing leaves gradients bit-equal to the plain compiled ones. At 2 bits the mean of draws is the gradient,
within five standard errors; smooth functions of packed tensors bias it by at most 2 %, also of wide values.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from brevact import DitherBackward4bit, LosslessBackward, StochBackward2bit
from brevact.compiler import partition
from tests.autograd.database_laws import Outcome, are_same, bias_of, error_of, finite_pairs
from tests.autograd.op_database import MISSING, OPS, WIDE, Sample, larger_samples, name_of, variants, with_wide_values
from tests.compiler.compiled_ops import Call, errors_of_mean, sample_of

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

_QUICK = (
    "mul div sigmoid tanh sin exp log atan pow softmax cumsum cumprod einsum addcdiv lerp where gather sort "
    "index_add amax std linalg.vector_norm linalg.inv fft.rfft masked_fill bmm nn.functional.linear "
    "nn.functional.conv2d nn.functional.conv_transpose1d nn.functional.layer_norm nn.functional.batch_norm "
    "nn.functional.group_norm nn.functional.softplus nn.functional.gelu nn.functional.silu nn.functional.hardswish "
    "nn.functional.hardsigmoid nn.functional.prelu nn.functional.glu nn.functional.cross_entropy "
    "nn.functional.huber_loss nn.functional.cosine_similarity nn.functional.max_pool2d nn.functional.avg_pool2d "
    "nn.functional.grid_sample nn.functional.bilinear"
)
QUICK = frozenset(_QUICK.split())
#: Smooth functions, whose arguments or results are packed.
CURVED = frozenset("sigmoid tanh sin softmax mul nn.functional.softplus nn.functional.gelu nn.functional.silu".split())
#: The database seeds the generator inside of these, so that all draws are one and a graph's own seed changes theirs.
SEEDED = {
    "nn.functional.rrelu",
    "nn.functional.scaled_dot_product_attention",
    "nn.functional.multi_head_attention_forward",
    "pca_lowrank",
    "svd_lowrank",
}
by_name = {"ids": name_of}


@pytest.fixture(autouse=True)
def packs_small_masks(monkeypatch):
    monkeypatch.setattr(partition, "_LEAST_MASK", 0)


def tiers(quick: frozenset[str]) -> Any:
    marks = [() if name_of(op) in quick else pytest.mark.exhaustive for op in OPS if name_of(op) not in SEEDED]
    ops = [op for op in OPS if name_of(op) not in SEEDED]
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
    is_smooth = any(row.bits and row.use not in ("", "linear") for row in packed.rows)
    for error, standard in errors_of_mean(packed, plain):
        assert error <= 5 * standard + 64 * eps + (0.02 if is_smooth else 0)


@tiers(QUICK)
def test_the_mean_of_draws_is_the_gradient(op):
    check(op, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", [op for op in OPS if op.name in ("mul", "softmax", "nn.functional.silu")], **by_name)
def test_other_dtypes(op, dtype):
    check(op, dtype)


def wide_biases(op: Any) -> dict[str | float, float]:
    """Bias at 4 bits by the values of the largest sample's tensors, where an op is defined there."""
    largest = max(larger_samples(op), key=lambda sample: sum(x.numel() for x in sample.tensors), default=None)
    found: dict[str | float, float] = {}
    for each in WIDE if largest is not None else ():
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


@tiers(CURVED)
def test_a_few_values_that_take_the_range_bias_no_op(op):
    assert {each: bias for each, bias in wide_biases(op).items() if bias > 0.02} == {}


def packed_rows(function: Any, *inputs: Tensor) -> dict[str, int]:
    """Bits of the tensors that backward reads, by op."""

    class Function:
        call = staticmethod(function)

    call = Call(Function, Sample(inputs, {}), StochBackward2bit)  # type: ignore[arg-type]
    call()
    return {row.op.split(".")[1]: row.bits for row in call.rows}


X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0), requires_grad=True)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: torch.special.i0e(x), id="an op that the table lacks"),
        pytest.param(lambda x: X[0].detach()[x.long().abs().clamp(max=15)] * x.sigmoid().log(), id="integers of it"),
        pytest.param(lambda x: x / x.roll(1), id="a divisor"),
        pytest.param(lambda x: (x / 4).exp().exp(), id="an exponent"),
    ],
)
def test_gradients_near_at_2_bits(function):
    class Function:
        call = staticmethod(function)

    plain = Call(Function, Sample((X,), {}), None)()
    call = Call(Function, Sample((X,), {}), StochBackward2bit)
    for error, standard in errors_of_mean(call, plain):
        assert error <= 5 * standard + 1e-5


def test_an_op_that_the_table_lacks_keeps_its_tensors():
    assert set(packed_rows(lambda x: torch.cdist(x, x.flip(0)), X).values()) == {0}
