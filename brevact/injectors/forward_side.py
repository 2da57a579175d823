"""The forward side of a slot that holds a backward quantizer: ``forward_quant``, or the layer's activation alone."""

from __future__ import annotations

from brevitas.quant import NoneActQuant
from torch import nn

from brevact.injectors.brevitas_source import is_act_quantizer
from brevact.injectors.class_protocol import InjectorClass, written_values
from brevact.injectors.injector_type import (
    FORWARD_PREFIX,
    FROM_LAYER,
    BackwardInjectorType,
    act_impl_arguments,
)
from brevact.private_names.of_brevitas import ActQuantProxyFromInjector
from brevact.quantizers.brief import brief


class PlainActivation(nn.Module):
    """Holds a layer's activation where Brevitas would script it together with a quantizer."""

    def __init__(self, activation_impl: nn.Module) -> None:
        super().__init__()
        self.activation_impl = activation_impl
        self.tensor_quant = None


class NoForwardQuantProxy(ActQuantProxyFromInjector):
    """Brevitas' proxy for no quantizer, with the layer's activation as plain PyTorch.

    Under ``BREVITAS_JIT=1`` Brevitas scripts the activation even where nothing quantizes it. A region cannot see into
    a script, and would pack a ReLU's output where one bit an element is enough and exact.
    """

    def init_tensor_quant(self) -> None:
        """Set ``fused_activation_quant_proxy``, the activation, or None for none."""
        self.is_quant_enabled = False
        activation = self.quant_injector.act_impl if "act_impl" in self.quant_injector else None
        self.fused_activation_quant_proxy = None if activation is None else PlainActivation(activation)

    def extra_repr(self) -> str:
        """Say that the forward pass is not quantized, and which keyword quantizes it."""
        return "forward in full precision; forward_quant= quantizes it"


class NoForwardQuant(NoneActQuant):
    """The forward side of a slot without ``forward_quant``.

    It states the bounds of ``torch.nn.Hardtanh``, for which Brevitas' solver asks the quantizer: there,
    ``QuantHardTanh(act_quant=None)`` raises.
    """

    proxy_class = NoForwardQuantProxy
    min_val = -1.0
    max_val = 1.0


def forward_injector_of(injector: BackwardInjectorType) -> InjectorClass:
    """Return the forward side of a slot: ``forward_quant`` or no quantizer, with the keywords meant for it."""
    written = dict(written_values(injector))
    quant = written.pop("forward_quant")
    from_layer = (*FROM_LAYER, *act_impl_arguments(injector))
    overrides = {name: written[name] for name in from_layer if name in written}
    prefixed = {name: value for name, value in written.items() if name.startswith(FORWARD_PREFIX)}
    overrides |= {name.removeprefix(FORWARD_PREFIX): value for name, value in prefixed.items()}
    if quant is None:
        if prefixed:
            name, value = next(iter(prefixed.items()))
            raise ValueError(
                f"{name}={brief(value)} sets a forward quantizer, but there is none: pass forward_quant= as well"
            )
        return NoForwardQuant.let(**overrides)
    if not is_act_quantizer(quant):
        raise TypeError(
            f"forward_quant={brief(quant)} is no forward activation quantizer; accepted: an injector class such as "
            "brevitas.quant.Uint8ActPerTensorFloat, or None"
        )
    return quant.let(**overrides)
