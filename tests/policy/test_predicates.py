"""Rules go by the torch functions that a module's code calls: by no class's name and by no parameter's value."""

from __future__ import annotations

import copy
import functools

import brevitas.nn as qnn
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import relu as rectify

import brevact
from benchmarks.large_models import UNet3D
from brevact import StochBackward2bit
from brevact.policy.predicates import is_norm, is_rectified, is_rectified_and_costly, is_separable


class LlamaRMSNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sigmoid()


class WithAttribute(nn.Module):
    def __init__(self, act) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class Weighted(nn.Module):
    """Convolution with standardized weights: it calls a norm, and is none."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, F.batch_norm(x, None, None, training=True))


class Attention(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return (q @ q.transpose(-2, -1)).softmax(-1) @ q


class NormAndReLU(nn.BatchNorm2d):
    def __init__(self) -> None:
        super().__init__(3)
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


NORMS = (
    *(nn.BatchNorm2d(3), nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.InstanceNorm1d(3), nn.RMSNorm(3)),
    *(nn.LocalResponseNorm(2), LlamaRMSNorm(), NormAndReLU()),
)
OTHERS = (
    *(nn.Linear(3, 3), nn.Conv2d(3, 3, 3), nn.PReLU(), nn.Sequential(nn.LayerNorm(3)), nn.CrossEntropyLoss()),
    *(
        nn.Softmax(-1),
        nn.GLU(),
        Swish(),
        WithAttribute(F.gelu),
        qnn.QuantReLU(),
        nn.MultiheadAttention(4, 2),
        Attention(),
    ),
    *(Weighted(), nn.Dropout(), nn.Sequential(nn.ReLU()), nn.LSTM(3, 3), nn.TransformerEncoderLayer(4, 2)),
)


def test_rules_know_modules_by_the_functions_that_they_call():
    for module in (*NORMS, *OTHERS):
        assert is_norm("", module) == (module in NORMS), module


@pytest.mark.parametrize("value", [0.0, 1.0])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_no_rule_reads_values_of_parameters(value, device, shape):
    swish = Swish().to(device)
    swish.beta = nn.Parameter(torch.full(shape, value, device=device))
    assert not is_rectified("", nn.Sequential(nn.ReLU(), swish))


def decorated(function):
    def call(*args):
        return function(*args)

    return call


def pointwise(x: Tensor) -> Tensor:
    return F.gelu(x)


class SwishFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class GELUActivation(nn.Module):
    """A name that says something else than the code, which rectifies by a method."""

    def forward(self, x: Tensor) -> Tensor:
        return self.helper(x)

    def helper(self, x: Tensor) -> Tensor:
        return x.relu_()


class ByOtherName(nn.Module):
    @decorated
    def forward(self, x: Tensor) -> Tensor:
        return rectify(x)


class Inherited(GELUActivation):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class ReLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(pointwise(x))


class ByFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(SwishFunction.apply(x))


RECTIFIED = {
    "modules": lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.LeakyReLU()),
    "method": GELUActivation,
    "name": ByOtherName,
    "super": Inherited,
    "PReLU": nn.PReLU,
    "attribute": lambda: nn.Sequential(WithAttribute(functools.partial(F.leaky_relu, negative_slope=0.1))),
    "QuantReLU": lambda: nn.Sequential(qnn.QuantConv2d(3, 3, 1, weight_bit_width=4), qnn.QuantReLU()),
    "backward QuantReLU": lambda: nn.Sequential(qnn.QuantReLU(act_quant=StochBackward2bit)),
    "meta": lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU()).to("meta"),
}
SMOOTH = {
    "none": lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)),
    "class that is named ReLU": ReLU,
    "function": ByFunction,
    "modules": lambda: nn.Sequential(nn.ReLU(), nn.GELU()),
    "attribute": lambda: nn.Sequential(nn.ReLU(), WithAttribute(F.silu)),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2),  # with F.relu
    "LSTM": lambda: nn.Sequential(nn.ReLU(), nn.LSTM(3, 3)),
    "QuantSigmoid": lambda: nn.Sequential(qnn.QuantReLU(), qnn.QuantSigmoid()),
}


@pytest.mark.parametrize("name", RECTIFIED)
def test_is_rectified_holds_where_all_that_the_code_calls_is_piecewise_linear(name):
    assert is_rectified("", RECTIFIED[name]())


@pytest.mark.parametrize("name", SMOOTH)
def test_is_rectified_fails_where_the_code_calls_a_smooth_function_or_none(name):
    assert not is_rectified("", SMOOTH[name]())


class Conv2dReLU(nn.Sequential):
    """As segmentation-models-pytorch's."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__(nn.Conv2d(channels, width, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True))


class GELU(nn.Module):
    """As diffusers' GELU, which has a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 16)

    def gelu(self, gate: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.gelu(self.proj(x))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x), inplace=True)


def channelwise_relu() -> nn.Module:
    shape = {"per_channel_broadcastable_shape": (1, 3, 1, 1), "scaling_stats_permute_dims": (1, 0, 2, 3)}
    return qnn.QuantReLU(scaling_per_output_channel=True, **shape)


@pytest.mark.parametrize(
    "make, shape, bits",
    [
        (lambda: Conv2dReLU(3, 16), (4, 3, 32, 32), 3),
        (lambda: nn.Sequential(Conv2dReLU(3, 16), Conv2dReLU(16, 16)), (4, 3, 32, 32), 3),
        (lambda: nn.Sequential(nn.Conv2d(3, 3, 3), channelwise_relu()), (4, 3, 64, 64), 3),
        (lambda: nn.Sequential(nn.LayerNorm(16), GELU(), nn.Linear(16, 16)), (64, 8, 16), 4),
        (Plain, (4, 3, 32, 32), 3),
    ],
)
def test_the_default_fits_modules_that_are_named_like_activation_functions(make, shape, bits):
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    brevact.quantize_backward(make().to("meta"))
    expected = model(x)
    brevact.quantize_backward(model)
    assert torch.equal(model(x), expected)
    policy = brevact.backward_policy(model)
    assert policy.rows[0].source == f"DitherBackward{bits}bit"
    report = brevact.memory_report(model, x)
    assert report.saved_bytes < report.plain_bytes


def inverted(channels: int, width: int, act: type[nn.Module] = nn.SiLU, norm: type[nn.Module] = nn.BatchNorm2d):
    return nn.Sequential(
        *(nn.Conv2d(channels, width, 1), norm(width), act()),
        *(nn.Conv2d(width, width, 3, padding=1, groups=width), norm(width), act()),
        *(nn.Conv2d(width, channels, 1), norm(channels)),
    )


def normalized(channels: int) -> nn.Module:
    return nn.GroupNorm(1, channels)


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda: inverted(16, 64), True),
        (lambda: inverted(16, 64, nn.ReLU6), True),
        (lambda: inverted(16, 64, norm=normalized), False),
        (lambda: nn.Sequential(inverted(16, 64), *(nn.Conv2d(64, 64, 3) for _ in range(12))), False),
        (lambda: nn.Sequential(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU()), False),
        (lambda: nn.Sequential(nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1)), False),
        (lambda: nn.Sequential(nn.LazyLinear(16), nn.ReLU()), False),
        (lambda: nn.Sequential(inverted(16, 64), *(nn.LazyConv2d(64, 3) for _ in range(12))), False),
        (nn.ReLU, False),
    ],
)
def test_separable_networks_have_depthwise_convolutions_batch_norms_and_cheap_layers(make, expected):
    with torch.device("meta"):
        assert is_separable("", make()) is expected


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda: Conv2dReLU(64, 16), True),
        (lambda: Conv2dReLU(16, 16), False),  # 144 multiplications an element
        (lambda: nn.Sequential(nn.Conv3d(16, 16, 3), nn.ReLU()), True),
        (lambda: nn.Sequential(nn.ConvTranspose3d(64, 16, 2), nn.Conv3d(64, 16, 3), nn.ReLU()), True),
        (lambda: nn.Sequential(nn.Conv2d(64, 64, 3), nn.Conv2d(64, 256, 1), nn.ReLU()), False),  # of a bottleneck
        (lambda: nn.Sequential(nn.Conv2d(64, 64, 1), *(nn.Conv2d(64, 64, 3) for _ in range(2)), nn.ReLU()), False),
        (lambda: nn.Sequential(nn.Conv2d(64, 64, 1), *(nn.Conv2d(64, 64, 3) for _ in range(3)), nn.ReLU()), True),
        (lambda: nn.Sequential(nn.Linear(257, 16), nn.ReLU()), True),
        (lambda: nn.Sequential(nn.Linear(256, 16), nn.ReLU()), False),
        (lambda: nn.Sequential(nn.Conv3d(16, 16, 3), nn.SiLU()), False),
        (lambda: nn.Sequential(qnn.QuantConv2d(64, 64, 3), qnn.QuantReLU()), True),
        (lambda: inverted(16, 64, nn.ReLU6), False),
        (lambda: nn.Sequential(nn.LazyConv2d(16, 3), nn.ReLU()), True),
        (lambda: nn.Conv3d(16, 16, 3), False),
        (nn.ReLU, True),
    ],
)
def test_costly_models_are_rectified_and_have_few_cheap_layers(make, expected):
    with torch.device("meta"):
        assert is_rectified_and_costly("", make()) is expected


@pytest.mark.parametrize(
    "make, bits", [(lambda: UNet3D(16, 3), 4), (lambda: Conv2dReLU(16, 16), 6), (lambda: inverted(16, 64), 6)]
)
def test_recompute_stores_four_bits_of_rectified_models_with_costly_layers(make, bits):
    policy = brevact.backward_policy(brevact.quantize_backward(make(), brevact.RECOMPUTE))
    assert {row.source for row in policy.rows} == {f"DitherBackward{bits}bit"}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda policy: policy])
@pytest.mark.parametrize("policy", [brevact.DEFAULT, brevact.RECOMPUTE, "RECOMPUTE"])
def test_blocks_of_code_have_the_rule_of_a_preset_that_is_for_any_model(policy, copied):
    x = torch.randn(64, 4096, requires_grad=True)
    with brevact.backward_quant(copied(policy)):
        F.silu(x * 1).sum().backward()
    assert (x.grad - torch.autograd.functional.jvp(F.silu, x.detach(), torch.ones_like(x))[1]).abs().max() < 0.5
    with pytest.raises(TypeError, match="is_rectified_and_costly is for modules"):
        brevact.backward_quant(brevact.Policy({is_rectified_and_costly: StochBackward2bit, "*": None}))


def test_a_rule_for_models_holds_for_all_of_one_where_it_holds():
    model = brevact.quantize_backward(inverted(16, 64, nn.ReLU6))  # whose functions are rectified as well
    rows = brevact.backward_policy(model).rows
    assert {row.source for row in rows} == {"DitherBackward6bit"} and rows[0].rule == "is_separable"


def test_a_rule_for_models_is_not_asked_of_parts():
    model = nn.Sequential(inverted(16, 64, norm=normalized), inverted(16, 64), nn.Sequential(nn.ReLU()))
    model.extend(nn.Conv2d(16, 64, 3) for _ in range(20))
    rows = {row.module: row for row in brevact.backward_policy(brevact.quantize_backward(model)).rows}
    assert rows["1"].source == "DitherBackward4bit" and rows["2"].rule == "is_rectified"


def test_rules_before_one_for_models_go_first():
    rules = {"0": None, is_separable: brevact.DitherBackward6bit, "1": brevact.DitherBackward2bit}
    model = brevact.quantize_backward(inverted(16, 64), brevact.Policy(rules))
    rows = {row.module: row for row in brevact.backward_policy(model).rows}
    assert rows["0"].settings is None and rows["1"].source == "DitherBackward6bit"
