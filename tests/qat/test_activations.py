import itertools
import math

import brevitas.nn as qnn
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import brevact
from brevact import LosslessBackward, StochBackward2bit
from tests.crosses import some_of
from tests.qat.cases import CHANNELS, COLLECTED, MINIFLOATS, OTHERS, SIGNS, activation, activation_layer, gradients

ALL = [*COLLECTED, *OTHERS]
#: Whose ops are Brevitas' own, and save their tensors unpacked.
UNFUSED = ("floor", "ceil", "round_to_zero", "dpu", "stochastic_round", "groups", *SIGNS)
FUSED = [name for name in ALL if name not in UNFUSED]
LEARNED = [name for name in FUSED if name not in ("straight_through_clamp", "constant", "statistics")]


def reader(seed=0):
    torch.manual_seed(seed)
    return qnn.QuantConv2d(CHANNELS, 4, 3, weight_quant=None)


def net(name, **options):
    return nn.Sequential(activation_layer(name, **options), reader()).train()


def equal(a, b):
    """Equal values, and NaN where there is NaN; Brevitas' own scale has NaN gradients while it collects."""
    return (a is None and b is None) or torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7))


@pytest.mark.parametrize("name", [*ALL, *MINIFLOATS])
def test_lossless_gradients_are_those_of_brevitas(name):
    x = activation(9)
    for case in itertools.product([False, True], repeat=2):
        plain, packed = (net(name, **dict(zip(("relu", "collected"), case, strict=True))) for _ in range(2))
        brevact.quantize_backward(packed, LosslessBackward, min_numel=0)
        out, grad, grads = gradients(plain, x)
        packed_out, packed_grad, packed_grads = gradients(packed, x)
        assert torch.equal(packed_out, out), case
        assert torch.equal(packed_grad, grad), case
        assert all(equal(packed_grads[key], grads[key]) for key in grads), case


@pytest.mark.parametrize("name", FUSED)
def test_gradient_of_the_reader_is_exact_with_a_lossy_quantizer(name):
    plain, packed = (net(name) for _ in range(2))
    brevact.quantize_backward(packed, StochBackward2bit, min_numel=0)
    x = activation(9)
    out, grad, grads = gradients(plain, x)
    packed_out, packed_grad, packed_grads = gradients(packed, x)
    assert torch.equal(packed_out, out)
    assert torch.equal(packed_grads["1.weight"], grads["1.weight"])
    if name != "statistics":  # whose scale passes the noise of its gradient on
        assert torch.equal(packed_grad, grad)


@pytest.mark.parametrize("name", MINIFLOATS)
def test_minifloats_have_exact_gradients_with_a_lossy_quantizer(name):
    plain, packed = net(name), brevact.quantize_backward(net(name), StochBackward2bit, min_numel=0)
    x = activation(9)
    out, grad, grads = gradients(plain, x)
    packed_out, packed_grad, packed_grads = gradients(packed, x)
    assert torch.equal(packed_out, out)
    assert torch.equal(packed_grad, grad)
    assert all(torch.equal(packed_grads[key], grads[key]) for key in grads if key != "1.weight")


@pytest.mark.parametrize("name", some_of(LEARNED, quick=2))
def test_scale_gradient_is_unbiased(name):
    model = net(name)
    x = activation(9)
    scale = next(key for key, _ in model.named_parameters() if "scaling" in key)
    expected = gradients(model, x)[2][scale]
    brevact.quantize_backward(model, StochBackward2bit, min_numel=0)
    draws = torch.stack([gradients(model, x, seed)[2][scale] for seed in range(64)])
    error = draws.std(0) / math.sqrt(len(draws))
    assert (error > 0).all()
    assert ((draws.mean(0) - expected).abs() <= 5 * error).all()


@pytest.mark.parametrize("width", [2, 3, 4, 8])
def test_residual_bit_width_shrinks_the_noise_of_the_scale_gradient(width):
    model = net("uint4")
    x = activation(9)
    scale = next(key for key, _ in model.named_parameters() if "scaling" in key)
    expected = gradients(model, x)[2][scale]
    brevact.quantize_backward(model, LosslessBackward, min_numel=0, residual_bit_width=width)
    draws = torch.stack([gradients(model, x, seed)[2][scale] for seed in range(20)])
    bound = (gradients(model[0], x)[1].numel() ** 0.5) / (2**width - 2)  # of a sum of steps, with gradients of size 1
    assert ((draws - expected).abs() < 5 * bound).all()


@pytest.mark.parametrize("width", [1, 0, 9, 33, True, 2.0, None])
def test_residual_bit_width_is_checked(width):
    with pytest.raises((TypeError, ValueError), match="residual_bit_width: got"):
        brevact.quantizer(StochBackward2bit, residual_bit_width=width)


BITS = {"uint4": 4 + 2, "int8": 8 + 2, "int2": 2 + 2, "per_channel": 4 + 2, "power_of_two": 4 + 2}
BITS |= {"constant": 4, "straight_through_clamp": 32 + 4}


@pytest.mark.parametrize("name", BITS)
def test_stored_bits_an_element(name):
    """Codes; where the scale learns, also the mask and rounding residuals; the reader saves nothing of its own."""
    model = brevact.quantize_backward(net(name), StochBackward2bit, min_numel=2048)
    x = activation(9)
    report = brevact.memory_report(model, x)
    elements = 8 * report.saved_bytes / x.numel()
    assert BITS[name] <= elements < BITS[name] + 0.5
    assert report.plain_bytes >= x.nbytes


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name", ["int8", "uint4", "narrow", "shifted", "per_channel", "parameter", "binary", "ternary"]
)
def test_broken_elements_reach_the_gradients_as_they_do_in_brevitas(name, value):
    plain, packed = (net(name) for _ in range(2))
    brevact.quantize_backward(packed, LosslessBackward, min_numel=0)
    x = activation(9)
    x[0, 0, 0, 0] = value
    out, grad, grads = gradients(plain, x)
    packed_out, packed_grad, packed_grads = gradients(packed, x)
    assert equal(packed_out, out)
    assert equal(packed_grad, grad)
    for key in grads:
        assert equal(packed_grads[key], grads[key])


def test_integers_beside_nan_are_kept_bit_for_bit():
    """A code for NaN costs nothing; views and pools find it."""
    name = "narrow"
    plain, packed = (activation_layer(name).train() for _ in range(2))
    brevact.quantize_backward(packed, LosslessBackward, min_numel=0)
    saved = []
    for broken in (False, True):
        x = activation(9)
        if broken:
            x[0, 0, 0, 0] = x[1, 2, 3, 4] = math.nan
        grads = []
        for model in (plain, packed):
            y = x.clone().requires_grad_()
            out = F.max_pool2d(model(y), 2).flatten(1)
            (out * out).nansum().backward()
            grads.append(y.grad)
        assert equal(*grads)
        model = brevact.quantize_backward(net(name), LosslessBackward, min_numel=0)  # with a reader of the integers
        saved.append(brevact.memory_report(model, x).saved_bytes)
    assert saved[1] == saved[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_broken_elements_and_a_learned_scale_with_lossy_quantizers(value):
    packed, plain = brevact.quantize_backward(net("int8"), StochBackward2bit, min_numel=0), net("int8")
    x = activation(9)
    x[0, 0, 0, 0] = value
    for one, other in zip(gradients(packed, x)[:2], gradients(plain, x)[:2], strict=True):
        assert equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types(dtype):
    plain, packed = (net("uint4").to(dtype) for _ in range(2))
    brevact.quantize_backward(packed, LosslessBackward, min_numel=0)
    x = activation(9).to(dtype)
    for a, b in zip(gradients(plain, x)[:2], gradients(packed, x)[:2], strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    expected, found = gradients(plain, x)[2], gradients(packed, x)[2]
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_channels_last_and_gaps():
    for x in (activation(9).to(memory_format=torch.channels_last), activation(9)[:, :, ::2, 1:]):
        plain, packed = (net("uint4", relu=True) for _ in range(2))
        brevact.quantize_backward(packed, LosslessBackward, min_numel=0)
        for a, b in zip(gradients(plain, x)[:2], gradients(packed, x)[:2], strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()


def test_straight_through_clamp_sums_the_scale_gradient_as_torch_does():
    """In the order in which the output gradient lies in memory, which is not that of the input."""
    plain, packed = (activation_layer("straight_through_clamp", relu=True).train() for _ in range(2))
    brevact.quantize_backward(packed, LosslessBackward, min_numel=0)
    for seed in range(4):
        x = activation(seed).transpose(2, 3)
        expected, found = gradients(plain, x)[2], gradients(packed, x)[2]
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_autocast():
    plain, packed = (net("uint4") for _ in range(2))
    brevact.quantize_backward(packed, LosslessBackward, min_numel=0)
    x = activation(9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = gradients(plain, x), gradients(packed, x)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def test_graph_is_used_twice_with_retain_graph_and_refuses_second_derivatives():
    model = brevact.quantize_backward(net("uint4"), StochBackward2bit, min_numel=0)
    x = activation(9).requires_grad_()
    loss = model(x).sum()
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(loss, x, create_graph=True)
