"""Whole models that nobody here wrote: forward, gradients and bytes."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from scipy.stats import norm, t
from torch import Tensor, nn

import brevact
from benchmarks.small_models import CONVOLUTIONAL, TRANSFORMERS
from benchmarks.step import Step, gradient, loss_of, mean_projection, quantized, relative_error
from brevact import (
    BackwardSettings,
    PackedActivation,
    StochBackward2bit,
    StochBackward4bit,
    StochBackward8bit,
    UniformQuantizer,
)
from tests.crosses import some_of, taking_turns

MODELS = TRANSFORMERS | CONVOLUTIONAL
LEAST_RATIO = {name: 12 if name in CONVOLUTIONAL else 6 for name in MODELS}
#: Steps of 8 and of 4 bits, 1 / 255 and 1 / 15 of the range.
STEP_RATIO = 15 / 255


@pytest.fixture(scope="module", params=MODELS)
def subject(request: pytest.FixtureRequest) -> tuple[str, Step]:
    return request.param, MODELS[request.param].build()


def is_quadratic(name: str, module: nn.Module) -> bool:
    """Norms and attention: their gradients are not linear in each saved tensor."""
    kind = type(module).__name__
    return "Norm" in kind or "Attention" in kind


def test_forward_is_bit_equal_and_few_bytes_are_kept(subject):
    name, plain = subject
    two = quantized(plain, StochBackward2bit)
    assert torch.equal(loss_of(two, 0), loss_of(plain, 0))
    report = brevact.memory_report(two.model, two.batch, two.loss)
    assert report.ratio >= LEAST_RATIO[name], f"\n{report}"


@pytest.mark.parametrize("subject", some_of(MODELS, quick=2), indirect=True, scope="module")
def test_gradients_err_in_proportion_to_the_step(subject):
    _, plain = subject
    expected = [gradient(plain, seed) for seed in range(2)]
    errors = []
    for quantizer in (StochBackward4bit, StochBackward8bit):
        noisy = quantized(plain, quantizer)
        errors.append(sum(relative_error(gradient(noisy, seed), expected[seed]) for seed in range(2)) / 2)
    assert 0.0 < errors[1] < 2 * STEP_RATIO * errors[0] and errors[0] < 1.0


#: Convolutions and attention of several kinds.
UNBIASED = ("EfficientNetV2 nano", "RegNet", "ViT", "Llama", "SegFormer", "BERT")


@pytest.mark.parametrize("subject", some_of(MODELS, quick=UNBIASED), indirect=True, scope="module")
def test_gradients_are_unbiased_where_the_ops_allow_it(subject):
    _, plain = subject
    rules = {is_quadratic: StochBackward8bit, "*": StochBackward2bit}
    noisy = quantized(plain, rules)
    draws = 8
    mean, error = mean_projection([(gradient(noisy, seed), gradient(plain, seed)) for seed in range(draws)])
    assert abs(mean - 1) < t.isf(norm.sf(5), draws - 1) * error  # as rare as 5 standard errors of a normal mean
    assert error > 0.0


class Spy(UniformQuantizer):
    seen: ClassVar[list[Tensor]] = []

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        Spy.seen.append(x)
        return super().quantize(x, seed)


@pytest.mark.parametrize(
    "subject, autocast", taking_turns(list(MODELS), [False, True]), indirect=["subject"], scope="module"
)
def test_weights_are_never_packed(subject, autocast):
    _, plain = subject
    spied = quantized(plain, BackwardSettings(Spy(bit_width=8), min_numel=0))
    Spy.seen.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss_of(spied)
    given = {(x.numel(), *x.flatten()[:2].tolist()): x for x in map(torch.Tensor.float, Spy.seen)}
    Spy.seen.clear()
    weights = [p.detach() for p in spied.model.parameters() if p.dim() > 1]
    copies = [form.flatten() for p in weights for form in (p, p.transpose(0, 1), p.bfloat16().float())]
    assert len(given) > 10
    for x in given.values():
        assert not any(x.numel() == copy.numel() and torch.equal(x.flatten(), copy) for copy in copies), x.shape
