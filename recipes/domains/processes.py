"""Training steps in fresh processes: kept bytes, the peak of the process, and time; and the largest size that fits.

    python -m recipes.domains.processes '{"module": "recipes.segmentation3d", "variant": "DEFAULT", ...}'

prints what it measured as a line of JSON. A process holds what a training of a user does: the library, the model, the
optimizer with its states, a batch. Plain training and checkpoints run without the package, whose import changes the
heap. Nothing is returned to the system on purpose: the peak is `VmHWM`, the most memory that was ever resident; on a
GPU, the most that torch's allocator gave out.
"""

import importlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from recipes.bisection import largest
from recipes.domains.domain import Domain, Size, Task
from recipes.domains.variants import PLAIN, is_packed, prepare
from recipes.errors import RecipeError
from recipes.options import option

MIB = 2**20
_INTERVAL = 0.005  # seconds between two looks at the peak


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a process trains.

    Attributes:
        module: of the recipe.
        variant: what it keeps.
        settings: of the recipe, by name.
        device: "cpu" or "cuda".
        threads: of torch.
        steps: training steps; all but the first are timed.
        limit_mib: a process that takes more ends; 0 for no limit.
    """

    module: str
    variant: str
    settings: dict[str, Any]
    device: str
    threads: int
    steps: int = 3
    limit_mib: int = 0

    def run(self, timeout: float = 3600.0) -> dict[str, Any]:
        """Trains in a fresh process.

        Args:
            timeout: seconds that it may take.

        Returns:
            What `measure` found, or `{"error": message}`.

        Raises:
            RecipeError: it took longer.
        """
        command = [sys.executable, "-W", "ignore", "-m", "recipes.domains.processes", json.dumps(asdict(self))]
        try:
            done = subprocess.run(
                command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            raise RecipeError(f"{self.steps} steps of {self.variant} took longer than {timeout:.0f} s") from None
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            errors = done.stderr.strip().splitlines()
            return {"error": f"exit code {done.returncode}: {errors[-1] if errors else 'no message'}"[:300]}
        return json.loads(lines[-1])


def case_of(domain: Domain, settings: Any, variant: str, device: torch.device) -> Case:
    """The case of a recipe with some settings."""
    return Case(
        module=domain.module,
        variant=variant,
        settings=asdict(settings),
        device=str(device),
        threads=torch.get_num_threads(),
    )


def measure(case: Case) -> dict[str, Any]:
    """Trains in this process.

    Args:
        case: what to train.

    Returns:
        `kept_mib`, bytes of tensors that a forward pass leaves; `peak_mib`; `loaded_mib`, resident before the first
        step; `step_s`, and `cpu_s`, processor time of a step, all threads: medians. With a limit the peak alone, after
        the steps, or after the first that has crossed the limit, unless the process ended before.
    """
    if is_packed(case.variant):
        importlib.import_module("brevact")  # as scripts do at their top: PyTorch's first tensor decides on large pages
    torch.set_num_threads(case.threads)
    device = torch.device(case.device)
    domain: Domain = importlib.import_module(case.module).DOMAIN
    torch.manual_seed(0)
    task = domain.task(domain.settings(**case.settings), 0, device)
    region = prepare(task, case.variant)
    batch = task.probe()
    loaded = _resident(device)
    if case.limit_mib:
        _guard(case.limit_mib, device)
    clocks = []
    for _ in range(case.steps):
        before = _clocks(device)
        task.step(batch, region)
        clocks.append([now - then for now, then in zip(_clocks(device), before, strict=True)])
        peak = torch.cuda.max_memory_allocated(device) / MIB if device.type == "cuda" else _status_mib("VmHWM")
        if case.limit_mib and peak > case.limit_mib:
            return {"peak_mib": peak}
    if case.limit_mib:
        return {"peak_mib": peak}
    task.optimizer.zero_grad(set_to_none=True)
    step, cpu = (statistics.median(values) for values in zip(*(clocks[1:] or clocks), strict=True))
    found = {"kept_mib": kept_bytes(task, batch, region, device) / MIB, "peak_mib": peak, "loaded_mib": loaded}
    return {**found, "step_s": step, "cpu_s": cpu}


def kept_bytes(task: Task, batch: Any, region: Any, device: torch.device) -> int:
    """Bytes of tensors that are there after a forward pass and were not before it."""
    from torch.profiler import ProfilerActivity, profile

    def forward() -> Any:
        with region():
            return task.loss(batch)

    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        loss = forward()
        return torch.cuda.memory_allocated(device) - before if loss is not None else 0
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        loss = forward()
    del loss
    return sum(event.self_cpu_memory_usage for event in profiler.events())


def fitting_size(
    domain: Domain, settings: Any, variant: str, device: torch.device, memory_mib: int, on_try: Callable[[str], object]
) -> dict[str, Any]:
    """The largest size with which the process of a training stays within a limit.

    Args:
        domain: with a size.
        settings: of the recipe; the size is replaced.
        variant: what the training keeps.
        device: to train on.
        memory_mib: the limit.
        on_try: called with a line for each try.

    Returns:
        `size`; `peak_mib` at that size; `least_mib`, the peak at the smallest size, if none fits.
    """
    size = domain.size
    assert size is not None
    peaks: dict[int, dict[str, Any]] = {}

    def fits(count: int) -> bool:
        value = count * size.multiple
        case = case_of(domain, size.of(settings, value), variant, device)
        found = replace(case, steps=2, limit_mib=memory_mib).run()
        peaks[count] = found
        taken = f"{found['peak_mib']:.0f} MiB" if "peak_mib" in found else found["error"]
        does = found.get("peak_mib", float("inf")) <= memory_mib
        on_try(f"{variant}, {size.field} {value}: {taken}, {'fits' if does else 'does not fit'}")
        return does

    count = largest(fits, max(1, size.start // size.multiple), size.most // size.multiple)
    if count:
        return {"size": count * size.multiple, "peak_mib": peaks[count]["peak_mib"]}
    least = replace(case_of(domain, size.of(settings, size.multiple), variant, device), steps=2).run()
    if "error" in least:
        raise RecipeError(f"{variant}, {option(size.field)} {size.multiple}: {least['error']}")
    if least["peak_mib"] <= memory_mib:
        return {"size": size.multiple, "peak_mib": least["peak_mib"]}
    return {"size": 0, "least_mib": least["peak_mib"]}


def too_little(size: Size, memory_mib: int, least: dict[str, float]) -> str:
    """Says what would fit where nothing does.

    Args:
        size: that was searched.
        memory_mib: the limit.
        least: peaks of the smallest size, by variant.
    """
    needed = ", ".join(f"{variant} {peak:.0f} MiB" for variant, peak in least.items())
    return (
        f"--memory {memory_mib}MiB is not possible: the smallest size, {option(size.field)} {size.multiple}, takes "
        f"{needed}; use --memory {int(min(least.values())) + 1}MiB or more"
    )


def _guard(limit_mib: int, device: torch.device) -> None:
    """Ends the process before one that is far above the limit takes the memory of the machine.

    On the CPU a thread watches the peak, prints it once it has crossed the limit, as `main` does, and ends the process.
    Limits of the system (`RLIMIT_DATA`) count memory that the heap has returned, too, and forbid steps that fit.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, 1.5 * limit_mib * MIB / total), device)
        return

    def watch() -> None:
        while (peak := _status_mib("VmHWM")) <= limit_mib:
            time.sleep(_INTERVAL)
        _finish({"peak_mib": peak})

    threading.Thread(target=watch, daemon=True).start()


def _resident(device: torch.device) -> float:
    return torch.cuda.memory_allocated(device) / MIB if device.type == "cuda" else _status_mib("VmRSS")


def _status_mib(name: str) -> float:
    """A field of /proc/self/status."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name + ":"))


def _clocks(device: torch.device) -> tuple[float, float]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter(), time.process_time()


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains the case of the command line, and prints."""
    (words,) = sys.argv[1:] if arguments is None else arguments
    case = Case(**json.loads(words))
    found = measure(case)
    if case.variant == PLAIN and "brevact" in sys.modules:
        raise RuntimeError(f"{case.module} imports brevact, without which plain training is measured")
    _finish(found)


def _finish(found: dict[str, Any]) -> None:
    """Prints what was measured, and ends the process at once: workers of libraries may take their time."""
    print(json.dumps({name: round(value, 4) for name, value in found.items()}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
