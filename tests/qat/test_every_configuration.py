"""Every integer quantizer of Brevitas that runs in one pass: stock's bits, and the kernels that gave them.

Cases in which each two settings meet run always, those in which each three meet are exhaustive.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import brevitas.nn as qnn
import pytest
import torch
from brevitas import quant
from brevitas.core.stats import NegativeMinOrZero
from brevitas.core.zero_point import ParameterZeroPoint, RuntimeDynamicGroupZeroPoint
from brevitas.inject.enum import RestrictValueType, ScalingImplType
from brevitas.quant.mx_quant_ocp import MXInt8Act, MXInt8Weight, ShiftedMXUInt8Weight, ShiftedMXUInt8WeightMSE
from brevitas.quant_tensor import QuantTensor
from torch import Tensor, nn

import brevact
from brevact import LosslessBackward
from brevact.cpu_kernels import launch
from tests.crosses import meeting

CHANNELS, GROUP = 16, 4
SIGNS: dict[str, dict[str, Any]] = {
    "signed": {"signed": True},
    "unsigned": {"signed": False},
    "narrow": {"signed": True, "narrow_range": True},
}
#: A collected scale, or zero point, is one of statistics of each activation, which later starts a learned one.
SCALES: dict[str, dict[str, Any]] = {
    "learned": {"scaling_impl_type": ScalingImplType.PARAMETER_FROM_STATS},
    "collected": {"scaling_impl_type": ScalingImplType.PARAMETER_FROM_STATS},
    "statistical": {"scaling_impl_type": ScalingImplType.STATS},
    "constant": {"scaling_impl_type": ScalingImplType.CONST, "scaling_init": 0.4},
    "power of two": {"restrict_scaling_type": RestrictValueType.POWER_OF_TWO},
}
ZEROS = ("none", "learned", "collected", "parameter")
PLACES = ("tensor", "channel", "group")
TYPES = ("float32", "bfloat16", "float16", "autocast")
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
_PER_CHANNEL = {
    "scaling_per_output_channel": True,
    "per_channel_broadcastable_shape": (1, CHANNELS, 1, 1),
    "scaling_stats_permute_dims": (1, 0, 2, 3),
}
_OF_GROUPS = {"statistical": RestrictValueType.FP, "power of two": RestrictValueType.POWER_OF_TWO}
_WEIGHTS: dict[tuple[str, str], Any] = {
    ("tensor", "none"): quant.Int8WeightPerTensorFloat,
    ("tensor", "collected"): quant.ShiftedUint8WeightPerTensorFloat,
    ("tensor", "learned"): quant.ShiftedUint8WeightPerTensorFloatMSE,
    ("channel", "none"): quant.Int8WeightPerChannelFloat,
    ("channel", "collected"): quant.ShiftedUint8WeightPerChannelFloat,
    ("channel", "learned"): quant.ShiftedUint8WeightPerChannelFloatMSE,
    ("group", "none"): MXInt8Weight,
    ("group", "collected"): ShiftedMXUInt8Weight,
    ("group", "learned"): ShiftedMXUInt8WeightMSE,
}


class ShiftedGroups(MXInt8Act):
    """Groups whose zero points are statistics of the activation."""

    zero_point_impl = RuntimeDynamicGroupZeroPoint
    zero_point_stats_impl = NegativeMinOrZero
    quantize_zero_point = False


def _of_activations(relu: bool, sign: str, place: str, zero: str, scale: str) -> bool:
    """Whether Brevitas has such a quantizer."""
    if place == "group":
        return scale in _OF_GROUPS and zero in ("none", "collected")
    return (scale, zero) not in (("learned", "collected"), ("collected", "learned"))  # both count the same steps


def activation_layer(relu: bool, sign: str, place: str, zero: str, scale: str) -> nn.Module:
    options = SIGNS[sign] | {"bit_width": 4}
    if place == "group":
        made = MXInt8Act if zero == "none" else ShiftedGroups
        options |= {"group_size": GROUP, "group_dim": 1, "restrict_scaling_type": _OF_GROUPS[scale]}
    else:
        made = quant.Int8ActPerTensorFloat if zero == "none" else quant.ShiftedUint8ActPerTensorFloat
        if zero == "parameter":
            made = made.let(zero_point_impl=ParameterZeroPoint, zero_point_init=0.7)
        steps = 100 if "collected" in (scale, zero) else 2
        options |= SCALES[scale] | {"collect_stats_steps": steps} | (_PER_CHANNEL if place == "channel" else {})
    layer = (qnn.QuantReLU if relu else qnn.QuantIdentity)(act_quant=made, **options).train()
    with torch.no_grad():
        for seed in range(4):
            layer(tensor((2, CHANNELS, 4, 4), seed))
    return layer


def _of_weights(sign: str, place: str, zero: str, scale: str) -> bool:
    """Whether Brevitas has such a quantizer."""
    if zero == "learned":
        return scale == "learned"
    return zero in ("none", "collected") and scale != "collected"


def weight_layer(sign: str, place: str, zero: str, scale: str) -> nn.Module:
    options = SIGNS[sign] | {"bit_width": 4}
    options |= SCALES[scale] if zero != "learned" else {}
    if place == "group":
        options |= {"group_size": GROUP, "restrict_scaling_type": _OF_GROUPS.get(scale, RestrictValueType.FP)}
    options = {f"weight_{name}": value for name, value in options.items()}
    layer = qnn.QuantConv2d(CHANNELS, 8, 3, bias=False, weight_quant=_WEIGHTS[place, zero], **options)
    with torch.no_grad():
        layer.weight.copy_(tensor(layer.weight.shape))
        layer(tensor((2, CHANNELS, 4, 4)))
    return layer


def tensor(shape: tuple[int, ...], seed: int = 9) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1.5


def gradients(model: nn.Module, x: Tensor, autocast: bool) -> list[Tensor]:
    torch.manual_seed(0)
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(x)
    out = out.value if isinstance(out, QuantTensor) else out
    grad = torch.empty_like(out).copy_(tensor(out.shape, 5))
    found = torch.autograd.grad(out, (x, *model.parameters()), grad, allow_unused=True)
    return [out.detach(), *(each for each in found if each is not None)]


@pytest.fixture
def ran(monkeypatch):
    names: list[str] = []

    def recorded(name):
        run = getattr(launch, name)

        def record(*args):
            found = run(*args)
            names.append(f"{name} by torch" if found is NotImplemented else name)
            return found

        return record

    for name in ("fake_quantize", "fake_quantize_backward"):
        monkeypatch.setattr(launch, name, recorded(name))
    return names


def compare(
    make: Callable[[], nn.Module], dtype: str, memory_format: str, ran: list[str], *, runs_kernels: bool
) -> None:
    kind = torch.float32 if dtype == "autocast" else getattr(torch, dtype)
    x = tensor((2, CHANNELS, 7, 9)).to(torch.bfloat16 if dtype == "autocast" else kind)
    x = x.to(memory_format=FORMATS[memory_format])
    stock, packed = (make().to(kind) for _ in range(2))
    for weight in (each.weight for each in (stock, packed) if isinstance(each, qnn.QuantConv2d)):
        weight.data = weight.data.to(memory_format=FORMATS[memory_format])
    brevact.quantize_backward(packed, LosslessBackward, min_numel=0)
    expected = gradients(stock, x, dtype == "autocast")
    assert not ran
    found = gradients(packed, x, dtype == "autocast")
    if runs_kernels and dtype == "float32" and not expected[0].isnan().any():  # which no code stands for
        assert set(ran) == {"fake_quantize", "fake_quantize_backward"}, ran
    for one, other in zip(expected, found, strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
    for name, value in stock.state_dict().items():
        torch.testing.assert_close(packed.state_dict()[name], value, rtol=0, atol=0, equal_nan=True)


def compare_activation(case: tuple[Any, ...], ran: list[str]) -> None:
    compare(lambda: activation_layer(*case[:-2]), *case[-2:], ran, runs_kernels=case[2] != "group")


_SETTINGS = SIGNS, PLACES, ZEROS, SCALES
_ACTIVATIONS = [
    case for case in itertools.product((False, True), *_SETTINGS, TYPES, FORMATS) if _of_activations(*case[:-2])
]
_CONVOLUTIONS = [case for case in itertools.product(*_SETTINGS, TYPES, FORMATS) if _of_weights(*case[:-2])]


@pytest.mark.parametrize("case", meeting(_ACTIVATIONS, 2), ids=str)
def test_activations_in_one_pass_have_the_bits_of_brevitas(case, ran):
    compare_activation(case, ran)


@pytest.mark.parametrize("case", meeting(_CONVOLUTIONS, 2), ids=str)
def test_weights_in_one_pass_have_the_bits_of_brevitas(case, ran):
    compare(lambda: weight_layer(*case[:-2]), *case[-2:], ran, runs_kernels=case[1] != "group")


@functools.cache
def _of_three() -> list[list[tuple[Any, ...]]]:
    return [meeting(cross, 3) for cross in (_ACTIVATIONS, _CONVOLUTIONS)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", itertools.product(SIGNS, PLACES, TYPES), ids=str)
def test_any_three_settings_together_have_the_bits_of_brevitas(settings, ran):
    activations, convolutions = _of_three()
    for case in activations:
        if (case[1], case[2], case[-2]) == settings:
            compare_activation(case, ran)
            ran.clear()
    for case in convolutions:
        if (case[0], case[1], case[-2]) == settings:
            compare(lambda case=case: weight_layer(*case[:-2]), *case[-2:], ran, runs_kernels=case[1] != "group")
            ran.clear()
