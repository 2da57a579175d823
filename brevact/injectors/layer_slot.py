"""The ``act_quant`` slot of a layer: the keyword, and settings of its quantizer with the prefix ``act_``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from brevact.injectors.resolve import backward_settings_from
from brevact.injectors.slot import BackwardQuantProxy
from brevact.quantizers.brief import brief

ACT_PREFIX = "act_"


def pop_settings(kwargs: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Take the settings of ``act_quant`` out of a layer's keywords.

    Args:
        kwargs: keywords of the layer; changed in place.
        names: parameters of the layer's own, which are no settings.

    Returns:
        The keywords with the prefix ``act_``.
    """
    return {name: kwargs.pop(name) for name in list(kwargs) if name.startswith(ACT_PREFIX) and name not in names}


def fill_slot(layer: nn.Module, source: Any, overrides: dict[str, Any]) -> None:
    """Set ``layer.act_quant`` and let the layer's forward run in a region.

    Args:
        layer: initialized layer.
        source: a backward quantizer, an activation quantizer of Brevitas, which then quantizes for backward alone, or
            the ``act_quant`` of another layer, whose settings are shared.
        overrides: settings that replace those of ``source``, with the prefix ``act_``.

    Raises:
        TypeError: ``source`` is no backward quantizer, or an override is not one of its settings.
        ValueError: a value is out of range, or an override would change a shared quantizer.
    """
    proxy = _proxy(source, layer, overrides)
    layer.act_quant = proxy
    proxy.add_tracked_module(layer)


def _proxy(source: Any, layer: nn.Module, overrides: dict[str, Any]) -> BackwardQuantProxy:
    if isinstance(source, BackwardQuantProxy):
        if overrides:
            name, value = next(iter(overrides.items()))
            raise ValueError(
                f"{name}={brief(value)} cannot change act_quant, which is shared with another layer; pass the injector "
                "class with this setting instead"
            )
        return source
    settings = {name.removeprefix(ACT_PREFIX): value for name, value in overrides.items()}
    return BackwardQuantProxy(backward_settings_from(source, layer, "act_quant", **settings))
