"""One training run in a process of its own, which prints what it took as a line of JSON; other benchmarks start it.

    python -m benchmarks.training_case --model mlp --variant DEFAULT --batch-size 1024 --depth 12

Gradients accumulate over the steps, so they are there when the activations are at their peak, as in training that sums
the gradients of several batches. Nothing is returned to the system on purpose: the peak is `VmHWM`, which a user sees.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MODELS = {"efficientnetv2-s": (64, 1), "gpt2": (4, 12), "mlp": (1024, 12)}
"""Batch size and depth: of EfficientNetV2-S the blocks of each stage, in units of the paper's."""
_START = time.perf_counter()
VARIANTS = ("plain", "checkpoint", "DEFAULT", "DEFAULT+checkpoint")
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class TrainingCase:
    """What a process trains.

    Args:
        model: key of `MODELS`.
        variant: one of `VARIANTS`.
        batch_size: images, sequences of 256 tokens, or rows.
        depth: how deep, see `MODELS`.
        steps: forward and backward passes; the last two of at least three are timed.
        limit_mib: most memory on top of what is there before the first step, in MiB, by RLIMIT_DATA; 0 for no limit.
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


def measure(case: TrainingCase) -> dict[str, Any]:
    """Train in this process.

    Args:
        case: what to train.

    Returns:
        `base_mib`, resident when the model is there; `loaded_mib`, once optimizer and compiled kernels are, too;
        `peak_mib`; `kept_mib`, bytes of tensors that a forward pass leaves; `cpu_s`, processor time of a step, all
        threads; `step_s`; `page_faults` of a step; `first_step_s`, from before the import of torch until the first step
        has ended.
    """
    import torch

    packed = case.variant.startswith("DEFAULT")
    if packed:
        import brevact
    torch.manual_seed(0)
    model, loss = workload(case)
    base = status_mib("VmRSS")
    if packed:
        brevact.quantizer(brevact.StochBackward4bit).quantize(torch.zeros(4096)).dequantize()
        brevact.quantize_backward(model, _policy(case.variant))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loaded = status_mib("VmRSS")
    if case.limit_mib:
        limit = int((status_mib("VmData") + case.limit_mib) * _MIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
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
    return {**{name: round(value, 1) for name, value in memory.items()}, **times}


def _policy(variant: str) -> Any:
    """`DEFAULT`, which packs inputs of checkpoints, too, where there are some."""
    from torch.utils.checkpoint import checkpoint

    import brevact

    if not variant.endswith("checkpoint"):
        return brevact.DEFAULT
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
    checkpointed = case.variant.endswith("checkpoint")
    build = {"efficientnetv2-s": _efficientnet, "gpt2": _gpt2, "mlp": _mlp}[case.model]
    return build(case.batch_size, case.depth, checkpointed)


def _efficientnet(batch_size: int, depth: int, checkpointed: bool) -> tuple[Any, Callable[[], Any]]:
    import dataclasses

    import torch
    from torch import nn

    if "brevact" not in sys.modules:  # which the recipes' models import, and plain training does not need
        sys.modules["brevact"] = types.ModuleType("brevact")
        sys.modules["brevact.nn"] = sys.modules["brevact"].nn = nn
    from recipes.models import FloatLayers
    from recipes.models.efficientnetv2 import SIZES, EfficientNetV2

    stages = tuple(dataclasses.replace(stage, blocks=stage.blocks * depth) for stage in SIZES["s"].stages)
    size = dataclasses.replace(SIZES["s"], stages=stages)
    model = EfficientNetV2(size, classes=10, stem_stride=1, layers=FloatLayers())
    if checkpointed:
        checkpoint_each(model.get_submodule("blocks").children())
    images, labels = torch.randn(batch_size, 3, 32, 32), torch.randint(0, 10, (batch_size,))
    return model, lambda: nn.functional.cross_entropy(model(images), labels)


def gpt2(depth: int) -> Any:
    """Hugging Face's GPT-2 of the small size, in training mode.

    Args:
        depth: layers; the small size has 12.
    """
    from recipes.torchvision_ops import declare_missing_ops

    declare_missing_ops()
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=depth)).train()


def _gpt2(batch_size: int, depth: int, checkpointed: bool) -> tuple[Any, Callable[[], Any]]:
    import torch

    model = gpt2(depth)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(0, model.config.vocab_size, (batch_size, 256))
    return model, lambda: model(tokens, labels=tokens, use_cache=False).loss


def _mlp(batch_size: int, depth: int, checkpointed: bool) -> tuple[Any, Callable[[], Any]]:
    import torch
    from torch import nn

    blocks = [
        nn.Sequential(nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(depth)
    ]
    if checkpointed:
        checkpoint_each(blocks)
    model, rows = nn.Sequential(*blocks), torch.randn(batch_size, 512, requires_grad=checkpointed)
    return model, lambda: model(rows).square().mean()


def checkpoint_each(blocks: Iterable[Any]) -> None:
    """Let each block keep its input alone and compute the rest again.

    Args:
        blocks: modules; changed in place.
    """
    from torch.utils.checkpoint import checkpoint

    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


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
