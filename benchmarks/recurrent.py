"""Bytes that recurrent layers keep for backward, plain and packed at 2 bits.

    python -m benchmarks.recurrent --csv benchmarks/results/recurrent.csv

64 sequences of 128 steps, 256 features and states, float32, on the CPU. Kept are the distinct storages that autograd
holds (`brevact.memory_report`), without weights. An LSTM is measured
with oneDNN, whose workspace nobody can read, and without it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

import brevact
from benchmarks.records import write_rows

SIZE, STEPS, SEQUENCES = 256, 128, 64
#: Each layer, and whether oneDNN runs it where it can.
LAYERS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "GRU": (lambda: nn.GRU(SIZE, SIZE), True),
    "RNN, tanh": (lambda: nn.RNN(SIZE, SIZE), True),
    "RNN, ReLU": (lambda: nn.RNN(SIZE, SIZE, nonlinearity="relu"), True),
    "LSTM": (lambda: nn.LSTM(SIZE, SIZE), True),
    "LSTM without oneDNN": (lambda: nn.LSTM(SIZE, SIZE), False),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", help="append the rows to this file")
    options = parser.parse_args(arguments)
    write_rows(list(measure(LAYERS)), options.csv)


def measure(names: Iterable[str]) -> Iterator[dict[str, str | int]]:
    """One row a layer.

    Args:
        names: keys of `LAYERS`.

    Yields:
        Rows with the bytes of the layer as it is and packed.
    """
    x = torch.randn(STEPS, SEQUENCES, SIZE)
    for name in names:
        make, uses_onednn = LAYERS[name]
        with torch.backends.mkldnn.flags(enabled=uses_onednn):
            report = brevact.memory_report(brevact.quantize_backward(make(), brevact.StochBackward2bit), x)
        yield {"layer": name, "plain_bytes": report.plain_bytes, "saved_bytes": report.saved_bytes}


if __name__ == "__main__":
    main()
