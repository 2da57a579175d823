"""One training run in a process of its own, which prints what it took as a line of JSON; other benchmarks start it.

    python -m benchmarks.training_case --model mlp --variant DEFAULT --batch-size 1024 --depth 12

Gradients accumulate over the steps, so they are there when the activations are at their peak, as in training that sums
the gradients of several batches. Nothing is returned to the system on purpose: the peak is `VmHWM`, which a user sees.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.workloads import MODELS, WORKLOADS

_START = time.perf_counter()
VARIANTS = ("plain", "checkpoint", "DEFAULT", "DEFAULT+checkpoint", "RECOMPUTE")
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class TrainingCase:
    """What a process trains.

    Args:
        model: key of `MODELS`.
        variant: one of `VARIANTS`.
        batch_size: images, sequences, rows or volumes.
        depth: how deep, see `MODELS`.
        steps: forward and backward passes; the last two of at least three are timed.
        limit_mib: most memory on top of what is there before the first step, in MiB; 0 for no limit. See `MemoryLimit`.
    """

    model: str
    variant: str
    batch_size: int
    depth: int
    steps: int = 2
    limit_mib: int = 0

    def run(self, environment: Mapping[str, str] | None = None, timeout: float = 600.0) -> dict[str, Any]:
        """Run it in a fresh process.

        Args:
            environment: variables to set there, such as `LD_PRELOAD`.
            timeout: seconds that it may take.

        Returns:
            What `measure` found, or `{"error": message}`.
        """
        options = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(self).items()]
        command = [sys.executable, "-W", "ignore", "-m", __spec__.name, *options]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **(environment or {})},
                cwd=Path(__file__).parent.parent,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than {timeout:.0f} s"}
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            errors = done.stderr.strip().splitlines()
            return {"error": f"exit code {done.returncode}: {errors[-1] if errors else 'no message'}"[:200]}
        return json.loads(lines[-1])


def status_mib(name: str) -> float:
    """A field of /proc/self/status (Linux), such as VmHWM, the most memory that was ever resident; MiB.

    Args:
        name: of the field.

    Returns:
        Its value.

    Raises:
        OSError: there is no such file: not Linux.
    """
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name + ":"))


def forget_peak() -> None:
    """Let VmHWM begin at what is resident now, where the kernel allows it: building a model may have taken more."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


class MemoryLimit:
    """A limit of this process's memory: by a control group of Linux, or else by RLIMIT_DATA.

    A control group counts resident pages, as the limit of a container does; the system ends a process that wants more.
    It needs a hierarchy of version 1 in which this process may make a group (root). RLIMIT_DATA counts writable private
    memory, free pages that were returned to the system included.

    Attributes:
        kind: "cgroup" or "RLIMIT_DATA".
    """

    def __init__(self) -> None:
        self.kind = "RLIMIT_DATA"
        with contextlib.suppress(OSError, StopIteration):
            lines = Path("/proc/self/cgroup").read_text().splitlines()
            path = next(line.split(":", 2)[2] for line in lines if line.split(":", 2)[1] == "memory")
            group = Path("/sys/fs/cgroup/memory") / path.lstrip("/")
            for old in group.glob("brevact-*"):
                with contextlib.suppress(OSError):
                    old.rmdir()  # of a process that has ended
            self._group = group / f"brevact-{os.getpid()}"
            self._group.mkdir()
            (self._group / "cgroup.procs").write_text(str(os.getpid()))
            self.kind = "cgroup"

    def set(self, mib: int) -> None:
        """Let this process take so many MiB on top of what it has now."""
        if self.kind == "cgroup":
            statistics = (self._group / "memory.stat").read_text().split()
            taken = sum(int(statistics[statistics.index(name) + 1]) for name in ("total_rss", "total_shmem"))
            (self._group / "memory.limit_in_bytes").write_text(str(taken + mib * _MIB))
        else:
            limit = int((status_mib("VmData") + mib) * _MIB)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def measure(case: TrainingCase) -> dict[str, Any]:
    """Train in this process.

    Args:
        case: what to train.

    Returns:
        `base_mib`, resident when the model is there; `loaded_mib`, once optimizer and compiled kernels are, too;
        `peak_mib`; `kept_mib`, bytes of tensors that a forward pass leaves; `cpu_s`, processor time of a step, all
        threads; `step_s`; `page_faults` of a step; `first_step_s`, from before the import of torch until the first step
        has ended; `limited_by`, the kind of the limit.
    """
    limit = MemoryLimit() if case.limit_mib else None
    import torch

    packed = case.variant not in ("plain", "checkpoint")
    if packed:
        import brevact
    torch.manual_seed(0)
    model, loss = workload(case)
    base = status_mib("VmRSS")
    if packed:
        brevact.quantizer(brevact.StochBackward4bit).quantize(torch.zeros(4096)).dequantize()
        brevact.quantize_backward(model, _policy(case.variant))
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], lr=1e-3)
    forget_peak()
    loaded = status_mib("VmRSS")
    if limit is not None:
        limit.set(case.limit_mib)
    records, first_step = [], 0.0
    for _ in range(case.steps):
        before = _clocks()
        loss().backward()
        optimizer.step()
        first_step = first_step or time.perf_counter() - _START
        records.append([now - then for now, then in zip(_clocks(), before, strict=True)])
    peak = status_mib("VmHWM")
    last = records[1:][-2:] or records
    step, cpu, faults = (min(record[index] for record in last) for index in range(3))
    times = {"cpu_s": round(cpu, 3), "step_s": round(step, 3), "page_faults": faults}
    times["first_step_s"] = round(first_step, 3)
    memory = {"base_mib": base, "loaded_mib": loaded, "peak_mib": peak, "kept_mib": kept_bytes(loss) / _MIB}
    rounded = {name: round(value, 1) for name, value in memory.items()}
    return {**rounded, **times, "limited_by": limit.kind if limit is not None else ""}


def _policy(variant: str) -> Any:
    """`RECOMPUTE`, or `DEFAULT`, which packs inputs of checkpoints, too, where there are some."""
    from torch.utils.checkpoint import checkpoint

    import brevact

    if not variant.endswith("checkpoint"):
        return getattr(brevact, variant)
    return brevact.Policy({checkpoint: brevact.DitherBackward4bit, **brevact.DEFAULT.rules})


def kept_bytes(loss: Callable[[], Any]) -> int:
    """Bytes of tensors that are there after a forward pass and were not before, by torch's profiler.

    Args:
        loss: runs the forward pass and returns its result.

    Returns:
        The bytes.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = loss()
    del result
    return sum(event.self_cpu_memory_usage for event in profiler.events())


def _clocks() -> tuple[float, float, int]:
    return time.perf_counter(), time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def workload(case: TrainingCase) -> tuple[Any, Callable[[], Any]]:
    """Model and loss of one fixed batch; without backward quantization.

    Args:
        case: what to train.
    """
    return WORKLOADS[case.model](case.batch_size, case.depth, case.variant.endswith("checkpoint"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    for name, default in (("batch-size", None), ("depth", None), ("steps", 2), ("limit-mib", 0)):
        parser.add_argument(f"--{name}", type=int, default=default, required=default is None)
    print(json.dumps(measure(TrainingCase(**vars(parser.parse_args(arguments))))))


if __name__ == "__main__":
    main()
