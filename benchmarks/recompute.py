"""What computing layers again saves and costs: kept bytes, the peak of a step, its time and the error of gradients.

    python -m benchmarks.recompute --csv benchmarks/results/recompute.csv

One model after the other takes steps at full precision, in turns with those of each policy (`brevact.step_report`); the
peak is of what PyTorch allocates in a step, above its start. The error is that of the gradient of all weights, over its
norm, by the root mean square of some draws; noise in units of minibatch noise is `benchmarks.noise`'s. Checkpoints are
those of each block, at full precision.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import brevact
from benchmarks.records import write_rows
from brevact.reports.gradient_passes import gradients
from recipes.models.efficientnetv2 import efficientnetv2
from recipes.models.gpt import GPT, GPT_SIZES
from recipes.models.resnet import resnet50
from recipes.models.vit import VIT_SIZES, ViT

#: The order of rows; the names are what `brevact.parse_policy` reads.
POLICIES = ("DEFAULT", "DitherBackward6bit:recompute=128", "RECOMPUTE", "DitherBackward8bit:recompute=1024")
CHECKPOINT = "checkpoint of each block"
Batch = tuple[Tensor, Tensor]


class _Checkpointed(nn.Module):
    """A module whose forward is a checkpoint."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        """Run it."""
        return checkpoint(self.inner, *args, use_reentrant=False)


def with_checkpoints(model: nn.Module) -> nn.Module:
    """The model, whose blocks are checkpoints now.

    Args:
        model: a module in it is named `blocks`, and holds them.
    """
    blocks = next(module for name, module in model.named_modules() if name.rpartition(".")[2] == "blocks")
    for name, block in list(blocks.named_children()):
        setattr(blocks, name, _Checkpointed(block))
    return model


def _of_images(make: Callable[[], nn.Module], size: int, batch: int) -> tuple[nn.Module, Batch]:
    return make(), (torch.randn(batch, 3, size, size), torch.randint(10, (batch,)))


def _language_model(size: str, vocabulary: int, batch: int, length: int) -> tuple[nn.Module, Batch]:
    tokens = torch.randint(vocabulary, (batch, length + 1))
    return GPT(GPT_SIZES[size], vocabulary=vocabulary, context=length), (tokens[:, :-1], tokens[:, 1:])


def _efficientnet(name: str) -> nn.Module:
    return efficientnetv2(name, image_size=32, classes=10)


def _vit() -> nn.Module:
    return ViT(VIT_SIZES["small"], classes=10, image_size=64, patch_size=8)


#: Each with a batch.
MODELS: dict[str, Callable[[], tuple[nn.Module, Batch]]] = {
    "EfficientNetV2-S, 16 images": lambda: _of_images(lambda: _efficientnet("s"), 32, 16),
    "EfficientNetV2 nano, 64 images": lambda: _of_images(lambda: _efficientnet("nano"), 32, 64),
    "ResNet-50, 16 images": lambda: _of_images(lambda: resnet50(classes=10, image_size=64), 64, 16),
    "ViT-S, 16 images": lambda: _of_images(_vit, 64, 16),
    "GPT-2 small, 4 x 256 tokens": lambda: _language_model("gpt2", 50257, 4, 256),
}
#: In place of these, where nothing but the code is tried.
TINY = {"GPT nano": lambda: _language_model("nano", 128, 2, 64)}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The cross-entropy of what a model returns for each target.

    Args:
        model: of `MODELS`.
        batch: inputs and targets.
    """
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def measure(name: str, model: nn.Module, batch: Batch, policy: str, rounds: int, draws: int) -> dict[str, Any]:
    """A row for a policy, or for checkpoints.

    Args:
        name: of the model.
        model: at full precision; it stays so.
        batch: what it trains on.
        policy: words that `brevact.parse_policy` reads, or `CHECKPOINT`.
        rounds: pairs of steps.
        draws: of the random rounding, for the error.
    """
    ours = copy.deepcopy(model)
    if policy == CHECKPOINT:
        return {"model": name, "policy": policy, **_of_checkpoints(model, with_checkpoints(ours), batch, rounds)}
    brevact.quantize_backward(ours, policy)
    step = brevact.step_report(ours, batch, loss_of, rounds=rounds)
    memory = brevact.memory_report(ours, batch, loss_of)
    exact = _gradient(model, batch, 0, packs=False)
    errors = [(_gradient(ours, batch, draw, packs=True) - exact).norm() / exact.norm() for draw in range(draws)]
    return {
        **{"model": name, "policy": policy, "plain_bytes": memory.plain_bytes, "saved_bytes": memory.saved_bytes},
        **{"ratio": f"{memory.ratio:.1f}", "plain_peak": step.plain_peak, "peak": step.packed_peak},
        **{"step": f"{step.time_ratio:.3f}", "error": f"{torch.stack(errors).square().mean().sqrt():.2e}"},
    }


def _of_checkpoints(plain: nn.Module, ours: nn.Module, batch: Batch, rounds: int) -> dict[str, Any]:
    exactly = brevact.Policy({"": None})
    seconds: list[tuple[float, float]] = []
    peaks = [0, 0]
    for _ in range(rounds):
        reports = [
            brevact.step_report(brevact.quantize_backward(copy.deepcopy(each), exactly), batch, loss_of, rounds=2)
            for each in (plain, ours)
        ]
        peaks = [report.packed_peak for report in reports]
        seconds.append((statistics.median(reports[0].packed_seconds), statistics.median(reports[1].packed_seconds)))
    memory = brevact.memory_report(brevact.quantize_backward(ours, exactly), batch, loss_of)
    plain_bytes = brevact.memory_report(
        brevact.quantize_backward(copy.deepcopy(plain), exactly), batch, loss_of
    ).plain_bytes
    step = statistics.median(b / a for a, b in seconds)
    return {
        **{"plain_bytes": plain_bytes, "saved_bytes": memory.saved_bytes},
        **{"ratio": f"{plain_bytes / memory.saved_bytes:.1f}", "plain_peak": peaks[0], "peak": peaks[1]},
        **{"step": f"{step:.3f}", "error": "0"},
    }


def _gradient(model: nn.Module, batch: Batch, draw: int, *, packs: bool) -> Tensor:
    """The gradient of all weights, in one vector; of the model's own random numbers there is one draw."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        with brevact.backward_quant(model) if packs else nullcontext():
            return loss_of(model, batch)

    return torch.cat([each.flatten() for each in gradients(model, batch, loss, 0, draw)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark.

    Args:
        arguments: of the command line; None for those of the process.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *TINY], default=list(MODELS), metavar="MODEL")
    parser.add_argument("--policies", nargs="+", default=[CHECKPOINT, *POLICIES])
    parser.add_argument("--rounds", type=int, default=5, help="pairs of steps (default: 5)")
    parser.add_argument("--draws", type=int, default=3, help="of random rounding (default: 3)")
    parser.add_argument("--csv", help="file that rows are appended to")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in tqdm(options.models, desc="models"):
        torch.manual_seed(0)
        model, batch = {**MODELS, **TINY}[name]()
        model.train()
        rows = [measure(name, model, batch, each, options.rounds, options.draws) for each in options.policies]
        write_rows(rows, options.csv)


if __name__ == "__main__":
    main()
