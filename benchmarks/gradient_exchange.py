"""Bytes that processes exchange when they train together, and what packing them does to training.

    python -m benchmarks.gradient_exchange --csv benchmarks/results/gradient_exchange.csv

Two and four processes on this machine train a perceptron (64-512-512-10, 301,066 parameters) on scikit-learn's digits
in DistributedDataParallel over gloo: without a hook, with PyTorch's float16 hook, and with
`brevact.distributed.quantized_hook`. Runs of a seed start from the same weights and see the same batches. A row of the
CSV is one run: what rank 0 received by its sockets in a step (the kernel's count, TCP_INFO, in the median over steps),
the mean training loss of the last epoch, and the accuracy on a fifth of the images. The table is of their means, and
of the differences from runs without a hook, seed by seed, with standard errors.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import stat
import statistics
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import brevact
from benchmarks.records import environment, print_table, write_rows
from brevact.distributed import quantized_hook
from recipes.data import load_digits

#: The ways to exchange gradients: names of hooks of PyTorch, or quantizers and whether errors are fed back.
HOOKS: dict[str, Any] = {
    "no hook": None,
    "float16": fp16_compress_hook,
    "WeibullBackward4bit": (brevact.WeibullBackward4bit, None),
    "StochBackward4bit": (brevact.StochBackward4bit, None),
    "WeibullBackward2bit": (brevact.WeibullBackward2bit, None),
    "NearestBackward2bit, error feedback": (brevact.NearestBackward2bit, True),
    "NearestBackward2bit": (brevact.NearestBackward2bit, False),
}
BATCH = 64  # of all processes together
_BYTES_RECEIVED = 128  # offset of tcpi_bytes_received in struct tcp_info of linux/tcp.h


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--csv", help="append the rows to this file")
    options = parser.parse_args(arguments)
    rows = []
    for world in options.processes:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(train_all, (world, options.seeds, options.epochs, folder), nprocs=world)
            rows += json.loads((Path(folder) / "rows.json").read_text("utf-8"))
    write_rows(rows, options.csv)
    print_table(summary(rows))


def train_all(rank: int, world: int, seeds: Sequence[int], epochs: int, folder: str) -> None:
    """Run every hook with every seed, as one process of several; rank 0 saves the rows.

    Args:
        rank: this process.
        world: number of processes.
        seeds: of weights and batches.
        epochs: of each run.
        folder: for the rendezvous and the rows.
    """
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    timeout = datetime.timedelta(minutes=5)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timeout)
    data = load_digits(Path(folder))
    train, test = ((normalized(split.images), split.labels) for split in (data.train, data.test))
    rows = [
        {"processes": world, "hook": name, "seed": seed, "epochs": epochs}
        | run(name, seed, epochs, train, test)
        | environment()
        for seed in seeds
        for name in HOOKS
    ]
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows, default=str), "utf-8")
    distributed.barrier()
    distributed.destroy_process_group()


def run(name: str, seed: int, epochs: int, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """Train once.

    Args:
        name: key of `HOOKS`.
        seed: of weights and batches.
        epochs: number of passes over the images.
        train: (N, 64) images and (N,) labels.
        test: the same, of the test set.

    Returns:
        Bytes a step, losses and accuracy.
    """
    torch.manual_seed(seed)
    layers = (nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    model = DistributedDataParallel(nn.Sequential(*layers))
    hook = HOOKS[name]
    if hook is not None:
        made = quantized_hook(hook[0], error_feedback=hook[1], seed=seed) if isinstance(hook, tuple) else hook
        model.register_comm_hook(None, made)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    generator, received = torch.Generator().manual_seed(seed), []
    rank, share = distributed.get_rank(), BATCH // distributed.get_world_size()
    for _ in range(epochs):
        losses = []
        for batch in torch.randperm(len(train[1]), generator=generator).split(BATCH)[:-1]:
            own = batch[rank * share : (rank + 1) * share]
            before = received_bytes()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(train[0][own]), train[1][own])
            loss.backward()
            optimizer.step()
            received.append(received_bytes() - before)
            losses.append(loss.detach())
        mean = torch.stack(losses).mean()
        distributed.all_reduce(mean)
    with torch.no_grad():
        hits = (model.module(test[0]).argmax(1) == test[1]).float().mean()
    return {
        "received_bytes": statistics.median(received),
        "float32_bytes": sum(p.numel() * 4 for p in model.parameters()),
        "train_loss": mean.item() / distributed.get_world_size(),
        "test_accuracy": hits.item(),
    }


def normalized(images: Tensor) -> Tensor:
    """(N, 1, 32, 32) uint8 digits as (N, 64) floats of mean 0 and deviation 1: one of each 4x4 equal pixels."""
    return (images[:, 0, ::4, ::4].flatten(1) / 255 - 0.3048) / 0.3754


def received_bytes() -> int:
    """What the TCP sockets of this process have received since they were made, as Linux counts it."""
    total = 0
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("<Q", info, _BYTES_RECEIVED)[0]
        except OSError:  # closed meanwhile
            continue
    return total


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds, and differences from runs without a hook with their standard errors.

    Args:
        rows: those of the CSV.

    Returns:
        A row for each number of processes and hook.
    """
    table = []
    for world in dict.fromkeys(row["processes"] for row in rows):
        runs = {name: [r for r in rows if (r["processes"], r["hook"]) == (world, name)] for name in HOOKS}
        for name, found in runs.items():
            line = {"processes": world, "hook": name, "KiB a step": round(_mean(found, "received_bytes") / 1024, 1)}
            for column in ("train_loss", "test_accuracy"):
                differences = [a[column] - b[column] for a, b in zip(found, runs["no hook"], strict=True)]
                line[column] = f"{_mean(found, column):.4f}"
                line[f"{column}, difference"] = _with_error(differences)
            table.append(line)
    return table


def _with_error(values: Sequence[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):+.4f} ± {error:.4f}"


def _mean(rows: Sequence[dict[str, Any]], column: str) -> float:
    return statistics.mean(row[column] for row in rows)


if __name__ == "__main__":
    main()
