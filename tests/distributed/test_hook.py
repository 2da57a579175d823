"""One process: sent bytes, error feedback, checkpoints and errors."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import distributed

import brevact
from brevact.distributed import QuantizedHook, quantized_hook
from brevact.distributed.hook import is_unbiased, pack
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
    hook = quantized_hook(brevact.StochBackward4bit)
    first, bias, second = averaged(parallel(hook, dtype), given)
    assert torch.equal(bias, given[1])
    for number, gradient, x in ((0, first, given[0]), (2, second, given[2])):
        assert torch.equal(gradient, pack(hook.quantizer, x, (0, 0, number), 0).dequantize())
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
    assert all(not torch.equal(a, b) for a, b in pairwise(draws[:5]))
    error = draws.mean(0) - given[2].double()
    # 5000 elements of independent error: five standard errors of the mean error, with random signs
    signs = torch.randint(0, 2, error.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    deviation = (draws.var(0) / len(draws)).sum().sqrt()
    assert (error * signs).sum().abs() <= 5 * deviation


def test_what_is_not_finite_arrives_as_nan():
    model = parallel(quantized_hook(brevact.StochBackward4bit))
    broken = normal(1)
    broken[0][3, 5], broken[0][7, 7], broken[1][2] = torch.inf, torch.nan, torch.nan
    first, bias, second = averaged(model, broken)
    assert first.isfinite().logical_not().nonzero().tolist() == [[3, 5], [7, 7]]
    assert bias.isfinite().logical_not().nonzero().tolist() == [[2]] and second.isfinite().all()


@pytest.mark.parametrize("source", [brevact.StochBackward2bit, brevact.StochBackward2bit4bitMix])
def test_hooks_go_on_from_a_checkpoint(source, tmp_path):
    given = [normal(seed) for seed in range(4)]
    model = parallel(whole := quantized_hook(source))
    expected = [averaged(model, gradients) for gradients in given]
    model = parallel(hook := quantized_hook(source))
    for gradients in given[:2]:
        averaged(model, gradients)
    torch.save(hook.state_dict(), tmp_path / "rank0.pt")
    model = parallel(resumed := quantized_hook(source))
    resumed.load_state_dict(torch.load(tmp_path / "rank0.pt", weights_only=True))
    for gradients, reference in zip(given[2:], expected[2:], strict=True):
        assert all(map(torch.equal, averaged(model, gradients), reference))
    assert resumed.step == whole.step == 4


@pytest.mark.parametrize(
    "state, message",
    [
        (None, "state: got None"),
        ({"step": 1}, "state: got {'step': 1}; accepted is what state_dict"),
        ({"step": "3", "seed": 0}, "'step'.*got '3' of type str; accepted is an int"),
        ({"step": 0, "seed": 2**64}, r"seed'\]: got 18446744073709551616"),
    ],
)
def test_load_state_dict_refuses_what_is_no_state(state, message):
    hook = quantized_hook(brevact.StochBackward2bit)
    with pytest.raises((TypeError, ValueError), match=message):
        hook.load_state_dict(state)
    assert hook.state_dict() == {"step": 0, "seed": 0}


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"min_numel": -1}, ValueError, "min_numel: got -1"),
        ({"min_numel": 2.5}, TypeError, "min_numel: got 2.5"),
        ({"seed": True}, TypeError, "seed: got True"),
        ({"seed": 2**63}, ValueError, "seed: got 9223372036854775808"),
        ({"bukket_size": 3}, TypeError, "bukket_size"),
        ({"rounding": "nearest"}, ValueError, "quantizer: got .*, which is biased: its errors do not average out"),
    ],
)
def test_quantized_hook_refuses(settings, error, message):
    with pytest.raises(error, match=message):
        quantized_hook(brevact.StochBackward2bit, **settings)


def test_injectors_are_no_quantizers():
    with pytest.raises(TypeError, match=r"quantizer: got .*; accepted is an activation quantizer, such as"):
        QuantizedHook(brevact.StochBackward4bit)


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
