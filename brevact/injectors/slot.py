"""What sits in a layer's slot: it lets the layer's forward run in a region, and shows with which settings."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
from typing import Any

from brevitas.nn.mixin.base import QuantRecurrentLayerMixin
from torch import Tensor, nn

from brevact.autograd import BackwardSettings, attach_region
from brevact.injectors.forward_side import forward_injector_of
from brevact.injectors.injector_type import BackwardInjectorType
from brevact.injectors.settings import resolve


class BackwardQuantProxy(nn.Module):
    """The backward quantizer of one layer, or of several that share it; it has no parameters and no state.

    Args:
        settings: what the layers store for backward.
    """

    def __init__(self, settings: BackwardSettings) -> None:
        super().__init__()
        self.settings = settings

    def add_tracked_module(self, layer: nn.Module) -> None:
        """Let the whole forward of ``layer`` run in a region with these settings.

        Raises:
            ValueError: another slot of the layer holds different settings.
        """
        for name, child in layer.named_children():
            other = child if isinstance(child, BackwardQuantProxy) else getattr(child, "backward_quant", None)
            if isinstance(other, BackwardQuantProxy) and other.settings != self.settings:
                raise ValueError(
                    f"{name} of this {type(layer).__name__} already holds a backward quantizer ({other.extra_repr()}) "
                    f"and a second slot brings another one ({self.extra_repr()}); a layer stores its activations "
                    "one way: keep one of the two"
                )
        attach_region(layer, self.settings)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``: the forward pass is not quantized."""
        return x

    def extra_repr(self) -> str:
        """Return the quantizer's settings, and those of the region that are not the default."""
        quantizer = self.settings.quantizer
        stated = {name: getattr(quantizer, name) for name in _field_defaults(quantizer)}
        for name, default in _field_defaults(self.settings).items():
            if name != "quantizer" and getattr(self.settings, name) != default:
                stated[name] = getattr(self.settings, name)
        return ", ".join([type(quantizer).__name__, *(f"{name}={_plain(value)}" for name, value in stated.items())])


def _field_defaults(value: Any) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else {}


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else value


def build_slot_proxy(layer: nn.Module, injector: BackwardInjectorType) -> nn.Module:
    """Fill an activation slot of a Brevitas layer; Brevitas calls it as the injector's ``proxy_class``.

    The result is the proxy that Brevitas itself builds for ``forward_quant``, or for no quantizer at all, so that the
    forward pass, the ``state_dict`` and the export of the layer are Brevitas' own. Beside it, ``proxy.backward_quant``
    makes the whole forward of each layer that uses the proxy a region; which slot of the layer it sits in
    (``input_quant``, ``act_quant``, ``output_quant``) makes no difference.

    Args:
        layer: the Brevitas layer that is being built.
        injector: backward quantizer, with the layer's keywords for this slot.

    Raises:
        TypeError: the slot belongs to a part of a recurrent layer, or ``forward_quant`` is no forward quantizer.
        ValueError: settings are out of range or contradict another slot.
    """
    _refuse_recurrent_part(injector)
    settings = resolve(injector)
    forward_injector = forward_injector_of(injector)
    proxy = forward_injector.proxy_class(layer, forward_injector)
    proxy.backward_quant = BackwardQuantProxy(settings)
    proxy.backward_quant.add_tracked_module(layer)
    # On the instance: Brevitas' export looks its handlers up by the exact class of a proxy.
    proxy.add_tracked_module = functools.partial(_add_tracked_module, proxy)
    return proxy


def _add_tracked_module(proxy: nn.Module, layer: nn.Module) -> None:
    type(proxy).add_tracked_module(proxy, layer)
    proxy.backward_quant.add_tracked_module(layer)


def _refuse_recurrent_part(injector: BackwardInjectorType) -> None:
    """Raise where Brevitas builds a slot for a part of a recurrent layer.

    Brevitas throws the layer around such a slot away and runs the cell without it: nothing would be packed. The
    recurrent layer is not an argument of anything called here, hence the look at the frames.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), QuantRecurrentLayerMixin):
            raise TypeError(
                f"{injector.__name__} in a slot of a recurrent layer (io_quant, gate_acc_quant, sigmoid_quant, ...) "
                "would store nothing packed; pass it as act_quant= of brevact.nn.QuantLSTM or brevact.nn.QuantRNN, "
                "where it covers the whole layer"
            )
        frame = frame.f_back
