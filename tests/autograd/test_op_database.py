"""Each op of torch's own database in a region keeps results bit-equal, gradients near and torch's own errors.

Gradients are bit-equal where nothing is rounded, within 10 % at 8 bits, finite at 2 bits, and exact at 2 bits where
docs/how.md says so. The exhaustive tier has all samples, variants and kinds of inputs.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import brevact
from brevact import DitherBackward4bit, StochBackward2bit
from brevact.autograd import BackwardSettings, region
from brevact.autograd.interop.other_code import is_of_torch
from brevact.autograd.ops import OPS as FAMILIES
from brevact.autograd.ops.op import EXACT, Saves
from brevact.autograd.region.rows import row_of
from tests.autograd.database_laws import are_same, bias_of, broken_laws, settings_of
from tests.autograd.op_database import (
    KINDS,
    MISSING,
    OPS,
    WIDE,
    Sample,
    Variant,
    larger_samples,
    name_of,
    run,
    samples,
    variants,
    with_wide_values,
)

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

#: Counterparts whose gradient docs/how.md promises to be exact: they store masks, indices or nothing.
EXACT_COUNTERPARTS = {
    func for row in FAMILIES if row.handler and row.stored.gradient == EXACT for func in row.functions
}
OF_PLACES = {func for row in FAMILIES if row.saves in (Saves.PLACES, Saves.SIZES) for func in row.functions}

DIVISIONS = {torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.divide, Tensor.true_divide, Tensor.div_}

#: Laws that ops cannot keep, with the reason.
LIMITS: dict[str, tuple[set[str], str]] = {
    "linalg.lstsq": ({"forward"}, "LAPACK's gelsy gives other last bits in each call, plain too"),
    "linalg.lstsq.grad_oriented": ({"forward"}, "LAPACK's gelsy gives other last bits in each call, plain too"),
    "nn.functional.scaled_dot_product_attention": (
        {"8 bits", "large"},
        "the samples' scores are in the hundreds: the gradient is what is left of 1 - p, exponential in the scores; "
        "and their sizes are fixed and belong to one another",
    ),
    "nn.functional.multi_head_attention_forward": (
        {"8 bits", "large"},
        "the samples' scores are in the hundreds: the gradient is what is left of 1 - p, exponential in the scores; "
        "and their sizes are fixed and belong to one another",
    ),
    **{name: ({"large"}, "its sparse samples have one size") for name in ("sparse.sampled_addmm", "sparse.mm.reduce")},
    "nn.functional.layer_norm": (
        {"8 bits"},
        "one sample has one element: it is what rounding leaves of x - mean, times 316, or 0; the database of modules "
        "has layer norms of more",
    ),
    "diagflat": ({"large"}, "its result is the square of an input that is packed"),
}
#: Ops that once lost a gradient at the default settings.
MAY_ROUND = {func for op in FAMILIES if op.saves is not None for func in op.functions}
MUST_NOT_ROUND = {func for op in FAMILIES if op.must_not_round for func in op.functions}
SHOWN = {"abs", "nansum", "copysign", "fmod", "remainder", "linalg.lu_factor_ex", "std", "norm", "take_along_dim"}
#: Ops whose gradient is curved in a packed tensor, or multiplies it by a function that grows with it.
CURVED = {
    *(
        "sigmoid",
        "tanh",
        "erf",
        "exp",
        "mul",
        "bmm",
        "softmax",
        "linalg.norm",
    ),
    *(f"nn.functional.{name}" for name in ("silu", "gelu", "elu", "selu", "hardswish", "glu", "logsigmoid", "mish")),
    *(f"nn.functional.{name}" for name in ("softsign", "tanhshrink")),
}
#: The database seeds the generator inside of these: all draws are one.
SEEDED = {"nn.functional.rrelu", "svd_lowrank", "pca_lowrank"}
by_name = {"ids": name_of}


class Watch(TorchFunctionMode):
    """Lists the torch functions that a region sees in a call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable, tuple]] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def stores_exactly(func: Callable, args: tuple, packs_all: bool) -> bool:
    """Whether a torch function is in a row of docs/how.md that promises an exact gradient."""
    if row_of(func).handler is not None:
        return func in EXACT_COUNTERPARTS
    if func in MUST_NOT_ROUND:  # a division by an activation, which is large if each tensor is
        return packs_all and func in DIVISIONS and isinstance(args[1], Tensor)
    return func in OF_PLACES or (func not in MAY_ROUND and is_of_torch(func))


def broken_by(variant: Variant, sample: Sample, kind: str, is_large: bool) -> list[str] | None:
    """Return the laws that one call breaks; None where torch itself refuses the call, or gives no gradient."""
    try:
        with Watch() as watch:
            plain = run(variant, sample, kind, None)
    except Exception:  # in place of a tensor that does not fit, say
        return None
    if not plain.grads:
        return None
    packs_all = kind == "activation" and not is_large
    is_exact = all(stores_exactly(func, args, packs_all) for func, args in watch.calls)
    return broken_laws(lambda settings, seed: run(variant, sample, kind, settings, seed), is_large, is_exact)


def gives_gradient(variant: Variant, sample: Sample, kind: str) -> bool:
    """Whether torch itself takes the call and has a gradient for it."""
    try:
        return bool(run(variant, sample, kind, None).grads)
    except Exception:  # another kind of inputs, another size
        return False


def check(op: Any, some: list[Variant], found: list[Sample], all_kinds: tuple[str, ...], is_large: bool) -> None:
    """Check each variant with each sample, and that something ran; over many samples kinds of inputs take turns."""
    allowed: set[str] = LIMITS.get(name_of(op), (set(), ""))[0]
    broken: dict[str, list[str]] = {}
    count = 0
    for place, variant in enumerate(some):
        for i, sample in enumerate(found):
            turn = (place + i) % len(all_kinds)
            for kind in all_kinds if len(found) < len(all_kinds) else all_kinds[turn : turn + 1]:
                laws = None if variant.is_inplace and kind == "leaf" else broken_by(variant, sample, kind, is_large)
                count += laws is not None
                unkept = [law for law in laws or () if law not in allowed]
                if unkept:
                    broken.setdefault(f"{variant.name} of {kind}", []).append(f"{i}: {', '.join(unkept)}")
    assert not broken
    assert count > 0 or "runs" in allowed or (is_large and "large" in allowed)


def test_the_laws_are_checked_for_as_many_ops_as_promised():
    """And no limit leaves out bit-equal lossless gradients, finite ones, or those that are exact at 2 bits."""
    left_out = {name for name, (laws, _) in LIMITS.items() if laws & {"lossless", "2 bits", "exact", "runs"}}
    names = {name_of(op) for op in OPS}
    assert len(names - left_out) >= min(len(names), 539)  # PyTorch 2.11 has 533


@pytest.mark.parametrize("op", OPS, **by_name)
def test_a_sample_of_each_op_keeps_the_laws(op):
    variant = variants(op)[0]
    largest_first = sorted(samples(op, most=6), key=lambda sample: -sum(x.numel() for x in sample.tensors))
    calls = ((sample, kind) for kind in ("activation", *KINDS) for sample in largest_first)
    sample, kind = next(call for call in calls if gives_gradient(variant, *call))
    check(op, [variant], [sample], (kind,), is_large=False)


@pytest.mark.parametrize("op", [op for op in OPS if op.name in SHOWN], **by_name)
def test_large_samples_of_some_ops_keep_the_laws(op):
    check(op, variants(op), larger_samples(op, most=1), ("activation",), is_large=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", OPS, **by_name)
def test_small_samples_keep_the_laws(op):
    check(op, variants(op), samples(op), KINDS, is_large=False)


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", OPS, **by_name)
def test_large_samples_keep_the_laws(op):
    check(op, variants(op), larger_samples(op), KINDS, is_large=True)


def wide_biases(op: Any, values: tuple[str | float, ...]) -> dict[str | float, float]:
    """Bias at the default settings by the values of the largest sample's tensors, where an op is defined there."""
    settings = BackwardSettings(brevact.quantizer(DitherBackward4bit), score_bit_width=5)
    largest = max(larger_samples(op), key=lambda sample: sum(x.numel() for x in sample.tensors), default=None)
    found, variant = {}, variants(op)[0]
    for each in values if largest is not None else ():
        for is_positive in (False, True) if isinstance(each, str) or each > 0 else (False,):
            sample, odd = with_wide_values(largest, each, is_positive=is_positive)
            try:
                plain, other = (run(variant, sample, "activation", None, seed) for seed in range(2))
            except Exception:  # torch refuses the values
                continue
            is_random = not all(map(are_same, plain.outputs, other.outputs))
            if is_random or not all(grad is None or grad.isfinite().all() for grad in plain.grads):
                continue
            found[each] = bias_of(lambda seed, of=sample: run(variant, of, "activation", settings, seed), plain, odd)
            break
    return found


def check_wide(op: Any, values: tuple[str | float, ...]) -> None:
    assert {each: bias for each, bias in wide_biases(op, values).items() if bias > 0.02} == {}


@pytest.mark.parametrize("op", [op for op in OPS if name_of(op) in CURVED], **by_name)
def test_a_few_values_that_take_the_range_bias_no_curved_op(op):
    check_wide(op, WIDE[::2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", [op for op in OPS if op.name not in SEEDED], **by_name)
def test_a_few_values_that_take_the_range_bias_no_op(op):
    check_wide(op, WIDE)


def raised(call: Callable[[], Any]) -> tuple[type, str] | None:
    """Class and first line of the message of the exception that a call raises."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except Exception as error:
        return type(error), str(error).split("\n")[0]
    return None


def check_errors(op: Any, most: int | None) -> None:
    """Check that wrong arguments get torch's own errors, with and without gradients."""
    for error in itertools.islice(op.error_inputs_func(op, "cpu"), most):
        x = error.sample_input
        for needs_grad in (False, True):

            def enter(x: Any, needs_grad: bool = needs_grad) -> Any:
                if not isinstance(x, Tensor) or not x.is_floating_point() or x.layout is not torch.strided:
                    return x
                return x.detach().clone().requires_grad_(needs_grad)

            args, kwargs = tree_map(enter, ((x.input, *x.args), x.kwargs))
            expected = raised(lambda args=args, kwargs=kwargs: op(*args, **kwargs))

            def in_region(args: Any = args, kwargs: Any = kwargs) -> None:
                with region(settings_of(StochBackward2bit, is_large=False)):
                    op(*args, **kwargs)

            assert raised(in_region) == expected


FALLIBLE = [op for op in OPS if op.error_inputs_func is not None]


@pytest.mark.parametrize("op", FALLIBLE, **by_name)
def test_wrong_arguments_get_torchs_own_error(op):
    check_errors(op, most=1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", FALLIBLE, **by_name)
def test_all_wrong_arguments_get_torchs_own_errors(op):
    check_errors(op, most=None)
