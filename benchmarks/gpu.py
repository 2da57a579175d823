"""The bench and the kernels on a GPU: full sizes in bfloat16 autocast, eager and captured as a CUDA graph.

    python -m benchmarks.gpu --csv docs/bench.csv --kernels docs/quantizers.csv
    python -m benchmarks.gpu --models "ResNet-50, GPU" --policies plain DEFAULT DEFAULT+captured

Rows are those of `python -m benchmarks`: kept bytes are the memory allocated before backward above that at the start,
the peak is the most that a step allocates above its start, and times are ratios of pairs of synchronized steps.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import brevact
from benchmarks import measure, quantizers
from benchmarks.__main__ import FIGURES
from benchmarks.large_models import gpt2, images, volumes
from benchmarks.measure import MIB, PLAIN, Row
from benchmarks.qat_nets import qat_step, resnet18
from benchmarks.records import append_rows, print_table
from benchmarks.step import Step

MODELS: dict[str, Callable[[], Step]] = {
    "ResNet-50, GPU": partial(images, "resnet50", 128, 224),
    "EfficientNetV2-S, GPU": partial(images, "s", 64, 224),
    "ViT-B, GPU": partial(images, "vit_base_patch16_224", 64, 224),
    "GPT-2 small, GPU": partial(gpt2, 8, 1024),
    "3-D U-Net, GPU": partial(volumes, 32, 2, 96),
    "ResNet-18 W4A4, GPU": partial(qat_step, resnet18, 4, 64, 224),
}
POLICIES = (PLAIN, "checkpoint", "DEFAULT", "RECOMPUTE", "LosslessBackward", "plain+captured", "DEFAULT+captured")
CAPTURED = "+captured"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), metavar="POLICY")
    parser.add_argument("--rounds", type=int, default=9, help="pairs of steps (default: %(default)s)")
    parser.add_argument("--csv", help="append the rows to this file")
    parser.add_argument("--kernels", help="time the kernels, too, and append their rows to this file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA or ROCm device, and PyTorch finds none; python -m benchmarks runs anywhere")
    failed = 0
    for name in options.models:
        plain = _on_gpu(MODELS[name]())
        plain_kept = _kept_bytes(plain)
        for policy in options.policies:
            try:
                row = _row(MODELS[name], policy, plain, plain_kept, options.rounds)
            except Exception as error:
                failed += 1
                print(f"{name}, {policy}: {measure.line_of(error)}", file=sys.stderr, flush=True)
                continue
            rows = [{"model": name, "policy": policy, **dict.fromkeys(FIGURES, ""), **row}]
            print_table(rows)
            if options.csv:
                append_rows(rows, options.csv, "cuda")
            torch.cuda.empty_cache()
    if options.kernels:
        quantizers.main(["--device", "cuda", "--numel", str(1 << 28), "--csv", options.kernels])
    return int(failed > 0)


def _on_gpu(step: Step) -> Step:
    """The step on the GPU, under autocast."""
    loss = step.loss

    def in_autocast(model: nn.Module, batch: object) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return loss(model, batch)

    batch = tree_map_only(Tensor, Tensor.cuda, step.batch)
    return Step(step.model.cuda().train(), batch, in_autocast)


def _row(make: Callable[[], Step], policy: str, plain: Step, plain_kept: int, rounds: int) -> Row:
    step = measure.with_policy(_on_gpu(make()), policy.removesuffix(CAPTURED))
    if policy.endswith(CAPTURED):
        return measure.time_ratios(plain, step, rounds, _captured(step))
    kept = _kept_bytes(step)
    peak = measure.peak_of(lambda: measure.run(step), torch.device("cuda"))
    bytes_of = {
        "kept_mib": f"{kept / MIB:.1f}",
        "kept_less": f"{plain_kept / kept:.2f}",
        "peak_mib": f"{peak / MIB:.1f}",
    }
    return {**bytes_of, **measure.time_ratios(plain, step, rounds)}


def _kept_bytes(step: Step) -> int:
    """Memory that a forward pass with its loss leaves allocated."""
    measure.run(step)
    before = torch.cuda.memory_allocated()
    loss = step.loss(step.model, step.batch)
    found = torch.cuda.memory_allocated() - before
    loss.backward()
    step.model.zero_grad(set_to_none=True)
    return max(found, 1)


def _captured(step: Step) -> Callable[[], None]:
    """Return the step as a graph, captured already."""
    run = brevact.captured(partial(measure.run, step))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # it says why a step is none
        for _ in range(4):
            run()
    return run


if __name__ == "__main__":
    sys.exit(main())
