"""What the mechanism costs by itself: a training step whose activations are kept as they are, through all of it.

    python -m benchmarks.overhead

The model is a residual network of six basic blocks (32, 64 and 128 channels), batch 64, 32x32 images. Regions, hooks,
Functions and sharing run as always, with a quantizer that stores the tensor itself: its codes are the tensor's own
memory, and decoding hands that memory back, so that no element is read or written. What is left beside the mechanism
are the masks of ReLU, which are packed whatever the quantizer. The steps alternate in one process; each ratio is the
median of the ratios to the plain step of the same round. On a shared machine such a ratio varies by more than the
mechanism costs; what it costs does not depend on the sizes, so that the last line gives it from steps on two images of
8x8, where it is half of the time: the median difference to the plain step, also as a share of the large plain step.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import brevact
from benchmarks.records import write_rows
from benchmarks.training_step import loss_of, step_times
from brevact.quantizers import Layout, PackedActivation, PackedSpec, Part
from recipes.models.resnet import BasicBlock

STAGES = ((2, 32), (2, 64), (2, 128))
"""Blocks and channels of each stage."""


@dataclass(frozen=True)
class Identity:
    """Stores a tensor's own memory. For tensors that nothing overwrites: no copy is made."""

    is_stochastic = False

    def quantize(self, x: Tensor, seed: int | Tensor | None = None) -> PackedActivation:
        """Take the memory of `x`, which must be contiguous."""
        return PackedActivation(PackedSpec.of(self, Layout.of(x)), x.view(-1).view(torch.uint8))

    def parts(self, layout: Layout) -> tuple[Part, ...]:
        """The elements."""
        return (Part("codes", layout.dtype, int(layout.numel)),)

    def decode(self, buffer: Tensor, spec: PackedSpec[Identity], target: Tensor) -> None:
        """Let `target` be the stored memory."""
        target.set_(buffer.view(target.dtype).view(target.shape))

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


def variants(model: nn.Module) -> dict[str, nn.Module]:
    """The model as it is, with the identity for a quantizer, and with 2 bits for comparison."""
    identity = brevact.BackwardSettings(Identity())
    return {
        "plain": model,
        "identity": brevact.quantize_backward(copy.deepcopy(model), identity),
        "StochBackward2bit": brevact.quantize_backward(copy.deepcopy(model), brevact.StochBackward2bit),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--csv", help="append the rows to this file")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    images, labels = torch.randn(args.batch_size, 3, 32, 32), torch.randint(0, 10, (args.batch_size,))
    models = variants(resnet())

    def step(name: str) -> None:
        models[name].zero_grad()
        loss_of(models[name], images, labels).backward()

    times = step_times({name: lambda name=name: step(name) for name in models}, args.rounds)
    rows = [
        {
            "model": "ResNet of 6 blocks",
            "batch_size": args.batch_size,
            "stored": name,
            "kept_mib": round(brevact.memory_report(model, images).saved_bytes / 2**20, 2),
            "step_s": round(statistics.median(times[name]), 4),
            "step_ratio": round(statistics.median(a / b for a, b in zip(times[name], times["plain"], strict=True)), 3),
        }
        for name, model in models.items()
    ]
    write_rows(rows, args.csv)
    extra = fixed_cost(models, args.rounds)
    share = extra / statistics.median(times["plain"])
    print(f"mechanism, from steps on two images of 8x8: {1e3 * extra:.1f} ms, {share:.3f} of the plain step above")


def fixed_cost(models: dict[str, nn.Module], rounds: int) -> float:
    """Seconds that a step with the identity takes beyond a plain one, on inputs so small that no kernel counts."""
    images, labels = torch.randn(2, 3, 8, 8), torch.randint(0, 10, (2,))
    whole = brevact.BackwardSettings(Identity(), min_numel=0)
    small = {"plain": models["plain"], "identity": brevact.quantize_backward(copy.deepcopy(models["plain"]), whole)}

    def step(name: str) -> None:
        small[name].zero_grad()
        loss_of(small[name], images, labels).backward()

    times = step_times({name: lambda name=name: step(name) for name in small}, 5 * rounds)
    return statistics.median(a - b for a, b in zip(times["identity"], times["plain"], strict=True))


if __name__ == "__main__":
    main()
