"""Classes and functions of Brevitas' inner modules, which move between its releases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brevact.private_names.lookup import find

#: Refused if one of its names is missing.
LAYERS = "a backward quantizer in a Brevitas layer"
#: Refused if one of its names is missing.
BACKWARD = "a quantizer of Brevitas as a backward quantizer"
#: Off if one of its names is missing: regions then save the tensors of Brevitas' own ops.
FORWARD = "storing the integers that Brevitas' forward quantizers compute"

#: Child of a recurrent layer: its cell, with its quantizers' insides, compiled in the first forward.
COMPILED_CELL = "_fast_cell"

_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "brevitas.nn.mixin.base": {LAYERS: ("QuantRecurrentLayerMixin",)},
    "brevitas.proxy.parameter_quant": {
        LAYERS: ("BiasQuantProxyFromInjectorBase", "WeightQuantProxyFromInjectorBase"),
    },
    "brevitas.proxy.quant_proxy": {LAYERS: ("QuantProxyFromInjector",)},
    "brevitas.proxy.runtime_quant": {
        LAYERS: ("ActQuantProxyFromInjector", "ActQuantProxyFromInjectorBase"),
        FORWARD: ("FusedActivationQuantProxy",),
    },
    "brevitas.quant.solver": {LAYERS: ("ActQuantSolver",)},
    "brevitas.quant.solver.act": {BACKWARD: ("SolveActScalingShape",)},
    "brevitas.core.bit_width": {BACKWARD: ("BitWidthConst",), FORWARD: ("BitWidthConst", "BitWidthStatefulConst")},
    "brevitas.core.function_wrapper": {
        FORWARD: (
            *("Abs", "CeilSte", "DPURoundSte", "FloatClamp", "FloorSte", "Identity", "InplaceTensorClampSte"),
            *("RoundSte", "RoundToZeroSte", "ScalarSignedClampMinSte", "TensorClamp", "TensorClampSte"),
        ),
    },
    "brevitas.core.function_wrapper.shape": {
        BACKWARD: ("DynamicOverSubChannelBlockView",),
        FORWARD: ("OverTensorView",),
    },
    "brevitas.core.function_wrapper.stochastic_round": {
        BACKWARD: ("StochasticRoundSte",),
        FORWARD: ("StochasticRoundSte",),
    },
    "brevitas.core.quant": {
        BACKWARD: ("BinaryQuant", "ClampedBinaryQuant", "RescalingIntQuant", "TernaryQuant"),
        FORWARD: (
            *("BinaryQuant", "ClampedBinaryQuant", "DecoupledIntQuant", "IntQuant", "RescalingIntQuant"),
            "TernaryQuant",
        ),
    },
    "brevitas.core.quant.delay": {BACKWARD: ("_NoDelay",), FORWARD: ("_NoDelay",)},
    "brevitas.core.quant.float": {FORWARD: ("FloatQuant", "min_internal_scale")},
    "brevitas.core.restrict_val": {
        FORWARD: ("FloatRestrictValue", "_ClampValue", "_RestrictClampValue", "_RestrictValue"),
    },
    "brevitas.core.scaling": {
        FORWARD: (
            *("ConstScaling", "IntScaling", "ParameterFromRuntimeStatsScaling", "ParameterScaling"),
            *("PowerOfTwoIntScaling", "StatsFromParameterScaling"),
        ),
    },
    "brevitas.core.stats.stats_op": {
        FORWARD: (
            *("AbsAve", "AbsMax", "AbsMaxAve", "AbsMaxL2", "AbsMinMax", "AbsPercentile", "MeanSigmaStd"),
            *("NegativeMinOrZero", "NegativePercentileOrZero", "PercentileInterval", "SignedAbsMax"),
        ),
    },
    "brevitas.core.stats.stats_wrapper": {FORWARD: ("_Stats",)},
    "brevitas.core.stats.view_wrapper": {FORWARD: ("_ViewCatParameterWrapper", "_ViewParameterWrapper")},
    "brevitas.core.zero_point": {
        BACKWARD: ("ZeroZeroPoint",),
        FORWARD: (
            *("ParameterFromRuntimeZeroPoint", "ParameterFromStatsFromParameterZeroPoint", "ParameterZeroPoint"),
            *("StatsFromParameterZeroPoint", "ZeroZeroPoint"),
        ),
    },
    "brevitas.function.ops_ste": {
        FORWARD: ("binary_sign_ste", "ternary_sign_ste"),
    },
    "brevitas.utils.torch_utils": {FORWARD: ("float_internal_scale",)},
}

for _module, _uses in _NAMES.items():
    for _use, _names in _uses.items():
        for _name in _names:
            globals()[_name] = find(f"{_module}.{_name}", _use)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Declare the names above."""
