"""Ways to train in less memory, side by side: packed activations, checkpoints, an optimizer with 8-bit states.

    python -m benchmarks.alternatives --csv benchmarks/results/alternatives.csv

A small transformer (8 blocks of width 256, 32 sequences of 128 tokens) and a small CNN (8 residual blocks of 64
channels, 64 images of 32x32) train with AdamW on random data, each way in a process of its own. Kept: bytes of the
distinct storages that autograd holds when backward starts. States: bytes of the optimizer's. Peak: growth of the
process's resident memory in a step, at its highest, on Linux. CPU: processor time of a step, of all threads, in the
median over steps: unlike the time that passes, other programs hardly change it. The 8-bit optimizer is that of
bitsandbytes (`pip install bitsandbytes`); its rows are left out where that is not installed.

Offload (`torch.autograd.graph.save_on_cpu`) has no row: it moves what plain PyTorch keeps from a device to the host,
and on a CPU there is nowhere to move it.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import brevact
from benchmarks.process_memory import return_free_memory
from benchmarks.records import environment, write_rows
from benchmarks.training_step import kept_bytes

#: Whether to pack, to recompute, and to keep optimizer states in 8 bits.
WAYS = {
    "plain PyTorch": (False, False, False),
    "brevact, default": (True, False, False),
    "checkpoint of each block": (False, True, False),
    "8-bit AdamW": (False, False, True),
    "brevact, default, and 8-bit AdamW": (True, False, True),
}
_MIB = 2**20
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Blocks(nn.Module):
    """Modules one after the other; those between the first and the last may be recomputed in backward."""

    def __init__(self, *modules: nn.Module, recomputes: bool) -> None:
        super().__init__()
        self.steps = nn.ModuleList(modules)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        """Run the modules in turn."""
        first, *blocks, last = self.steps
        x = first(x)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return last(x)


class Residual(nn.Module):
    """x + conv(SiLU(norm(conv(x)))), normalized."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        convs = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        norms = (nn.BatchNorm2d(channels) for _ in range(2))
        self.first, self.second = convs
        self.inner, self.outer = norms

    def forward(self, x: Tensor) -> Tensor:
        """Add what the branch makes of the input."""
        return F.silu(x + self.outer(self.second(F.silu(self.inner(self.first(x))))))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--csv", help="append the rows to this file")
    options = parser.parse_args(arguments)
    has_8_bit = importlib.util.find_spec("bitsandbytes") is not None
    rows = []
    for model in options.models:
        for way, (_, _, in_8_bit) in WAYS.items():
            if has_8_bit or not in_8_bit:
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    rows.append(pool.apply(measure, (model, way, options.steps)))
    write_rows(rows, options.csv)


def measure(name: str, way: str, steps: int) -> dict[str, Any]:
    """Train for some steps.

    Args:
        name: key of `MODELS`.
        way: key of `WAYS`.
        steps: how many, after two that are not counted.

    Returns:
        The row.
    """
    packs, recomputes, in_8_bit = WAYS[way]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, x, labels = MODELS[name](recomputes)
    if packs:
        brevact.quantize_backward(model)
    optimizer = _adamw(in_8_bit)(model.parameters(), lr=1e-4)

    def step() -> float:
        start = time.process_time()
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()
        return time.process_time() - start

    for _ in range(2):
        step()
    peaks, times = zip(*(_with_peak(step) for _ in range(steps)), strict=True)
    return {
        "model": name,
        "way": way,
        "weights_mib": round(sum(p.nbytes for p in model.parameters()) / _MIB, 1),
        "kept_mib": round(kept_bytes(model, x) / _MIB, 1),
        "states_mib": round(sum(map(_bytes, optimizer.state.values())) / _MIB, 1),
        "peak_mib": round(statistics.median(peaks) / _MIB, 1),
        "cpu_s": round(statistics.median(times), 3),
    } | environment()


def _transformer(recomputes: bool) -> tuple[nn.Module, Tensor, Tensor]:
    blocks = (
        nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        for _ in range(8)
    )
    head = nn.Sequential(nn.LayerNorm(256), nn.Flatten(0, 1), nn.Linear(256, 100))
    tokens = torch.randint(100, (32, 128))
    return Blocks(nn.Embedding(100, 256), *blocks, head, recomputes=recomputes), tokens, tokens.roll(-1, 1).flatten()


def _cnn(recomputes: bool) -> tuple[nn.Module, Tensor, Tensor]:
    blocks = (Residual(64) for _ in range(8))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    model = Blocks(nn.Conv2d(3, 64, 3, padding=1), *blocks, head, recomputes=recomputes)
    return model, torch.randn(64, 3, 32, 32), torch.randint(10, (64,))


MODELS = {"transformer": _transformer, "CNN": _cnn}


def _adamw(in_8_bit: bool) -> Any:
    if not in_8_bit:
        return torch.optim.AdamW
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit


def _bytes(state: dict[str, Any]) -> int:
    return sum(value.nbytes for value in state.values() if isinstance(value, Tensor))


def _with_peak(step: Any) -> tuple[int, float]:
    """Growth of the resident set in a step, at its highest, and the step's processor time."""
    return_free_memory()
    _CLEAR.write_text("5", "ascii")  # the peak counts from here
    before = _status("VmRSS")
    seconds = step()
    return _status("VmHWM") - before, seconds


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text("ascii"), re.M)
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    main()
