"""Activation slots of Brevitas' layers that hold a backward quantizer."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from brevitas.nn import QuantIdentity, QuantMultiheadAttention
from brevitas.quant import NoneActQuant
from torch import nn

from brevact.injectors.class_protocol import InjectorClass, added_values, written_values
from brevact.injectors.injector_type import (
    ACT_PREFIX,
    FORWARD_PREFIX,
    FROM_LAYER,
    BackwardInjectorType,
    act_impl_arguments,
    known_names,
    unknown_setting,
)
from brevact.injectors.proxies import BackwardQuantProxy
from brevact.injectors.resolve import is_act_quantizer, names_looked_up, resolve
from brevact.private_names.of_brevitas import QuantRecurrentLayerMixin
from brevact.quantizers.brief import brief
from brevact.user_lines import warn

#: Filled in by layers and proxies.
_NOT_OF_USERS = {FORWARD_PREFIX + name for name in (*FROM_LAYER, "proxy_class", "proxy_module", "tensor_quant")}


class NoForwardQuant(NoneActQuant):
    """The forward side of a slot without ``forward_quant``."""

    min_val = -1.0  # Brevitas' solver reads the bounds of a Hardtanh from the quantizer
    max_val = 1.0


class Slot:
    """A slot of a Brevitas layer under construction, read from locals of Brevitas' mixin in a caller's frame."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.argument, self.prefix = layer, "act_quant", ""
        frame = inspect.currentframe()
        while frame is not None:
            found = frame.f_locals
            if found.get("self") is layer and "proxy_prefix" in found:
                self.argument, self.prefix = f"{found['proxy_prefix']}quant", found["kwargs_prefix"]
                break
            frame = frame.f_back

    @property
    def default(self) -> InjectorClass:
        kinds: list[Any] = [kind for kind in type(self.layer).__mro__ if "__init__" in vars(kind)]
        found = [inspect.signature(kind.__init__).parameters.get(self.argument) for kind in kinds]
        default = next((parameter.default for parameter in found if parameter is not None), None)
        return default if is_act_quantizer(default) else None


def backward_injector_of(injector: BackwardInjectorType, layer: nn.Module) -> BackwardInjectorType:
    """Return the backward side of a slot, with the layer's keywords for it."""
    slot, quant = Slot(layer), dict(written_values(injector))["forward_quant"]
    replaced = None if _states_forward_quant(injector) else slot.default
    forward: InjectorClass = replaced if quant is None else quant
    of_forward = set(forward.__dependencies__) if is_act_quantizer(forward) else set()
    from_layer = {*FROM_LAYER, *act_impl_arguments(injector)}
    given = {name: value for name, value in added_values(injector).items() if name not in from_layer}
    own = {name.removeprefix(ACT_PREFIX): value for name, value in given.items() if name.startswith(ACT_PREFIX)}
    for name, value in given.items():
        may_be_forward = name in of_forward and FORWARD_PREFIX + name not in given
        if name in known_names(injector) and (may_be_forward or name in own):
            act, of = f"{slot.prefix}{ACT_PREFIX}{name}=", ""
            if may_be_forward:
                of = f", {slot.prefix}{FORWARD_PREFIX}{name}= that of {forward.__name__}, for the forward pass"
            if may_be_forward and replaced is not None:
                of += f", which needs {slot.prefix}forward_quant={forward.__name__} as well"
            raise TypeError(
                f"{slot.prefix}{name}={brief(value)} of {type(layer).__name__} does not say which quantizer it is for: "
                f"{act} is the setting of {injector.__name__}, for backward{of}"
            )
    if replaced is not None:
        warn(
            f"{slot.argument}={injector.__name__} of {type(layer).__name__} replaces the forward quantizer "
            f"{replaced.__name__}: the forward pass is in full precision. Pass {slot.prefix}forward_quant="
            f"{replaced.__name__} to quantize it as well, or {slot.prefix}forward_quant=None to leave it so"
        )
    elif quant is None and isinstance(layer, QuantIdentity):
        warn(
            f"{injector.__name__} in a {type(layer).__name__} packs nothing: an identity keeps nothing for backward. "
            "Put it into the layer that follows (act_quant= of brevitas.nn.QuantConv2d)"
        )
    return injector.let(**own) if own else injector


def _states_forward_quant(injector: BackwardInjectorType) -> bool:
    """Whether the quantizer, or a keyword of the layer, states ``forward_quant``, possibly as None."""
    name = "forward_quant"
    *_, solver = [
        vars(kind)["__dependencies__"] for kind in injector.__mro__ if name in vars(kind).get("__dependencies__", ())
    ]
    return injector.__dependencies__[name] is not solver[name]


def forward_injector_of(injector: BackwardInjectorType) -> InjectorClass:
    """Return the forward side of a slot: ``forward_quant`` or no quantizer, with the keywords for it."""
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
    _refuse_unknown(quant, prefixed, overrides)
    return quant.let(**overrides)


def _refuse_unknown(quant: InjectorClass, prefixed: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Raise for a forward quantizer's setting that it never looks up, which Brevitas would ignore."""
    unknown = [name for name in prefixed if name.removeprefix(FORWARD_PREFIX) not in quant]
    asked = names_looked_up(quant.let(**overrides)) if unknown else frozenset()
    for name in unknown:
        if name.removeprefix(FORWARD_PREFIX) not in asked:
            accepted = {
                FORWARD_PREFIX + each for each in (*quant.__dependencies__, *asked) if not each.startswith("__")
            }
            raise unknown_setting(name, prefixed[name], quant.__name__, accepted - _NOT_OF_USERS)


def filled_slot(layer: nn.Module, injector: BackwardInjectorType) -> nn.Module:
    _refuse_parts_and_parameters(injector, layer)
    injector = backward_injector_of(injector, layer)
    settings = resolve(injector)
    forward_injector = forward_injector_of(injector)
    proxy = forward_injector.proxy_class(layer, forward_injector)
    proxy.backward_quant = BackwardQuantProxy(settings)
    proxy.backward_quant.add_tracked_module(layer)
    # On the instance: Brevitas' export looks up its handlers by a proxy's exact class.
    proxy.add_tracked_module = functools.partial(_add_tracked_module, proxy)
    return proxy


def _add_tracked_module(proxy: Any, layer: nn.Module) -> None:
    type(proxy).add_tracked_module(proxy, layer)
    proxy.backward_quant.add_tracked_module(layer)


def _refuse_parts_and_parameters(injector: BackwardInjectorType, layer: nn.Module) -> None:
    """Raise for slots in which nothing would be packed: of recurrent cells, of identities before products."""
    written = dict(written_values(injector))
    if _is_built_by(QuantRecurrentLayerMixin):
        raise TypeError(
            f"{injector.__name__} in a slot of a recurrent layer (io_quant, gate_acc_quant, sigmoid_quant, ...) "
            "would store nothing packed; pass it as act_quant= of QuantLSTM or QuantRNN, where it covers all of it"
        )
    if not all(name in written for name in FROM_LAYER):  # Brevitas passes them to the slots of activations alone
        raise TypeError(
            f"{injector.__name__} quantizes activations for backward and cannot quantize a weight or a bias; pass it "
            f"as act_quant= of {type(layer).__name__}"
        )
    if isinstance(layer, QuantIdentity) and written["forward_quant"] is None and _is_built_by(QuantMultiheadAttention):
        raise TypeError(
            f"{injector.__name__} in an inner slot of an attention (q_scaled_quant, v_quant, softmax_input_quant, ...) "
            "would store nothing packed; pass it as act_quant= of QuantMultiheadAttention, where it covers the whole "
            "layer, or as in_proj_input_quant= and out_proj_input_quant= for the projections alone"
        )


def _is_built_by(kind: type) -> bool:
    """Whether a layer of this kind is being built around the slot; no argument carries it."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), kind):
            return True
        frame = frame.f_back
    return False
