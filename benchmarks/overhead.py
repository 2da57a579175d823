"""What the mechanism costs by itself: a training step whose activations are kept as they are, through all of it.

    python -m benchmarks.overhead

The model is a residual network of six basic blocks (32, 64 and 128 channels), batch 64, 32x32 images. Regions, hooks,
Functions and sharing run as always, with a quantizer that stores the tensor itself: its codes are the tensor's own
memory, and decoding hands that memory back, so that no element is read or written. ReLU packs its mask, as it does
whatever the quantizer. "bare Functions" is the same work without the mechanism: custom Functions of a few lines for the
same layers, which store what torch stores, and for ReLU the packed mask.

The steps alternate in one process, whose allocator keeps its memory: the page faults of memory that glibc gives back
and takes again differ from heap to heap by more than what is measured here. So does, by a few percent, the speed of a
kernel with the place of its tensors: what is measured is the median over the rounds of one process, and printed is the
mean over several processes, with its standard error. Ratios are to the plain step of the same round. Region, hooks and
sharing are what the step with the identity takes beyond the one with bare Functions of the same round, less the time
inside the identity.

The last line gives what all of it costs in steps on two images of 8x8, where it is half of the time: the median
difference to the plain step, less the time inside the identity; also as a share of the large plain step. It is a lower
bound: between kernels that read large tensors, Python runs from cold caches.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import math
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import brevact
from benchmarks.bare_functions import bare_functions
from benchmarks.records import write_rows
from benchmarks.training_step import kept_bytes, loss_of, step_times
from brevact.quantizers import Layout, PackedActivation, PackedSpec, Part
from recipes.models.resnet import BasicBlock

STAGES = ((2, 32), (2, 64), (2, 128))
"""Blocks and channels of each stage."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's `mallopt`."""

inside_identity = [0.0]
"""Seconds inside the identity's own methods."""


@dataclass(frozen=True)
class Identity:
    """Stores a tensor's own memory. For tensors that nothing overwrites: no copy is made."""

    is_stochastic = False
    is_lossless = True  # norms let it have their input, not a copy that they have normalized

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        """Take the memory of `x`, which must be dense."""
        start = time.perf_counter()
        layout = Layout.of(x)
        if not layout.is_dense or layout.numel != x.numel():
            raise ValueError(f"x: got strides {x.stride()} for shape {tuple(x.shape)}; accepted are dense tensors")
        codes = x.as_strided((x.numel(),), (1,)).view(torch.uint8)
        packed = PackedActivation(PackedSpec.of(self, layout), codes)
        inside_identity[0] += time.perf_counter() - start
        return packed

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        """The elements."""
        return (Part("codes", layout.dtype, int(layout.numel)),)

    def decode(self, buffer: Tensor, spec: PackedSpec[Identity], target: Tensor) -> None:
        """Let `target` be the stored memory."""
        start = time.perf_counter()
        target.set_(buffer.view(target.dtype).as_strided(target.shape, target.stride()))
        inside_identity[0] += time.perf_counter() - start

    def decode_multiply(self, buffer: Tensor, spec: PackedSpec[Identity], other: Tensor, target: Tensor) -> None:
        """Multiply by the stored tensor."""
        torch.mul(spec.split(buffer)[0].as_strided(target.shape, target.stride()), other, out=target)


def resnet(classes: int = 10) -> nn.Sequential:
    """Stem, six basic blocks, mean over the map, classifier."""
    channels = STAGES[0][1]
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    for stage, (count, channels_out) in enumerate(STAGES):
        for index in range(count):
            layers.append(BasicBlock(channels, channels_out, stride=2 if stage > 0 and index == 0 else 1))
            channels = channels_out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def variants(model: nn.Module, min_numel: int = 4096) -> dict[str, nn.Module]:
    """The model as it is, with bare Functions, with the identity for a quantizer, and with 2 bits for comparison."""
    identity = brevact.BackwardSettings(Identity(), min_numel=min_numel)
    return {
        "plain": model,
        "bare Functions": bare_functions(model),
        "identity": brevact.quantize_backward(copy.deepcopy(model), identity),
        "StochBackward2bit": brevact.quantize_backward(copy.deepcopy(model), brevact.StochBackward2bit),
    }


def keep_memory() -> bool:
    """Let glibc's allocator keep what is freed; return whether it does."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1) and mallopt(M_MMAP_THRESHOLD, 2**30))


def times_of(models: dict[str, nn.Module], images: Tensor, labels: Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds of a step of each model in each round."""

    def step(name: str) -> None:
        models[name].zero_grad()
        loss_of(models[name], images, labels).backward()

    return step_times({name: lambda name=name: step(name) for name in models}, rounds)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and its standard error; NaN for the error of a single value."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.mean(values), error


def seconds_inside_identity(model: nn.Module, images: Tensor, labels: Tensor, steps: int = 5) -> float:
    """Seconds inside the identity in a step."""
    before = inside_identity[0]
    for _ in range(steps):
        loss_of(model, images, labels).backward()
    return (inside_identity[0] - before) / steps


def fixed_cost(model: nn.Module, rounds: int) -> float:
    """Seconds that a step with the identity takes beyond a plain one, on inputs so small that no kernel counts."""
    models = variants(model, min_numel=0)
    models = {name: models[name] for name in ("plain", "identity")}
    before = inside_identity[0]
    times = times_of(models, torch.randn(2, 3, 8, 8), torch.randint(0, 10, (2,)), rounds)
    inside = (inside_identity[0] - before) / (rounds + 1)  # a step of each comes first
    return statistics.median(a - b for a, b in zip(times["identity"], times["plain"], strict=True)) - inside


@dataclass(frozen=True)
class Figures:
    """What one process measures.

    Args:
        step_s: median seconds of a step of each variant.
        ratio: median ratio of it to the plain step of the same round.
        mechanism: region, hooks and sharing as a share of the plain step.
        inside_s: seconds inside the identity in a step.
        fixed_s: what :func:`fixed_cost` returns.
    """

    step_s: dict[str, float]
    ratio: dict[str, float]
    mechanism: float
    inside_s: float
    fixed_s: float


def measure(batch_size: int, rounds: int, threads: int, seed: int) -> Figures:
    """Measure in this process, whose allocator is changed."""
    if not keep_memory():
        print("the allocator is not glibc's: page faults are part of the times")
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    images, labels = torch.randn(batch_size, 3, 32, 32), torch.randint(0, 10, (batch_size,))
    models = variants(resnet())
    times = times_of(models, images, labels, rounds)
    plain, inside = times["plain"], seconds_inside_identity(models["identity"], images, labels)
    triples = zip(times["identity"], times["bare Functions"], plain, strict=True)
    return Figures(
        step_s={name: statistics.median(times[name]) for name in models},
        ratio={name: statistics.median(a / b for a, b in zip(times[name], plain, strict=True)) for name in models},
        mechanism=statistics.median((a - inside - b) / c for a, b, c in triples),
        inside_s=inside,
        fixed_s=fixed_cost(models["plain"], 5 * rounds),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--processes", type=int, default=8, help="one after the other")
    parser.add_argument("--rounds", type=int, default=21, help="in each process")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--csv", help="append the rows to this file")
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    figures = []
    for seed in range(args.processes):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            figures.append(process.submit(measure, args.batch_size, args.rounds, args.threads, seed).result())
        print(f"process {seed + 1} of {args.processes}: {figures[-1].mechanism:.3f} of the plain step", flush=True)
    mechanism = mean_and_error([each.mechanism for each in figures])
    images, rows = torch.randn(args.batch_size, 3, 32, 32), []
    for name, model in variants(resnet()).items():
        ratio, error = mean_and_error([each.ratio[name] for each in figures])
        rows.append(
            {
                "model": "ResNet of 6 blocks",
                "batch_size": args.batch_size,
                "processes": args.processes,
                "rounds": args.rounds,
                "stored": name,
                "kept_mib": round(kept_bytes(model, images) / 2**20, 2),
                "step_s": round(statistics.mean(each.step_s[name] for each in figures), 4),
                "step_ratio": round(ratio, 3),
                "ratio_error": round(error, 3),
                "mechanism": round(mechanism[0], 3) if name == "identity" else "",
                "mechanism_error": round(mechanism[1], 3) if name == "identity" else "",
            }
        )
    write_rows(rows, args.csv)
    inside = statistics.mean(each.inside_s for each in figures)
    print(
        "region, hooks and sharing: {:.3f} +- {:.3f} of the plain step; ".format(*mechanism)
        + f"{1e3 * inside:.1f} ms inside the identity are no part of it"
    )
    fixed = statistics.mean(each.fixed_s for each in figures)
    share = statistics.mean(each.fixed_s / each.step_s["plain"] for each in figures)
    print(f"all, from steps on two images of 8x8: {1e3 * fixed:.1f} ms, {share:.3f} of the plain step above")


if __name__ == "__main__":
    main()
