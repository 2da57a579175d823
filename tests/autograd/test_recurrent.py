"""Recurrent layers, which saved-tensor hooks pack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import brevact
from brevact.autograd import BackwardSettings, region
from tests.autograd.measuring import Saved, settings, watch_saved

LAYERS = {
    "lstm": lambda: nn.LSTM(10, 12, 2, bidirectional=True),
    "lstm batch first": lambda: nn.LSTM(10, 12, batch_first=True),
    "lstm projected": lambda: nn.LSTM(10, 12, proj_size=5),
    "lstm without bias": lambda: nn.LSTM(10, 12, bias=False),
    "lstm dropout": lambda: nn.LSTM(10, 12, 2, dropout=0.3),
    "gru": lambda: nn.GRU(10, 12, 2, bidirectional=True),
    "rnn": lambda: nn.RNN(10, 12, 2),
    "rnn relu": lambda: nn.RNN(10, 12, nonlinearity="relu"),
}
CELLS = {
    "lstm": lambda: nn.LSTMCell(10, 12),
    "gru": lambda: nn.GRUCell(10, 12),
    "rnn": lambda: nn.RNNCell(10, 12),
    "rnn relu": lambda: nn.RNNCell(10, 12, nonlinearity="relu"),
}
INPUT = torch.randn(9, 16, 10, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections")


def sequence(layer: nn.Module, x: Tensor) -> Tensor:
    out, state = layer(x)
    return torch.cat([out.flatten(), *(s.flatten() for s in (state if isinstance(state, tuple) else (state,)))])


def packed_sequence(layer: nn.Module, x: Tensor) -> Tensor:
    lengths = torch.arange(x.shape[0 if layer.batch_first else 1]) % 5 + 2
    packed = pack_padded_sequence(x, lengths, batch_first=layer.batch_first, enforce_sorted=False)
    out, _ = layer(packed)
    assert isinstance(out, PackedSequence)
    return pad_packed_sequence(out)[0]


def steps(cell: nn.Module, x: Tensor) -> Tensor:
    state = None
    for row in x[:3]:
        state = cell(row, state)
    return state[0] if isinstance(state, tuple) else state


CASES = {
    **{f"{name}, sequence": (make, sequence) for name, make in LAYERS.items()},
    **{f"{name}, packed sequence": (make, packed_sequence) for name, make in LAYERS.items()},
    **{f"{name}, cell": (make, steps) for name, make in CELLS.items()},
}


def run(layer: nn.Module, function: Any, chosen: BackwardSettings | None) -> tuple[Tensor, tuple[Tensor, ...], Saved]:
    leaf = INPUT.clone().requires_grad_()
    torch.manual_seed(1)
    with watch_saved() as saved, region(chosen):
        out = function(layer, leaf * 1)
    weights = torch.linspace(-1, 1, out.numel()).sin().view(out.shape)
    return out.detach(), torch.autograd.grad((out * weights).sum(), [leaf, *layer.parameters()]), saved


@pytest.mark.parametrize(("make", "function"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("bit_width", [8, 4])
def test_recurrent_layers_keep_weights_and_close_gradients(make, function, bit_width):
    layer = make()
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    expected_out, expected, plain = run(layer, function, None)
    out, grads, saved = run(layer, function, settings(bit_width=bit_width))
    assert torch.equal(out, expected_out)
    held, plain_held = (
        [x for x in stored.tensors if x.untyped_storage().data_ptr() in weights] for stored in (saved, plain)
    )
    assert len(held) == len(plain_held) > 0  # every weight that torch stores, none of them packed
    # A step is a 255th (15th) of a range of some eight deviations; the errors of some steps in time add in squares.
    allowed = 2 * 8 / 255 if bit_width == 8 else 8 / 15
    for grad, reference in zip(grads, expected, strict=True):
        assert (grad - reference).norm() <= allowed * reference.norm()


@pytest.mark.parametrize("make", [LAYERS["gru"], LAYERS["lstm projected"], LAYERS["rnn"]])
def test_recurrent_layers_store_codes(make):
    layer = make()
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    sizes = []
    for chosen in (None, settings(bit_width=2)):
        saved = run(layer, sequence, chosen)[2]
        stored = [x for x in saved.tensors if x.untyped_storage().data_ptr() not in weights]
        assert chosen is None or all(x.dtype is torch.uint8 for x in stored)
        saved.tensors = stored
        sizes.append(saved.nbytes)
    assert sizes[1] < sizes[0] / 4


@pytest.mark.parametrize("name", ["gru", "rnn", "lstm", "lstm without onednn", "rnn relu"])
def test_long_sequences_pack_what_torch_lets_see(name):
    """As docs/how.md says: an LSTM on a CPU hands autograd a workspace, and an RNN with ReLU is exact."""
    makes = {"gru": nn.GRU, "rnn": nn.RNN, "rnn relu": lambda *sizes: nn.RNN(*sizes, nonlinearity="relu")}
    layer = makes.get(name, nn.LSTM)(64, 64)
    model = brevact.quantize_backward(nn.Sequential(nn.Linear(64, 64), layer), brevact.StochBackward2bit)
    with torch.backends.mkldnn.flags(enabled=name != "lstm without onednn" and torch.backends.mkldnn.is_available()):
        report = brevact.memory_report(model, torch.randn(32, 64, 64))
    (row,) = [row for row in report.rows if row.kind in ("GRU", "RNN", "LSTM")]
    whys = {op.why for op in report.ops if op.saved_bytes > row.saved_bytes / 2}
    if name == "lstm" and torch.backends.mkldnn.is_available():
        assert any("workspace" in why for why in whys)
    elif name == "rnn relu":
        assert row.saved_bytes == row.plain_bytes
    else:
        assert row.plain_bytes > 10 * row.saved_bytes


def test_relu_layers_are_exact():
    for make, function in (CASES["rnn relu, sequence"], CASES["rnn relu, cell"]):
        layer = make()
        _, expected, _ = run(layer, function, None)
        for grad, reference in zip(run(layer, function, settings(bit_width=1))[1], expected, strict=True):
            assert torch.equal(grad, reference)
