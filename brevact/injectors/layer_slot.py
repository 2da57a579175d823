"""The ``act_quant`` slot of a layer: the keyword, and settings of its quantizer with the prefix ``act_``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from brevact.injectors.injector_type import ACT_PREFIX, BackwardInjectorType, known_names
from brevact.injectors.proxies import BackwardQuantProxy
from brevact.injectors.resolve import backward_settings_from
from brevact.quantizers.brief import brief, did_you_mean

#: Keywords of Brevitas' mixins that the layers do not name.
_OF_BREVITAS_MIXINS = ("cache_inference_bias",)
#: Slot suffixes by which a layer forwards keywords to an inner layer.
_OF_INNER_LAYERS = ("input_quant", "weight_quant", "bias_quant", "output_quant")


def pop_settings(kwargs: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Remove and return a layer's keywords with the prefix ``act_``, except the layer's own parameters, ``names``."""
    return {name: kwargs.pop(name) for name in list(kwargs) if name.startswith(ACT_PREFIX) and name not in names}


def check_keywords(layer: type, names: Collection[str], kwargs: dict[str, Any], act_quant: Any) -> None:
    """Raise for a keyword that no slot of a Brevitas layer looks up, which Brevitas would ignore."""
    slots = [name.removesuffix("quant") for name in names if name.endswith("_quant")]
    inner = {name.removesuffix(end) for name in names for end in _OF_INNER_LAYERS if name.endswith(end)}
    prefixes = (*slots, *sorted(inner - {""}))
    for name, value in kwargs.items():
        if name in names or name in _OF_BREVITAS_MIXINS or name.startswith(prefixes):
            continue
        candidates = [*names, "act_quant"]
        for slot, source in {**kwargs, "act_quant": act_quant}.items():
            if isinstance(source, BackwardInjectorType):
                candidates += [slot.removesuffix("quant") + setting for setting in known_names(source)]
        raise TypeError(
            f"{name}={brief(value)} is not an argument of {layer.__name__}; {did_you_mean(name, candidates)}Accepted: "
            f"{', '.join(names)}, act_quant, and settings of a quantizer with the prefix of its slot: "
            f"{', '.join((ACT_PREFIX, *prefixes))}"
        )


def fill_slot(layer: nn.Module, source: Any, overrides: dict[str, Any]) -> None:
    """Set ``layer.act_quant`` and let the layer's forward run in a region.

    ``source`` is any backward quantizer; another layer's ``act_quant`` is shared. Overrides have the prefix ``act_``.
    """
    proxy = _proxy(source, overrides)
    layer.act_quant = proxy
    proxy.add_tracked_module(layer)


def _proxy(source: Any, overrides: dict[str, Any]) -> BackwardQuantProxy:
    if isinstance(source, BackwardQuantProxy):
        if overrides:
            name, value = next(iter(overrides.items()))
            raise ValueError(
                f"{name}={brief(value)} cannot change act_quant, which is shared with another layer; pass the injector "
                "class with this setting instead"
            )
        return source
    settings = {name.removeprefix(ACT_PREFIX): value for name, value in overrides.items()}
    return BackwardQuantProxy(backward_settings_from(source, "act_quant", **settings))
