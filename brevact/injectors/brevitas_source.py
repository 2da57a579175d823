"""Brevitas' own activation injectors: their classes, the names that they resolve, and the modules that they build."""

from __future__ import annotations

import inspect
from typing import Any

from dependencies.exceptions import DependencyError
from torch import nn

from brevact.injectors.class_protocol import InjectorClass, is_injector
from brevact.private_names.of_brevitas import (
    ActQuantProxyFromInjectorBase,
    BiasQuantProxyFromInjectorBase,
    WeightQuantProxyFromInjectorBase,
)


def is_act_quantizer(source: Any) -> bool:
    """Whether this is an injector class by which Brevitas quantizes activations."""
    return _has_proxy(source, ActQuantProxyFromInjectorBase)


def quantizes_parameters(source: Any) -> bool:
    """Whether this is an injector class by which Brevitas quantizes weights or biases."""
    return _has_proxy(source, (WeightQuantProxyFromInjectorBase, BiasQuantProxyFromInjectorBase))


def build_tensor_quant(injector: InjectorClass) -> tuple[nn.Module, frozenset[str]]:
    """Build an activation quantizer's ``tensor_quant``, without the proxy that would put it into a forward pass.

    Also returns every name that was looked up on the way, optional ones included. Raises a TypeError if the injector
    lacks a value or quantizes nothing, a ValueError if Brevitas refuses a value.
    """
    probe = injector.let(proxy_module=nn.Identity())
    asked = _Asked(probe.__dependencies__)
    type.__setattr__(probe, "__dependencies__", asked)
    try:
        tensor_quant = probe.tensor_quant
        if "proxy_module" in asked.names:  # to search for the best scale by calling it
            proxy = injector.proxy_class(nn.Identity(), injector)
            tensor_quant = proxy.fused_activation_quant_proxy.tensor_quant
    except DependencyError as error:
        raise TypeError(f"{injector.__name__} is incomplete: {error}. State the missing setting") from error
    except Exception as error:
        raise ValueError(
            f"{injector.__name__} cannot be built: {type(error).__name__}: {error}; check the settings that differ "
            "from those of the class in brevitas.quant"
        ) from error
    if tensor_quant is None:
        raise TypeError(f"{injector.__name__} quantizes nothing; pass act_quant=None for a plain layer")
    return tensor_quant, frozenset(asked.names)


class _Asked(dict[str, Any]):
    """An injector's dependencies, recording the names that its resolution looks up."""

    def __init__(self, dependencies: dict[str, Any]) -> None:
        super().__init__(dependencies)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def _has_proxy(source: Any, kinds: type | tuple[type, ...]) -> bool:
    if not is_injector(source) or "proxy_class" not in source:
        return False
    return inspect.isclass(source.proxy_class) and issubclass(source.proxy_class, kinds)
