"""``act_quant=`` on Brevitas' own layers, where Brevitas silently drops the keyword.

Importing this module wraps the ``__init__`` of each layer in ``brevitas.nn`` that takes quantizers and has no slot of
that name. With a backward quantizer in ``act_quant=``, the layer gets the slot of its namesake in ``brevact.nn``: its
whole forward runs in a region, and keywords with the prefix ``act_`` are the quantizer's settings. With a backward
quantizer in any slot, a keyword that no slot looks up raises. Otherwise Brevitas' ``__init__`` runs with unchanged
arguments.

>>> import brevitas.nn as qnn
>>> from brevact.injectors import StochBackward2bit
>>> conv = qnn.QuantConv2d(64, 128, 3, act_quant=StochBackward2bit, act_bucket_size=256)
>>> conv.act_quant.settings.quantizer.bucket_size
256
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

import brevitas.nn as qnn
from torch import nn

from brevact.injectors.class_protocol import is_injector
from brevact.injectors.injector_type import ACT_PREFIX, BackwardInjectorType, known_names
from brevact.injectors.proxies import BackwardQuantProxy, is_quant_proxy
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
    """Set ``layer.act_quant`` and let the layer's forward run in a region."""
    settings = {name.removeprefix(ACT_PREFIX): value for name, value in overrides.items()}
    if isinstance(source, BackwardQuantProxy) and overrides:
        name, value = next(iter(overrides.items()))
        raise ValueError(
            f"{name}={brief(value)} cannot change act_quant, which is shared with another layer; pass the injector "
            "class with this setting instead"
        )
    is_shared = isinstance(source, BackwardQuantProxy)
    proxy = source if is_shared else BackwardQuantProxy(backward_settings_from(source, "act_quant", **settings))
    layer.act_quant = proxy
    proxy.add_tracked_module(layer)


def _layers() -> Iterator[type[nn.Module]]:
    for kind in vars(qnn).values():
        if isinstance(kind, type) and issubclass(kind, nn.Module) and "__init__" in vars(kind):
            parameters = inspect.signature(kind).parameters
            takes_quantizers = any(name.endswith("_quant") for name in parameters)
            drops_keywords = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
            if takes_quantizers and drops_keywords and "act_quant" not in parameters:
                yield kind


def _is_brevitas_own(source: Any) -> bool:
    """Whether Brevitas knows this value of ``act_quant=``: None, or one of its forward quantizers."""
    return (
        source is None
        or is_quant_proxy(source)
        or (is_injector(source) and not isinstance(source, BackwardInjectorType))
    )


def _with_act_quant(initialize: Callable[..., None]) -> Callable[..., None]:
    names = [name for name in inspect.signature(initialize).parameters if name not in ("self", "kwargs")]

    @functools.wraps(initialize)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        source = kwargs.get("act_quant")
        if _is_brevitas_own(source):
            if any(isinstance(each, BackwardInjectorType) for each in (*args, *kwargs.values())):
                check_keywords(type(self), names, kwargs, None)
            initialize(self, *args, **kwargs)
            return
        del kwargs["act_quant"]
        overrides = pop_settings(kwargs, names)
        check_keywords(type(self), names, kwargs, source)
        initialize(self, *args, **kwargs)
        fill_slot(self, source, overrides)

    return __init__


for _kind in _layers():
    _kind.__init__ = _with_act_quant(_kind.__init__)  # type: ignore[method-assign]
