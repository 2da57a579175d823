"""Classes and functions of Brevitas' inner modules, which move between its releases.

Without Brevitas, each is an empty class without instances.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from brevact.private_names.lookup import find

#: Whether Brevitas imports, and the reason that errors give for names that need it.
IS_INSTALLED, MISSING = True, ""
try:
    import_module("brevitas")
except ImportError as error:
    _why = "is not installed" if isinstance(error, ModuleNotFoundError) else f"does not import ({error})"
    IS_INSTALLED, MISSING = False, f"needs Brevitas, which {_why}: pip install 'brevitas>=0.13.4'"
#: Child of a recurrent layer: its cell, with its quantizers' insides, compiled in the first forward.
COMPILED_CELL = "_fast_cell"

_NAMES = {
    "brevitas.nn.mixin.base": "QuantRecurrentLayerMixin",
    "brevitas.proxy.parameter_quant": "BiasQuantProxyFromInjectorBase WeightQuantProxyFromInjectorBase",
    "brevitas.proxy.quant_proxy": "QuantProxyFromInjector",
    "brevitas.proxy.runtime_quant": "ActQuantProxyFromInjectorBase FusedActivationQuantProxy",
    "brevitas.core.bit_width": "BitWidthConst BitWidthStatefulConst",
    "brevitas.core.function_wrapper": (
        "Abs CeilSte DPURoundSte FloorSte Identity InplaceTensorClampSte RoundSte RoundToZeroSte "
        "ScalarSignedClampMinSte TensorClamp TensorClampSte"
    ),
    "brevitas.core.function_wrapper.stochastic_round": "StochasticRoundSte",
    "brevitas.core.quant": "BinaryQuant ClampedBinaryQuant DecoupledIntQuant IntQuant RescalingIntQuant TernaryQuant",
    "brevitas.core.quant.delay": "_NoDelay",
    "brevitas.core.quant.float": "FloatQuant",
    "brevitas.core.restrict_val": "FloatRestrictValue",
    "brevitas.core.scaling": (
        "ConstScaling IntScaling ParameterFromRuntimeStatsScaling ParameterScaling PowerOfTwoIntScaling "
        "StatsFromParameterScaling"
    ),
    "brevitas.core.stats.stats_op": (
        "AbsAve AbsMax AbsMaxAve AbsMaxL2 AbsMinMax AbsPercentile MeanSigmaStd NegativeMinOrZero "
        "NegativePercentileOrZero PercentileInterval SignedAbsMax"
    ),
    "brevitas.core.stats.stats_wrapper": "_Stats",
    "brevitas.core.stats.view_wrapper": "_ViewCatParameterWrapper _ViewParameterWrapper",
    "brevitas.core.zero_point": (
        "ParameterFromRuntimeZeroPoint ParameterFromStatsFromParameterZeroPoint ParameterZeroPoint "
        "StatsFromParameterZeroPoint ZeroZeroPoint"
    ),
}
for _module, _names in _NAMES.items():
    for _name in _names.split():
        globals()[_name] = find(f"{_module}.{_name}") if IS_INSTALLED else type(_name, (), {})

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Declare the names above."""
