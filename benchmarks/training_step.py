"""A training step on the CPU: what is kept for backward, and how long the step takes.

    python -m benchmarks.training_step                       # EfficientNetV2-S, batch 16, 32x32 images
    python -m benchmarks.training_step --model efficientnetv2-nano --batch-size 128 --policies NearestBackward2bit
    python -m benchmarks.training_step --model resnet50      # 8 images of 224x224; gpt2: 4 sequences of 256 tokens

Bytes are measured twice: the distinct storages that autograd keeps (`brevact.memory_report`), and the growth of the
process's resident memory between the start of a step and the start of its backward pass, known on Linux only. Each
variant trains in a process of its own, as a user's does: beside another model's gradients, an allocator would keep the
memory that it returns to the system otherwise. The plain model's process packs nothing, not even for a report, so that
its heap is as glibc sets it up; with `--same-heap`, each process has the heap as the package sets it (`brevact.heap`).
Their steps take turns; each ratio is the median of the ratios to the plain step of the same round. The first steps are
not timed: the heap and Python's caches take about ten to settle.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack

import torch
from torch import Tensor, nn

import brevact
from benchmarks.process_memory import resident_bytes
from benchmarks.records import write_rows
from benchmarks.workloads import gpt2
from brevact.heap import tune_heap
from recipes.models import resnet50
from recipes.models.efficientnetv2 import SIZES, efficientnetv2
from recipes.policy_names import named_policy

_MIB = 2**20
_WARM_UP = 10
MODELS = {f"efficientnetv2-{size}": (16, 32) for size in SIZES} | {"resnet50": (8, 224), "gpt2": (4, 0)}
"""Batch size, and the sides of images or 0, by model."""


def kept_resident_bytes(forward: Callable[[], Tensor]) -> int | None:
    """Growth of the resident memory between the start of a step and the start of its backward pass, where known.

    Args:
        forward: Returns the loss.
    """
    for _ in range(2):  # gradients, scratch buffers, code and tables are there after the first steps
        forward().backward()
    before = resident_bytes()
    loss = forward()
    after = resident_bytes()
    loss.backward()
    return None if before is None or after is None else after - before


def kept_bytes(model: nn.Module, batch: Tensor) -> int:
    """Bytes that a model keeps for backward; without a backward quantizer, what torch keeps."""
    report = brevact.memory_report(model, batch)
    return report.plain_bytes if report.note else report.saved_bytes


def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy."""
    return nn.functional.cross_entropy(model(images), labels)


def step_times(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step in each round, after one that is not timed."""
    return alternate({name: lambda step=step: seconds_of(step) for name, step in steps.items()}, rounds)


def seconds_of(step: Callable[[], None]) -> float:
    """Seconds that a step takes."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def alternate(steps: dict[str, Callable[[], float]], rounds: int, warm_up: int = 1) -> dict[str, list[float]]:
    """What each step returns in each round, after some that do not count; the order alternates from round to round."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(warm_up):
        for step in steps.values():
            step()
    for index in range(rounds):
        for name in list(steps) if index % 2 else reversed(list(steps)):
            found[name].append(steps[name]())
    return found


class _Loaded:
    """The variant that a process trains."""

    forward: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer


def _build(name: str, batch_size: int, image_size: int) -> tuple[nn.Module, Tensor, Callable[[nn.Module], Tensor]]:
    """A model, its batch, and what computes its loss."""
    if name == "gpt2":
        model = gpt2(depth=12)
        tokens = torch.randint(0, model.config.vocab_size, (batch_size, 256))
        return model, tokens, lambda model: model(tokens, labels=tokens, use_cache=False).loss
    images = torch.randn(batch_size, 3, image_size, image_size)
    labels = torch.randint(0, 10, (batch_size,))
    if name == "resnet50":
        return resnet50(classes=1000), images, lambda model: loss_of(model, images, labels)
    size = name.removeprefix("efficientnetv2-")
    model = efficientnetv2(size, image_size=image_size, classes=10)
    return model, images, lambda model: loss_of(model, images, labels)


def _make(sizes: tuple[str, int, int], policy: str) -> tuple[nn.Module, Tensor, Callable[[nn.Module], Tensor]]:
    """The model of a policy, or the plain one, its batch, and what computes its loss."""
    torch.manual_seed(0)
    plain, batch, loss = _build(*sizes)
    return plain if policy == "plain" else named_policy(policy).apply(plain), batch, loss


def _kept_bytes(sizes: tuple[str, int, int], policy: str) -> int:
    model, batch, _ = _make(sizes, policy)
    return kept_bytes(model, batch)


def _load(sizes: tuple[str, int, int], policy: str, keeps_memory: bool) -> tuple[int, int | None]:
    """Build the model of a policy, and its optimizer; its parameters, and the growth of the process by what is kept."""
    if keeps_memory:
        tune_heap()
    model, _, loss = _make(sizes, policy)
    _Loaded.forward = functools.partial(loss, model)
    _Loaded.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return sum(p.numel() for p in model.parameters()), kept_resident_bytes(_Loaded.forward)


def _step() -> float:
    return seconds_of(_train)


def _train() -> None:
    _Loaded.optimizer.zero_grad()
    _Loaded.forward().backward()
    _Loaded.optimizer.step()


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="efficientnetv2-s")
    parser.add_argument("--batch-size", type=int, help="default: 16 images, 8 images, 4 sequences, by model")
    parser.add_argument("--image-size", type=int, help="default: 32, of resnet50 224")
    default = [named_policy("DEFAULT"), named_policy("StochBackward2bit")]
    parser.add_argument("--policies", nargs="+", type=named_policy, default=default, metavar="POLICY")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--same-heap", action="store_true", help="set the heap of the plain model's process, too")
    parser.add_argument("--csv", help="append the rows to this file")
    args = parser.parse_args(arguments)
    batch_size, image_size = MODELS[args.model]
    args.batch_size = batch_size if args.batch_size is None else args.batch_size
    args.image_size = image_size if args.image_size is None else args.image_size
    for name in ("batch_size", "rounds"):
        if (value := getattr(args, name)) < 1:
            parser.error(f"--{name.replace('_', '-')} {value} is not possible: use at least 1")

    with ExitStack() as stack:
        context = multiprocessing.get_context("spawn")
        sizes = args.model, args.batch_size, args.image_size
        processes = {
            name: stack.enter_context(ProcessPoolExecutor(1, context))
            for name in ("plain", *(policy.name for policy in args.policies))
        }
        kept = {}
        for name in processes:
            with ProcessPoolExecutor(1, context) as process:
                kept[name] = process.submit(_kept_bytes, sizes, name).result()
        found = {name: p.submit(_load, sizes, name, args.same_heap).result() for name, p in processes.items()}
        resident = {name: growth for name, (_, growth) in found.items()}
        print(
            f"{args.model}, {found['plain'][0] / 1e6:.1f} M parameters, batch {args.batch_size}, "
            + (f"{args.image_size}x{args.image_size}" if args.image_size else "256 tokens")
        )
        if resident["plain"] is None:
            print("resident memory is left out: it is known on Linux only")
        steps = {name: lambda p=p: p.submit(_step).result() for name, p in processes.items()}
        times = alternate(steps, args.rounds, _WARM_UP)

    rows = [
        {
            "model": args.model,
            "batch_size": args.batch_size,
            "image_size": args.image_size,
            "stored": name,
            "heap": "package" if args.same_heap or name != "plain" else "glibc",
            "kept_mib": round(kept[name] / _MIB, 2),
            "kept_ratio": round(kept["plain"] / kept[name], 2),
            "resident_mib": "" if resident[name] is None else round(resident[name] / _MIB, 2),
            "resident_ratio": _ratio(resident["plain"], resident[name]),
            "step_s": round(statistics.median(times[name]), 4),
            "step_ratio": round(statistics.median(a / b for a, b in zip(times[name], times["plain"], strict=True)), 3),
        }
        for name in kept
    ]
    write_rows(rows, args.csv)


def _ratio(plain: int | None, kept: int | None) -> float | str:
    """How often `kept` goes into `plain`; empty where either is not known or nothing grew."""
    return round(plain / kept, 2) if plain is not None and kept else ""


if __name__ == "__main__":
    main()
