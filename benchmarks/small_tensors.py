"""What `min_numel` is worth in nets of many small tensors: kept bytes and the step, over its values.

    python -m benchmarks.small_tensors --csv FILE

A GRU over a packed sequence, an LSTM cell in a loop of Python, and Brevitas' QuantLSTM, whose tensors have some
thousand elements; an MLP, of which a step takes a millisecond; and two models with few small tensors, where packing
them is to cost nothing: a transformer encoder and EfficientNetV2 nano. Steps of all settings take turns in one
process, with one thread, whose processor time is counted; each ratio is that of medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import brevitas.nn as qnn
import torch
from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerTensorFloat
from torch import Tensor, nn

import brevact
from benchmarks.records import write_rows
from recipes.models import FloatLayers, efficientnetv2

VALUES = (4096, 2048, 1024, 512, 256)


class PackedSequence(nn.Module):
    """A GRU over 16 sequences of 20 to 64 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(64, 128, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        lengths = torch.linspace(20, 64, 16).long().flip(0)
        return self.gru(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[0].data


class Loop(nn.Module):
    """An LSTM cell, written out and called step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.hidden = nn.Linear(64, 256), nn.Linear(64, 256)

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        h, c, outs = torch.zeros(len(x), 64), torch.zeros(len(x), 64), []
        for step in x.unbind(1):
            i, f, g, o = (self.input(step) + self.hidden(h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outs.append(h)
        return torch.stack(outs, 1)


def _quant_lstm() -> nn.Module:
    quantizers = {"weight_quant": Int8WeightPerTensorFloat}
    quantizers |= dict.fromkeys(("io_quant", "gate_acc_quant"), Int8ActPerTensorFloat)
    return qnn.QuantLSTM(32, 64, batch_first=True, **quantizers)


def _mlp() -> nn.Module:
    layers = [(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*(layer for block in layers for layer in block))


def _transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 3)


def _nano() -> nn.Module:
    return efficientnetv2("nano", image_size=32, classes=10, layers=FloatLayers())


#: Each with the sizes of its input.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "GRU, packed sequence": (PackedSequence, (16, 64, 64)),
    "LSTM cell in a loop": (Loop, (32, 64, 64)),
    "QuantLSTM": (_quant_lstm, (32, 20, 32)),
    "MLP of width 64, batch 32": (_mlp, (32, 64)),
    "transformer encoder, 8 x 64 tokens": (_transformer, (8, 64, 128)),
    "EfficientNetV2 nano, batch 16": (_nano, (16, 3, 32, 32)),
}


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """The mean square of what a model returns.

    Args:
        model: of `MODELS`.
        x: its input.
    """
    out: Any = model(x)
    out = out[0] if isinstance(out, tuple) else out
    return getattr(out, "value", out).square().mean()


def measure(name: str, rounds: int) -> list[dict[str, Any]]:
    """Rows of one model, one for each value.

    Args:
        name: key of `MODELS`.
        rounds: that are timed, after one that is not.
    """
    make, shape = MODELS[name]
    torch.manual_seed(0)
    x, models = torch.randn(shape), {"plain": make()}
    for value in VALUES:
        models[value] = brevact.quantize_backward(make(), brevact.DitherBackward4bit, min_numel=value)
    seconds: dict[Any, list[float]] = {kind: [] for kind in models}
    for index in range(rounds + 1):
        for kind, model in models.items():
            start = time.process_time()
            loss_of(model, x).backward()
            if index:
                seconds[kind].append(time.process_time() - start)
    rows = []
    for value in VALUES:
        report = brevact.memory_report(models[value], x, loss_of)
        ratio = statistics.median(seconds[value]) / statistics.median(seconds["plain"])
        figures = {"plain_mib": f"{report.plain_bytes / 2**20:.2f}", "kept_mib": f"{report.saved_bytes / 2**20:.2f}"}
        figures |= {"times_less": f"{report.ratio:.1f}", "step": f"{ratio:.2f}"}
        rows.append({"model": name, "min_numel": value, **figures})
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--csv", help="append the rows to this file")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    write_rows([row for name in MODELS for row in measure(name, args.rounds)], args.csv)


if __name__ == "__main__":
    main()
