"""The proxy in a layer's slot; which modules may have a rule, and which are Brevitas' machinery inside a layer."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from brevact.autograd import BackwardSettings, attach_region, has_region
from brevact.autograd.region.module_hooks import takes_hooks
from brevact.private_names.of_brevitas import COMPILED_CELL, QuantProxyFromInjector, QuantRecurrentLayerMixin

#: Packages of Brevitas that hold quantizers' parts, and no layers.
_OF_QUANTIZERS = ("brevitas.core.", "brevitas.proxy.")


class BackwardQuantProxy(nn.Module):
    """The backward quantizer of one layer, or of several that share it.

    It has no parameters and no state unless the quantizer is a module that has, then its child ``quantizer``.

    Args:
        settings: how the layers save tensors for backward.
    """

    #: Read by Brevitas in a layer's ``act_quant``: whether it quantizes the forward pass.
    is_quant_enabled = False

    def __init__(self, settings: BackwardSettings) -> None:
        super().__init__()
        self.settings = settings
        if isinstance(settings.quantizer, nn.Module):
            self.quantizer = settings.quantizer

    def add_tracked_module(self, layer: nn.Module) -> None:
        """Let a layer's whole forward run in a region with these settings, unless another slot holds others."""
        for name, child in layer.named_children():
            other = settings_of_slot(child)
            if other is not None and other != self.settings:
                raise ValueError(
                    f"{name} of this {type(layer).__name__} already holds a backward quantizer ({described(other)}) "
                    f"and a second slot brings another one ({self.extra_repr()}); a layer stores its activations "
                    "one way: keep one of the two"
                )
        attach_region(layer, self.settings)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def extra_repr(self) -> str:
        return described(self.settings)


def settings_of_slot(module: nn.Module) -> BackwardSettings | None:
    """Return the settings of a `BackwardQuantProxy`, or of a Brevitas proxy that carries one; None for others."""
    proxy = module if isinstance(module, BackwardQuantProxy) else module._modules.get("backward_quant")
    return proxy.settings if isinstance(proxy, BackwardQuantProxy) else None


def described(settings: BackwardSettings, *, brief: bool = False) -> str:
    quantizer = settings.quantizer
    defaults = _field_defaults(quantizer)
    stated = {name: getattr(quantizer, name) for name in defaults}
    if brief:
        stated = {
            name: value for name, value in stated.items() if value != defaults[name] or name == next(iter(defaults))
        }
    kind = quantizer.extra_repr() if hasattr(quantizer, "extra_repr") else type(quantizer).__name__
    for name, default in _field_defaults(settings).items():
        if name not in ("quantizer", "of_functions") and getattr(settings, name) != default:
            stated[name] = getattr(settings, name)
    plain = {name: value.value if isinstance(value, enum.Enum) else value for name, value in stated.items()}
    return ", ".join([kind, *(f"{name}={value}" for name, value in plain.items())])


def _field_defaults(value: Any) -> dict[str, Any]:
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return {field.name: field.default for field in fields if field.repr}


def is_quant_proxy(module: nn.Module) -> bool:
    return isinstance(module, QuantProxyFromInjector) or any(
        kind.__module__.startswith(_OF_QUANTIZERS) for kind in type(module).__mro__
    )


def activations_of(proxy: nn.Module) -> Iterator[nn.Module]:
    """Yield the activation functions that a quantizer proxy runs before it quantizes: a ``QuantReLU``'s ReLU."""
    for module in proxy.modules():
        activation = getattr(module, "activation_impl", None)
        if activation is not None:
            yield activation


def modules_without_own_region(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules under each of their names, except layers with their own quantizer and Brevitas' quantizers.

    Skipped, and run in the region of the module around them: ``torch.jit`` modules, which take no hooks, and class
    attributes, such as a library's default activation function of all convolutions. A quantizer's insides are skipped
    under their other names, too, and so is the cell that a Brevitas recurrent layer makes in its first forward: a model
    has the same modules before and after.
    """
    left_out = _inside_quantizers(module) | _of_classes(module) - {module}
    yield from _walk(module, "", lambda each: has_region(each) or each in left_out or not takes_hooks(each))


def _walk(module: nn.Module, name: str, leaves_out: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    if not leaves_out(module):
        yield name, module
        for child_name, child in module._modules.items():
            is_made_anew = child_name == COMPILED_CELL and isinstance(module, QuantRecurrentLayerMixin)
            if child is not None and not is_made_anew:
                yield from _walk(child, f"{name}.{child_name}" if name else child_name, leaves_out)


def names_of(model: nn.Module) -> dict[nn.Module, str]:
    """Return the first name of each module, used by reports, fits and widths.

    Quantizers inside a Brevitas layer have none: they belong to the layer, also where it refers to their insides.
    """
    found: dict[nn.Module, str] = {}
    for name, module in _walk(model, "", (_inside_quantizers(model) - {model}).__contains__):
        found.setdefault(module, name)
    return found


def _of_classes(model: nn.Module) -> set[nn.Module]:
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    return {each for kind in kinds for each in vars(kind).values() if isinstance(each, nn.Module)}


def _inside_quantizers(model: nn.Module) -> set[nn.Module]:
    found: set[nn.Module] = set()
    for module in model.modules():
        if module not in found and is_quant_proxy(module):
            found.update(module.modules())
    return found
