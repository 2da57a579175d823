"""One process: sent bytes, error feedback, checkpoints and errors."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch import distributed, nn

import brevact
from brevact.distributed import QuantizedHook, quantized_hook
from brevact.distributed.packing import is_unbiased
from brevact.quantizers import NormalizedQuantizer
from tests.distributed.models import averaged, normal, parallel
from tests.quantizers.subjects import SUBJECTS


@pytest.fixture(scope="module", autouse=True)
def group():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gradients_are_what_the_quantizer_decodes(dtype):
    given = normal(1, dtype)
    hook = quantized_hook(brevact.NearestBackward4bit, error_feedback=False)
    first, bias, second = averaged(parallel(hook, dtype), given)
    quantizer = brevact.quantizer(brevact.NearestBackward4bit)
    assert torch.equal(bias, given[1])
    for gradient, x in ((first, given[0]), (second, given[2])):
        assert torch.equal(gradient, quantizer.quantize(x).dequantize())
    size = given[0].element_size()
    codes = (96 * 64 + 5000) / 2 + (12 + 10) * 6  # of float32 sums and bfloat16 scales at most
    assert hook.plain_bytes == (96 * 64 + 64 + 5000) * size
    assert codes - 22 * 2 <= hook.sent_bytes - 64 * size <= codes + 16 * 5


@pytest.mark.parametrize(
    "source",
    [
        brevact.WeibullBackward4bit,
        brevact.DitherBackward4bit,
        brevact.StochBackward4bit.let(granularity="channel"),
        brevact.StochBackward4bit8bitMix,
        brevact.StochBackward4bitPerSample,
        brevact.DualPrecisionBackward4bit,
        brevact.SignMagnitudeBackward,
        brevact.StochU8Backward,
        brevact.LosslessBackward,
    ],
    ids=lambda source: source.__name__,
)
def test_every_kind_of_quantizer_sends_gradients(source):
    given = normal(2)
    hook = quantized_hook(source)
    for gradient, x in zip(averaged(parallel(hook), given), given, strict=True):
        error = (gradient - x).norm() / x.norm()
        assert error <= (0 if source is brevact.LosslessBackward else 0.5)
    assert source is brevact.LosslessBackward or hook.sent_bytes < hook.plain_bytes / 2


def test_is_unbiased_agrees_with_the_contract():
    for name, subject in SUBJECTS.items():
        clips = isinstance(subject.quantizer, NormalizedQuantizer)
        lossless = getattr(subject.quantizer, "is_lossless", False)
        assert is_unbiased(subject.quantizer) == (lossless or (subject.is_unbiased and not clips)), name


def test_stochastic_gradients_have_the_right_mean_and_new_noise_in_each_step():
    given = normal(3)
    hook = quantized_hook(brevact.StochBackward2bit)
    model = parallel(hook)
    draws = torch.stack([averaged(model, given)[2] for _ in range(64)]).double()
    assert not hook.error_feedback and all(not torch.equal(a, b) for a, b in pairwise(draws[:5]))
    error = draws.mean(0) - given[2].double()
    # 5000 elements of independent error: five standard errors of the mean error, with random signs
    signs = torch.randint(0, 2, error.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    deviation = (draws.var(0) / len(draws)).sum().sqrt()
    assert (error * signs).sum().abs() <= 5 * deviation


def test_error_feedback_sends_later_what_rounding_took():
    hook = quantized_hook(brevact.NearestBackward2bit)
    model = parallel(hook)
    assert hook.error_feedback
    given = [normal(seed) for seed in range(6)]  # buckets are formed anew after the first step
    sent = [averaged(model, gradients) for gradients in given]
    residuals = hook.state_dict(model)["residuals"]
    for place, name in ((0, "first"), (2, "second")):
        owed = sum(gradients[place].double() for gradients in given) - sum(got[place].double() for got in sent)
        assert residuals[name].norm() > 0
        torch.testing.assert_close(residuals[name].double(), owed, rtol=0, atol=6 * 2**-20)
    assert "bias" not in residuals


def test_error_feedback_outlives_what_is_not_finite_and_what_is_zero():
    hook = quantized_hook(brevact.NearestBackward4bit)
    model = parallel(hook, find_unused_parameters=True)
    averaged(model, normal(0))
    before = hook.state_dict(model)["residuals"]
    broken = normal(1)
    broken[0][3, 5], broken[0][7, 7], broken[1][2] = torch.inf, torch.nan, torch.nan
    first, bias, second = averaged(model, [*broken[:2], None])
    assert first.isfinite().logical_not().nonzero().tolist() == [[3, 5], [7, 7]]
    assert bias.isfinite().logical_not().nonzero().tolist() == [[2]]
    assert not second.any()
    after = hook.state_dict(model)["residuals"]
    assert torch.equal(before["first"], after["first"]) and torch.equal(before["second"], after["second"])


@pytest.mark.parametrize("source", [brevact.NearestBackward2bit, brevact.StochBackward2bit4bitMix])
def test_hooks_go_on_from_a_checkpoint(source, tmp_path):
    given = [normal(seed) for seed in range(4)]
    model = parallel(whole := quantized_hook(source))
    expected = [averaged(model, gradients) for gradients in given]
    model = parallel(hook := quantized_hook(source))
    for gradients in given[:2]:
        averaged(model, gradients)
    torch.save(hook.state_dict(model.module), tmp_path / "rank0.pt")
    model = parallel(resumed := quantized_hook(source))
    resumed.load_state_dict(torch.load(tmp_path / "rank0.pt", weights_only=True), model)
    for gradients, reference in zip(given[2:], expected[2:], strict=True):
        assert all(map(torch.equal, averaged(model, gradients), reference))
    assert resumed.step == whole.step == 4


def test_one_hook_of_two_models_goes_on_from_checkpoints():
    models = [parallel(hook := quantized_hook(brevact.NearestBackward2bit)), parallel(hook)]
    for number, model in enumerate(models):
        averaged(model, normal(number))
    states = [hook.state_dict(model) for model in models]
    for model, state in zip(models, states, strict=True):
        hook.load_state_dict(state, model)
    numbers = [number for model in models for number in hook.state_dict(model)["numbers"].values()]
    assert sorted(numbers) == list(range(6))
    for model, state in zip(models, states, strict=True):
        assert torch.equal(hook.state_dict(model)["residuals"]["first"], state["residuals"]["first"])


def test_load_state_dict_refuses_another_model():
    model = parallel(hook := quantized_hook(brevact.NearestBackward2bit))
    averaged(model, normal(0))
    state = hook.state_dict(model)
    with pytest.raises(ValueError, match="has parameter 'first', which the model lacks"):
        hook.load_state_dict(state, nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"'first' has shape \(3,\) there and \(96, 64\) in the model"):
        hook.load_state_dict({**state, "residuals": {"first": torch.zeros(3)}}, model)
    with pytest.raises(ValueError, match=r"lacks .'numbers', 'residuals', 'seed'"):
        hook.load_state_dict({"step": 1}, model)
    with pytest.raises(TypeError, match="model: got 3"):
        hook.state_dict(3)
    with pytest.raises(ValueError, match=r"model: got .* which has none of the parameters"):
        hook.state_dict(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "change, message",
    [
        (None, "state: got None"),
        ({"step": "3"}, "'step'.*got '3' of type str; accepted is an int"),
        ({"seed": 2**64}, r"seed'\]: got 18446744073709551616"),
        ({"numbers": [3]}, r"'numbers' is \[3\]"),
        ({"numbers": {}}, "'first' has a residual and no number"),
        ({"residuals": {"first": [3]}}, "'residuals' is .*values of type Tensor"),
    ],
)
def test_load_state_dict_refuses_what_is_no_state(change, message):
    model = parallel(hook := quantized_hook(brevact.NearestBackward2bit))
    averaged(model, normal(0))
    before = hook.state_dict(model)
    with pytest.raises((TypeError, ValueError), match=message):
        hook.load_state_dict(None if change is None else {**before, **change}, model)
    after = hook.state_dict(model)
    assert hook.step == 1 and after["numbers"] == before["numbers"]
    assert all(torch.equal(after["residuals"][name], x) for name, x in before["residuals"].items())


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"error_feedback": 1}, TypeError, "error_feedback: got 1; accepted are True, False and None"),
        ({"min_numel": -1}, ValueError, "min_numel: got -1"),
        ({"min_numel": 2.5}, TypeError, "min_numel: got 2.5"),
        ({"seed": True}, TypeError, "seed: got True"),
        ({"seed": 2**63}, ValueError, "seed: got 9223372036854775808"),
        ({"bukket_size": 3}, TypeError, "bukket_size"),
        ({"error_feedback": True, "bit_width": 1}, ValueError, "error_feedback: got True with .* would grow"),
    ],
)
def test_quantized_hook_refuses(settings, error, message):
    with pytest.raises(error, match=message):
        quantized_hook(brevact.StochBackward2bit, **settings)


def test_error_feedback_needs_errors_below_the_gradients():
    with pytest.raises(ValueError, match=r"error_feedback: got True with SignMagnitude.* would grow"):
        quantized_hook(brevact.SignMagnitudeL2Backward, error_feedback=True)
    assert not quantized_hook(brevact.SignMagnitudeL2Backward).error_feedback


def test_injectors_are_no_quantizers():
    with pytest.raises(TypeError, match=r"quantizer: got .*; accepted is an activation quantizer, such as"):
        QuantizedHook(brevact.StochBackward4bit)


def test_a_packed_reduce_scatter_is_no_longer_there():
    with pytest.raises(AttributeError, match="FSDP2 exchanges gradients unpacked"):
        brevact.distributed.quantized_reduce_scatter  # noqa: B018


def test_quantized_hook_refuses_what_is_no_group():
    model = parallel(None)
    model.register_comm_hook("gloo", quantized_hook(brevact.StochBackward2bit))
    with pytest.raises(TypeError, match="process group: got 'gloo'; accepted is a ProcessGroup"):
        averaged(model, normal(0))


def test_quantized_hook_refuses_what_is_no_bucket():
    hook = quantized_hook(brevact.StochBackward2bit)
    assert isinstance(hook, QuantizedHook) and repr(hook).startswith("quantized_hook(UniformQuantizer(")
    with pytest.raises(TypeError, match="bucket: got a tensor"):
        hook(None, torch.zeros(3))


@pytest.mark.exhaustive
def test_a_process_that_ends_lets_what_follows_a_collective_end():
    """A thread that came back to an interpreter which has ended would abort the process."""
    code = """
import time, torch
from torch import distributed
from brevact.distributed.packing import after
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
work = distributed.all_reduce(torch.ones(2), async_op=True)
future = after(work, lambda: time.sleep(0.3) or torch.ones(1), is_cpu=True)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")
