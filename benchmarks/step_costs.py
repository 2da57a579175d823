"""Where the time of a training step goes that backward quantization adds, on the CPU.

    python -m benchmarks.step_costs                                  # EfficientNetV2-S, batch 16, 32x32 images
    python -m benchmarks.step_costs --models resnet50 gpt2 --rounds 5

A plain step and a packed one take turns in one process, with one thread, whose processor time is counted: what other
processes take does not enter. One table has the phases (forward, backward, optimizer) of both and their ratio; one the
forward calls that differ most, by torch function; one the compiled kernels, with their calls. What is neither kernels
nor torch's own work is Python: regions, hooks, launches. Page faults are those of a step. Cache misses need hardware
counters, which most virtual machines hide: `perf stat -e cache-misses` shows them elsewhere.

All figures but the ratio are medians over the rounds; the ratio is the median of the ratios of a round.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from benchmarks.records import append_rows, print_table
from benchmarks.training_case import TrainingCase, workload
from brevact.autograd import mode
from brevact.cpu_kernels import launch, teams
from recipes.models import resnet50
from recipes.policy_names import named_policy

PHASES = ("forward", "backward", "optimizer")
Case = tuple[nn.Module, Callable[[], Any]]


def _from_case(model: str, batch_size: int, depth: int) -> Callable[[], Case]:
    return lambda: workload(TrainingCase(model=model, variant="plain", batch_size=batch_size, depth=depth))


def _resnet50() -> Case:
    model = resnet50(classes=1000)
    images, labels = torch.randn(8, 3, 224, 224), torch.randint(0, 1000, (8,))
    return model, lambda: nn.functional.cross_entropy(model(images), labels)


#: Each with its loss: batch 16 of 32x32, 8 of 224x224, 4 sequences of 256 tokens.
MODELS: dict[str, Callable[[], Case]] = {
    "efficientnetv2-s": _from_case("efficientnetv2-s", 16, 1),
    "resnet50": _resnet50,
    "gpt2": _from_case("gpt2", 4, 12),
}


class _Timing(TorchFunctionMode):
    """Adds up the thread's time in each torch function that a forward pass calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: Counter[str] = Counter()

    def __torch_function__(
        self, func: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        start = time.thread_time()
        result = func(*args, **(kwargs or {}))
        self.seconds[getattr(func, "__name__", str(func))] += time.thread_time() - start
        return result


@contextmanager
def timed_calls(seconds: Counter[str]) -> Iterator[None]:
    """While it is active, calls in a region are timed, by torch function: with all that the region does for them."""
    kind = mode.EagerMode
    original = kind.__torch_function__

    def timed(
        self: Any, func: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        start = time.thread_time()
        result = original(self, func, types, args, kwargs)
        seconds[getattr(func, "__name__", str(func))] += time.thread_time() - start
        return result

    kind.__torch_function__ = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__torch_function__ = original  # type: ignore[method-assign]


@contextmanager
def timed_kernels(seconds: Counter[str], calls: Counter[str]) -> Iterator[None]:
    """While it is active, compiled kernels are timed, by name.

    Launchers bind `share` when they are imported: `launch`, which this module imports, has imported all of them.
    """
    original = teams.share
    launchers = [module for name, module in sys.modules.items() if name.startswith(launch.__package__)]
    launchers = [module for module in launchers if getattr(module, "share", None) is original]

    def timed(kernel: Callable, *arguments: Any) -> None:
        start = time.thread_time()
        original(kernel, *arguments)
        name = kernel.__name__
        seconds[name] += time.thread_time() - start
        calls[name] += 1

    for module in launchers:
        module.share = timed  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in launchers:
            module.share = original  # type: ignore[attr-defined]


class Stepper:
    """Takes training steps and times their phases.

    Args:
        case: model and loss.
    """

    def __init__(self, case: Case) -> None:
        self._model, self._loss = case
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)

    def step(self) -> dict[str, float]:
        """Seconds of each phase, and page faults."""
        faults, clocks = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, [time.thread_time()]
        loss = self._loss()
        clocks.append(time.thread_time())
        loss.backward()
        clocks.append(time.thread_time())
        self._optimizer.step()
        self._optimizer.zero_grad()
        clocks.append(time.thread_time())
        found = {phase: stop - start for phase, start, stop in zip(PHASES, clocks, clocks[1:], strict=False)}
        return {**found, "page faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults}

    def forward(self) -> None:
        """Run a forward pass alone."""
        self._loss()


def costs(build: Callable[[], Case], policy: Any, rounds: int) -> tuple[list[dict[str, Any]], ...]:
    """The rows of the three tables: phases, calls, kernels; milliseconds.

    Args:
        build: makes model and loss.
        policy: of `named_policy`.
        rounds: that are timed, after two that are not.
    """
    torch.manual_seed(0)
    plain, (model, loss) = Stepper(build()), build()
    packed = Stepper((policy.apply(model), loss))
    steps: dict[str, list[dict[str, float]]] = {"plain": [], "packed": []}
    kernels: list[Counter[str]] = []
    calls: dict[str, list[Counter[str]]] = {"plain": [], "packed": []}
    for index in range(rounds + 2):
        seconds, count, timing, of_region = Counter[str](), Counter[str](), _Timing(), Counter[str]()
        found = {"plain": plain.step()}
        with timed_kernels(seconds, count):
            found["packed"] = packed.step()
        with timing:
            plain.forward()
        with timed_calls(of_region):
            packed.forward()
        if index >= 2:
            for name, step in found.items():
                steps[name].append(step)
            kernels.append(seconds)
            calls["plain"].append(timing.seconds)
            calls["packed"].append(of_region)
    return _phases(steps, kernels), _calls(calls), _kernels(kernels, count)


def _median(records: Sequence[dict[str, float] | Counter[str]], name: str) -> float:
    return statistics.median(record[name] for record in records)


def _phases(steps: dict[str, list[dict[str, float]]], kernels: list[Counter[str]]) -> list[dict[str, Any]]:
    for records in steps.values():
        for record in records:
            record["step"] = sum(record[phase] for phase in PHASES)
    rows = []
    for name in (*PHASES, "step", "page faults"):
        unit = 1 if name == "page faults" else 1e3
        a, b = (unit * _median(steps[kind], name) for kind in ("plain", "packed"))
        ratios = [q[name] / max(p[name], 1e-9) for p, q in zip(steps["plain"], steps["packed"], strict=True)]
        ratio = f"{statistics.median(ratios):.3f}" if unit > 1 else ""
        rows.append({"phase": name, "plain": f"{a:.1f}", "packed": f"{b:.1f}", "more": f"{b - a:.1f}", "ratio": ratio})
    inside = 1e3 * statistics.median(sum(record.values()) for record in kernels)
    rows.append(
        {"phase": "in kernels", "plain": "0.0", "packed": f"{inside:.1f}", "more": f"{inside:.1f}", "ratio": ""}
    )
    return rows


def _calls(calls: dict[str, list[Counter[str]]], most: int = 10) -> list[dict[str, Any]]:
    median: dict[str, dict[str, float]] = defaultdict(dict)
    for kind, records in calls.items():
        for name in {name for record in records for name in record}:
            median[name][kind] = 1e3 * _median(records, name)
    more = {name: found.get("packed", 0.0) - found.get("plain", 0.0) for name, found in median.items()}
    return [
        {
            "forward call": name,
            "plain": f"{median[name].get('plain', 0.0):.2f}",
            "packed": f"{median[name].get('packed', 0.0):.2f}",
            "more": f"{more[name]:.2f}",
        }
        for name in sorted(more, key=more.__getitem__, reverse=True)[:most]
    ]


def _kernels(kernels: list[Counter[str]], calls: Counter[str]) -> list[dict[str, Any]]:
    found = {name: 1e3 * _median(kernels, name) for name in calls}
    return [
        {"kernel": name, "ms": f"{found[name]:.2f}", "calls": calls[name]}
        for name in sorted(found, key=found.__getitem__, reverse=True)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["efficientnetv2-s"])
    parser.add_argument("--policy", type=named_policy, default=named_policy("DEFAULT"))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--csv", help="append the phases to this file")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in args.models:
        phases, calls, kernels = costs(MODELS[name], args.policy, args.rounds)
        print(f"\n{name}, {args.policy.name}, {args.rounds} rounds, one thread, milliseconds of processor time\n")
        for rows in (phases, calls, kernels):
            print_table(rows)
            print()
        if args.csv:
            append_rows([{"model": name, "policy": args.policy.name, **row} for row in phases], args.csv)


if __name__ == "__main__":
    main()
