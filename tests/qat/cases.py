"""Forward quantizers of every kind, as Brevitas layers that quantize an (N, 8, H, W) activation or a weight."""

from __future__ import annotations

import functools
from typing import Any

import brevitas.nn as qnn
import torch
from brevitas import quant
from brevitas.core.function_wrapper import TensorClampSte
from brevitas.inject.enum import FloatToIntImplType, ScalingImplType, StatsOp
from brevitas.quant.mx_quant_ocp import MXInt8Act
from torch import Tensor, nn

CHANNELS = 8
_PER_CHANNEL = {
    "scaling_per_output_channel": True,
    "per_channel_broadcastable_shape": (1, CHANNELS, 1, 1),
    "scaling_stats_permute_dims": (1, 0, 2, 3),
}
_INT = functools.partial(dict, act_quant=quant.Int8ActPerTensorFloat, bit_width=4)


def _rounding(kind: FloatToIntImplType) -> dict[str, Any]:
    return _INT(float_to_int_impl_type=kind)


#: Keywords of an activation layer; those of the first table have a scale that is collected from statistics first.
COLLECTED: dict[str, dict[str, Any]] = {
    "uint4": {"act_quant": quant.Uint8ActPerTensorFloat, "bit_width": 4},
    "int8": {"act_quant": quant.Int8ActPerTensorFloat},
    "int2": _INT(bit_width=2),
    "narrow": _INT(narrow_range=True),
    "power_of_two": {"act_quant": quant.Int8ActPerTensorFixedPoint, "bit_width": 4},
    "maximum": _INT(scaling_stats_op=StatsOp.MAX),
    "per_channel": _INT(**_PER_CHANNEL),
    "shifted": {"act_quant": quant.ShiftedUint8ActPerTensorFloat, "bit_width": 4},
    "floor": _rounding(FloatToIntImplType.FLOOR),
    "ceil": _rounding(FloatToIntImplType.CEIL),
    "round_to_zero": _rounding(FloatToIntImplType.ROUND_TO_ZERO),
    "dpu": _rounding(FloatToIntImplType.DPU),
    "stochastic_round": _INT(float_to_int_impl_type=FloatToIntImplType.STOCHASTIC_ROUND, stochastic_round_seed=3),
    "straight_through_clamp": _INT(tensor_clamp_impl=TensorClampSte),
}
OTHERS: dict[str, dict[str, Any]] = {
    "constant": _INT(scaling_impl_type=ScalingImplType.CONST, scaling_init=1.0),
    "parameter": _INT(scaling_impl_type=ScalingImplType.PARAMETER, scaling_init=1.0),
    "parameter_per_channel": _INT(scaling_impl_type=ScalingImplType.PARAMETER, scaling_init=1.0, **_PER_CHANNEL),
    "statistics": _INT(scaling_impl_type=ScalingImplType.STATS),
    "groups": {"act_quant": MXInt8Act, "group_size": 4, "group_dim": 1},
    "binary": {"act_quant": quant.SignedBinaryActPerTensorConst, "scaling_init": 1.0},
    "binary_learned": {
        "act_quant": quant.SignedBinaryActPerTensorConst,
        "scaling_impl_type": ScalingImplType.PARAMETER,
        "scaling_init": 1.0,
    },
    "ternary": {"act_quant": quant.SignedTernaryActPerTensorConst, "scaling_init": 1.0},
    "ternary_learned": {
        "act_quant": quant.SignedTernaryActPerTensorConst,
        "scaling_impl_type": ScalingImplType.PARAMETER,
        "scaling_init": 1.0,
    },
}
#: Of floating-point numbers of 8 bits: kept at full precision, once.
MINIFLOATS: dict[str, dict[str, Any]] = {
    "e4m3": {"act_quant": quant.Fp8e4m3ActPerTensorFloat},
    "e5m2_per_channel": {"act_quant": quant.Fp8e5m2ActPerChannelFloat2d, **_PER_CHANNEL},
    "e4m3_fnuz": {"act_quant": quant.Fp8e4m3FNUZActPerTensorFloat},
    "e4m3_no_scale": {"act_quant": quant.Fp8e4m3OCPAct},
}
SIGNS = ("binary", "binary_learned", "ternary", "ternary_learned")
WEIGHTS: dict[str, Any] = {
    name: getattr(quant, name)
    for name in (
        *("Int8WeightPerTensorFloat", "Int8WeightPerChannelFloat", "Int4WeightPerTensorFloatDecoupled"),
        *("Int8WeightPerTensorFixedPoint", "ShiftedUint8WeightPerTensorFloat", "SignedBinaryWeightPerTensorConst"),
        *("SignedTernaryWeightPerTensorConst", "Int8WeightNormL2PerChannelFixedPoint"),
        *("Fp8e4m3WeightPerTensorFloat", "Fp8e5m2OCPWeightPerChannelFloat"),
    )
} | {
    "signed_maximum": quant.Int8WeightPerTensorFloat.let(scaling_stats_op=StatsOp.SIGNED_MAX),
    "min_max": quant.Int8WeightPerTensorFloat.let(scaling_stats_op=StatsOp.MIN_MAX),
    "mean_sigma": quant.Int8WeightPerTensorFloat.let(scaling_stats_op=StatsOp.MEAN_SIGMA_STD, sigma=3.0),
    "learned": quant.Int8WeightPerTensorFloat.let(scaling_impl_type=ScalingImplType.PARAMETER_FROM_STATS),
    "stochastic": quant.Int8WeightPerTensorFloat.let(
        float_to_int_impl_type=FloatToIntImplType.STOCHASTIC_ROUND, stochastic_round_seed=3
    ),
}


def activation_layer(name: str, *, relu: bool = False, collected: bool = True) -> nn.Module:
    """Return a quantized ReLU or identity, whose statistics, if it takes any, are those of two batches, or open."""
    options = COLLECTED.get(name) or OTHERS.get(name) or MINIFLOATS[name]
    if (name in COLLECTED or name in MINIFLOATS) and collected:
        options = options | {"collect_stats_steps": 2}
    layer = (qnn.QuantReLU if relu else qnn.QuantIdentity)(**options)
    if collected:
        with torch.no_grad():
            for seed in range(4):
                layer(activation(seed))
    return layer


def activation(seed: int = 0) -> Tensor:
    """Return an activation with elements that every quantizer clips."""
    return torch.randn(4, CHANNELS, 8, 8, generator=torch.Generator().manual_seed(seed)) * 1.5


def gradients(model: nn.Module, x: Tensor, seed: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
    """Run a model forward and backward: its output, and the gradients of its input and parameters."""
    torch.manual_seed(seed)
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = model(x)
    out = out if isinstance(out, Tensor) else out.value
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(7)))
    assert x.grad is not None
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return out.detach(), x.grad, found
