"""Each op of torch's own database inside a region: what is stored changes neither the results nor, much, a gradient.

Forward bit-equal, gradients bit-equal where nothing is rounded, within 10 % at 8 bits, finite at 2 bits, exact at 2
bits where the README says so, and torch's own errors. ``make test`` runs one sample of each op; all samples, variants
and kinds of inputs are in the exhaustive tier.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import brevact
from brevact import BackwardSettings, LosslessBackward, StochBackward2bit, StochBackward8bit
from brevact.autograd import region
from brevact.autograd.functions import HANDLERS, dropout, kinds, lookups, piecewise_linear, pooling, selections
from brevact.autograd.functions.harmless import HARMLESS, OF_PLACES
from tests.autograd.op_database import (
    KINDS,
    MISSING,
    OPS,
    Outcome,
    Sample,
    Variant,
    larger_samples,
    name_of,
    run,
    samples,
    variants,
)

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

#: Whether samples with infinite or NaN elements are run: one spoils the gradient of the bucket that it lies in.
WITH_NON_FINITE = False
#: Relative error of a gradient whose tensors are stored at 8 bits, of one draw or of the mean over some.
MOST_ERROR, DRAWS = 0.1, 64
#: Norm of a gradient, relative to what reaches the op, that is no more than what rounding leaves of a difference.
VANISHING = 1e-5

#: Counterparts that store masks and indices; grid sampling stores its input packed, for the gradient of the grid.
EXACT_COUNTERPARTS = {
    *piecewise_linear.HANDLERS,
    *selections.HANDLERS,
    *dropout.HANDLERS,
    *pooling.HANDLERS,
    *lookups.HANDLERS,
    *(torch.abs, torch.absolute, torch.abs_, Tensor.abs, Tensor.absolute, Tensor.abs_, Tensor.absolute_, F.nll_loss),
} - {F.grid_sample, torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d}

DIVISIONS = {torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.divide, Tensor.true_divide, Tensor.div_}

#: Laws that ops cannot keep, with the reason.
LIMITS: dict[str, tuple[set[str], str]] = {
    "linalg.lstsq": ({"forward"}, "LAPACK's gelsy gives other last bits in each call, plain too"),
    "linalg.lstsq.grad_oriented": ({"forward"}, "LAPACK's gelsy gives other last bits in each call, plain too"),
    "nn.functional.scaled_dot_product_attention": (
        {"8 bits"},
        "the samples' scores are in the hundreds: the gradient is what is left of 1 - p, exponential in the scores",
    ),
    "nn.functional.multi_head_attention_forward": (
        {"8 bits"},
        "the samples' scores are in the hundreds: the gradient is what is left of 1 - p, exponential in the scores",
    ),
    **{name: ({"large"}, "its sparse samples have one size") for name in ("sparse.sampled_addmm", "sparse.mm.reduce")},
}
#: Ops that once lost a gradient at the default settings.
SHOWN = {"abs", "nansum", "copysign", "fmod", "remainder", "linalg.lu_factor_ex", "std", "norm", "take_along_dim"}
#: What the rows of which every element is masked do to ops that fill them with -inf inside, which reaches a bucket.
OF_MASKED_ROWS = {name: {"8 bits", "2 bits"} for name in ("masked.softmax", "masked.softmin", "masked.log_softmax")}

by_name = {"ids": name_of}


def settings_of(quantizer: Any, is_large: bool) -> BackwardSettings:
    """The default settings for large samples, those that pack each tensor for small ones."""
    return BackwardSettings(brevact.quantizer(quantizer), **({} if is_large else {"min_numel": 0}))


class Watch(TorchFunctionMode):
    """Lists the torch functions that a call asks for, as a region sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable, tuple]] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def stores_exactly(func: Callable, args: tuple, packs_all: bool) -> bool:
    """Whether a torch function is in a row of the README that promises an exact gradient."""
    if func in HANDLERS:
        return func in EXACT_COUNTERPARTS
    if func in kinds.CONDITIONAL:  # a division by an activation, which is large if each tensor is
        return packs_all and func in DIVISIONS and isinstance(args[1], Tensor)
    return func in OF_PLACES or (func not in HARMLESS and kinds.is_of_torch(func))


def are_same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors are bit-equal, NaN equal to NaN."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def finite_pairs(outcome: Outcome, plain: Outcome) -> list[tuple[Tensor, Tensor]]:
    """Elements of the gradients whose plain value is finite, with those values; no gradient is one of zeros."""
    pairs = []
    for grad, expected in zip(outcome.grads, plain.grads, strict=True):
        if expected is not None:
            grad = torch.zeros_like(expected) if grad is None else grad
            where = expected.isfinite()
            pairs.append((grad[where].double(), expected[where].double()))
    return pairs


def error_of(grad: Tensor, expected: Tensor, scale: float) -> float:
    """Error relative to the norm of what is expected, or to that of what reached the op if the gradient vanishes.

    A norm of two elements has no gradient but what rounding leaves of a difference; of that, 10 % is nothing.
    """
    error, norm = float((grad - expected).norm()), float(expected.norm())
    return error / (norm if norm > VANISHING * scale else scale) if error else 0.0


def errs_on_average(call: Callable[[int], Outcome], plain: Callable[[int], Outcome], expected: Outcome) -> bool:
    """Whether the mean gradient over some draws errs by more than the bound and more than 5 standard errors."""
    if not all(are_same(a, b) for a, b in zip(plain(1).outputs, expected.outputs, strict=True)):
        return True  # the op draws random numbers of its own
    drawn = [finite_pairs(call(seed), expected) for seed in range(DRAWS)]
    for i, (_, reference) in enumerate(drawn[0]):
        values = torch.stack([pairs[i][0] for pairs in drawn])
        mean = values.mean(0)
        if error_of(mean, reference, expected.scale) > MOST_ERROR:
            if float((mean - reference).norm()) > 5 * float(values.std(0).norm()) / DRAWS**0.5:
                return True
    return False


def broken_laws(variant: Variant, sample: Sample, kind: str, is_large: bool) -> list[str] | None:
    """Return what one call does that it must not; None where torch itself refuses the call, or gives no gradient."""
    try:
        with Watch() as watch:
            plain = run(variant, sample, kind, None, plain=True)
    except Exception:  # in place of a tensor that does not fit, say
        return None
    if not plain.grads:
        return None
    broken = []

    def in_region(quantizer: Any, seed: int = 0) -> Outcome:
        return run(variant, sample, kind, settings_of(quantizer, is_large), seed)

    lossless, eight, two = (in_region(each) for each in (LosslessBackward, StochBackward8bit, StochBackward2bit))
    for outcome in (lossless, eight, two):
        if not all(are_same(a, b) for a, b in zip(outcome.outputs, plain.outputs, strict=True)):
            broken.append("forward")
    if not all(are_same(a, b) for a, b in zip(lossless.grads, plain.grads, strict=True)):
        broken.append("lossless")
    if any(error_of(*pair, plain.scale) > MOST_ERROR for pair in finite_pairs(eight, plain)) and errs_on_average(
        lambda seed: in_region(StochBackward8bit, seed),
        lambda seed: run(variant, sample, kind, None, seed, plain=True),
        plain,
    ):
        broken.append("8 bits")
    if not all(grad.isfinite().all() for grad, _ in finite_pairs(two, plain)):
        broken.append("2 bits")
    packs_all = kind == "activation" and not is_large
    if all(stores_exactly(func, args, packs_all) for func, args in watch.calls):
        for grad, expected in finite_pairs(two, plain):
            eps = 8 * torch.finfo(torch.float32).eps
            if not torch.allclose(
                grad, expected, rtol=eps, atol=eps * float(expected.abs().max() if len(expected) else 0)
            ):
                broken.append("exact")
    return broken


def check(op: Any, some: list[Variant], found: list[Sample], all_kinds: tuple[str, ...], is_large: bool) -> None:
    """Check each variant with each sample and each kind of inputs, and that something was checked."""
    name = name_of(op)
    allowed: set[str] = LIMITS.get(name, (set(), ""))[0] | (
        set() if WITH_NON_FINITE else OF_MASKED_ROWS.get(name, set())
    )
    broken: dict[str, list[str]] = {}
    count = 0
    for variant in some:
        for i, sample in enumerate(found):
            for kind in all_kinds if sample.is_finite or WITH_NON_FINITE else ():
                laws = None if variant.is_inplace and kind == "leaf" else broken_laws(variant, sample, kind, is_large)
                count += laws is not None
                unkept = [law for law in laws or () if law not in allowed]
                if unkept:
                    broken.setdefault(f"{variant.name} of {kind}", []).append(f"{i}: {', '.join(unkept)}")
    assert not broken
    assert count > 0 or "runs" in allowed or (is_large and "large" in allowed)


@pytest.mark.parametrize("op", OPS, **by_name)
def test_a_sample_of_each_op_keeps_the_laws(op):
    found = sorted(samples(op, most=6), key=lambda sample: sum(x.numel() for x in sample.tensors))
    check(op, variants(op)[:1], found[-1:], ("activation",), is_large=False)


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
    for error in list(op.error_inputs("cpu"))[:most]:
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
