"""A region's settings from any form of a backward quantizer."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from dependencies.exceptions import DependencyError
from torch import nn

import brevact.private_names.of_brevitas as bv
from brevact.autograd import BackwardSettings
from brevact.injectors.class_protocol import ExtendedInjector, Fragment, InjectorClass, is_injector, written_value
from brevact.injectors.injector_type import FORWARD_PREFIX, BackwardInjectorType, derived, unknown_setting
from brevact.injectors.proxies import settings_of_slot
from brevact.quantizers import ActivationQuantizer
from brevact.quantizers.brief import brief
from brevact.quantizers.traits import is_quantizer


def is_act_quantizer(source: Any) -> bool:
    return _has_proxy(source, bv.ActQuantProxyFromInjectorBase)


def quantizes_parameters(source: Any) -> bool:
    return _has_proxy(source, (bv.WeightQuantProxyFromInjectorBase, bv.BiasQuantProxyFromInjectorBase))


def _has_proxy(source: Any, kinds: type | tuple[type, ...]) -> bool:
    if not is_injector(source) or "proxy_class" not in source:
        return False
    return inspect.isclass(source.proxy_class) and issubclass(source.proxy_class, kinds)


def names_looked_up(injector: InjectorClass) -> frozenset[str]:
    """Return the names that an activation quantizer looks up while its ``tensor_quant`` is built."""
    probe = injector.let(proxy_module=nn.Identity())
    found = _LookedUp(probe.__dependencies__)
    type.__setattr__(probe, "__dependencies__", found)
    try:
        probe.tensor_quant  # noqa: B018  (builds it)
    except DependencyError as error:
        raise TypeError(f"{injector.__name__} is incomplete: {error}. State the missing setting") from error
    except Exception as error:
        raise ValueError(
            f"{injector.__name__} cannot be built: {type(error).__name__}: {error}; check the settings that differ "
            "from those of the class in brevitas.quant"
        ) from error
    return frozenset(found.names)


class _LookedUp(dict[str, Any]):
    """An injector's dependencies, recording the names that its resolution looks up."""

    def __init__(self, dependencies: dict[str, Any]) -> None:
        super().__init__(dependencies)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


#: All forms of a backward quantizer; a module is the proxy in another layer's slot.
BackwardQuantizer: TypeAlias = type[ExtendedInjector] | ActivationQuantizer | BackwardSettings | nn.Module
ACCEPTED = (
    "a backward quantizer (StochBackward2bit, NearestBackward4bit, ..., or a class derived from one), "
    "an activation quantizer object (quantize and is_stochastic: brevact.quantizers.ActivationQuantizer), or "
    "BackwardSettings"
)


def backward_settings_from(source: Any, argument: str = "source", /, **overrides: Any) -> BackwardSettings:
    """Resolve a backward quantizer, with overrides, into a region's settings.

    >>> from brevact.injectors import StochBackward2bit
    >>> backward_settings_from(StochBackward2bit, bucket_size=128).quantizer.bucket_size
    128

    Errors call the source by ``argument``.
    """
    if isinstance(source, BackwardInjectorType):
        injector = source.let(**overrides) if overrides else source
        _refuse_forward_quant(injector)
        return resolve(injector)
    settings = _built_settings(source, argument)
    return _replaced(settings, overrides) if overrides else settings


def resolve(injector: BackwardInjectorType) -> BackwardSettings:
    """Return ``injector.backward_settings``; the error names a setting that the injector does not state."""
    try:
        settings = injector.backward_settings
    except DependencyError as error:
        raise TypeError(
            f"the backward quantizer {injector.__name__} is incomplete: {error}. State the missing setting "
            "(bit_width = 2), or add the fragment that does (StochasticRounding, UniformBuckets, SaveQuantized)"
        ) from error
    if not isinstance(settings, BackwardSettings):
        raise TypeError(
            f"backward_settings={brief(settings)} of {injector.__name__} is no brevact.autograd.BackwardSettings; "
            "leave it out, and state quantizer, save_mode and min_numel, from which the solver makes it"
        )
    return settings


def _refuse_forward_quant(injector: BackwardInjectorType) -> None:
    for name, spec in injector.__dependencies__.items():
        if not name.startswith(FORWARD_PREFIX) or (written_value(spec) is None and name == "forward_quant"):
            continue
        value = written_value(spec)
        raise ValueError(
            f"{name}={brief(value)} quantizes the forward pass, which only a slot of Brevitas' own does (act_quant= of "
            "brevitas.nn.QuantReLU, input_quant= of brevitas.nn.QuantConv2d); here only the backward pass is "
            "quantized: leave it out"
        )


def _built_settings(source: Any, argument: str) -> BackwardSettings:
    if isinstance(source, BackwardSettings):
        return source
    if is_quantizer(source):
        return BackwardSettings(source)
    settings = settings_of_slot(source) if isinstance(source, nn.Module) else None
    if settings is not None:
        return settings
    raise TypeError(f"{argument}: got {_description(source)}; {_fix(source)}accepted: {ACCEPTED}")


def _description(source: Any) -> str:
    if is_injector(source):
        if quantizes_parameters(source):
            return (
                f"{source.__name__}, which quantizes a weight or a bias, and no activations; put it into weight_quant= "
                "or bias_quant= of a Brevitas layer"
            )
        if is_act_quantizer(source):
            return (
                f"{source.__name__}, which quantizes the forward pass: put it into input_quant=, act_quant= or "
                "forward_quant= of a Brevitas layer; to quantize activations for backward, pass StochBackward8bit"
            )
        if "proxy_class" in source:
            return f"{source.__name__}, which quantizes no activations by itself"
        return f"{source.__name__}, which is a fragment and lacks the solver: inherit from BackwardQuantSolver last"
    return f"{brief(source)} of type {type(source).__name__}, which is no backward quantizer"


def _fix(source: Any) -> str:
    if isinstance(source, str):
        leaves = {leaf.__name__ for leaf in derived(Fragment) if isinstance(leaf, BackwardInjectorType)}
        nearest = difflib.get_close_matches(source.rpartition(".")[2], leaves, n=1)
        return f"pass the class itself, without quotes: {nearest[0]}; " if nearest else ""
    if isinstance(source, nn.Module):
        return "a model goes first, its quantizer second: brevact.quantize_backward(model, StochBackward2bit); "
    if isinstance(source, Mapping | list | tuple):
        return 'rules are a mapping, for brevact.quantize_backward: {"head": None, "*": StochBackward2bit}; '
    if hasattr(source, "rules"):
        return 'a policy has rules of its own, and yours go before them: brevact.DEFAULT.let({"head": None}); '
    if source is None:
        return "full precision is what a model has without a policy: brevact.restore_backward(model); "
    return ""


def _replaced(settings: BackwardSettings, overrides: dict[str, Any]) -> BackwardSettings:
    quantizer = settings.quantizer
    of_settings = _settable(settings) - {"quantizer"}
    of_quantizer = _settable(quantizer)
    for name, value in overrides.items():
        if name not in of_settings | of_quantizer:
            if not dataclasses.is_dataclass(quantizer):
                raise TypeError(
                    f"{name}={brief(value)} cannot change a {type(quantizer).__name__}, which is no dataclass; "
                    f"accepted beside it: {', '.join(sorted(of_settings))}; build the quantizer with this setting"
                )
            raise unknown_setting(name, value, type(quantizer).__name__, of_settings | of_quantizer)
    changed = {name: value for name, value in overrides.items() if name in of_quantizer}
    return dataclasses.replace(
        settings,
        quantizer=dataclasses.replace(quantizer, **changed) if changed else quantizer,
        **{name: value for name, value in overrides.items() if name in of_settings},
    )


def _settable(value: Any) -> set[str]:
    return (
        {field.name for field in dataclasses.fields(value) if field.init} if dataclasses.is_dataclass(value) else set()
    )


def with_quantizers(settings: BackwardSettings | None, change: Callable[[Any], Any]) -> BackwardSettings | None:
    """Return settings with their quantizer changed, also those of ops with a rule of their own."""
    if settings is None:
        return None
    quantizer = change(settings.quantizer)
    functions = tuple((name, with_quantizers(each, change)) for name, each in settings.of_functions)
    if quantizer is settings.quantizer and all(
        new is old for (_, new), (_, old) in zip(functions, settings.of_functions, strict=True)
    ):
        return settings
    return dataclasses.replace(settings, quantizer=quantizer, of_functions=functions)
