"""Injectors by which Brevitas quantizes in the forward pass, and the settings that they look up."""

from __future__ import annotations

import inspect
from typing import Any

from dependencies.exceptions import DependencyError
from torch import nn

import brevact.private_names.of_brevitas as bv
from brevact.injectors.class_protocol import InjectorClass, is_injector


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
