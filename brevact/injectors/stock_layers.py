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
from collections.abc import Callable, Iterator
from typing import Any

import brevitas.nn as qnn
from torch import nn

from brevact.injectors.class_protocol import is_injector
from brevact.injectors.injector_type import BackwardInjectorType
from brevact.injectors.layer_slot import check_keywords, fill_slot, pop_settings
from brevact.injectors.proxies import is_quant_proxy


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
