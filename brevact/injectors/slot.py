"""Activation slots of Brevitas' layers that hold a backward quantizer."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from brevitas.nn import QuantIdentity, QuantMultiheadAttention
from torch import nn

from brevact.injectors.class_protocol import written_values
from brevact.injectors.forward_side import backward_injector_of, forward_injector_of
from brevact.injectors.injector_type import FROM_LAYER, BackwardInjectorType
from brevact.injectors.proxies import BackwardQuantProxy
from brevact.injectors.resolve import resolve
from brevact.private_names.of_brevitas import QuantRecurrentLayerMixin


def filled_slot(layer: nn.Module, injector: BackwardInjectorType) -> nn.Module:
    """Fill an activation slot of a Brevitas layer.

    The result is the proxy that Brevitas itself builds for ``forward_quant``, or for no quantizer, so that the layer's
    forward pass, ``state_dict`` and export are Brevitas' own. In addition, ``proxy.backward_quant`` makes the whole
    forward of each layer that uses the proxy a region, whichever slot of the layer it sits in (``input_quant``,
    ``act_quant``, ``output_quant``). Without a stated ``forward_quant``, it warns if it replaces the slot's default
    forward quantizer, or if the layer is a ``QuantIdentity``, which saves nothing for backward by itself.

    It raises a TypeError for slots of weights, of a bias, and of parts of a recurrent layer or an attention.
    """
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
    """Raise for slots in which nothing would be packed.

    Brevitas discards the layer around a recurrent layer's inner slot and runs the cell without it. An attention's slots
    are identities: the products after them run outside of their forward.
    """
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
