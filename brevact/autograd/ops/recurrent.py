"""Recurrent layers: torch runs, and hooks pack its tensors, unless its weights are indistinguishable from activations.

On a GPU cuDNN copies weights that are not in one storage into a flat tensor, and autocast copies them all.
"""

from __future__ import annotations

from brevact.autograd.call_arguments import tensors_of_call
from brevact.autograd.keeper import Keeper
from brevact.autograd.ops.op import Op, Saves, Stored, everywhere
from brevact.autograd.storages import storage_address
from brevact.autograd.weights import is_parameter
from brevact.private_names.of_torch import is_any_autocast_enabled


def _copies_weights(region: Keeper, args: tuple) -> bool:
    weights = [x for x in tensors_of_call(args, {}) if is_parameter(x) and x.is_cuda]
    if not weights:
        return False
    return is_any_autocast_enabled() or len({storage_address(weight) for weight in weights}) > 1


OPS = (
    Op(
        everywhere("lstm", "gru", "rnn_tanh"),
        stored=Stored(
            "LSTM, GRU, RNN",
            "input, states and gates, packed; weights as they are. An LSTM on a CPU: its input and output, packed; "
            "oneDNN's workspace, bytes of no known meaning, as it is. An RNN with ReLU: as in PyTorch, since its "
            "gradient asks for the sign",
            "noise, biased where steps multiply it",
        ),
        must_not_round=_copies_weights,
    ),
    Op(everywhere("rnn_tanh_cell", "lstm_cell", "gru_cell"), saves=Saves.BOUNDED),
)
