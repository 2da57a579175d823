"""Recomputed layers: bytes stored, the peak and the time of a step, and the noise and bias of gradients.

    python -m benchmarks.recompute --csv benchmarks/results/recompute.csv

One model after the other takes steps at full precision, in turns with those of each way to keep less: time is that of
the processor, by the median of pairs. The peak is of what PyTorch allocates in a step, above its start. The error is
that of the gradient of all weights, over its norm, by the root mean square of some draws. Noise and squared bias are
those of `benchmarks.noise`, in units of minibatch noise, of random weights and of the mean of four batches; checkpoints
and compiled models, which round nothing, have none. Checkpoints are those of each block, at full precision; compiled is
`torch.compile` with a budget for the bytes that it keeps for backward (`activation_memory_budget`); "fit 30x" is the
policy of `brevact.fit(ratio=30, quick=True)`, without a row where there is none.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch._functorch import config as functorch_config
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

import brevact
from benchmarks.gpu.workloads import UNet3D
from benchmarks.records import write_rows
from brevact.reports.gradient_noise import Distortion, ExactGradients, exact_gradients, gradient_noise
from brevact.reports.gradient_passes import gradients
from brevact.reports.peak import peak_of
from recipes.models.efficientnetv2 import efficientnetv2
from recipes.models.gpt import GPT, GPT_SIZES
from recipes.models.resnet import resnet50
from recipes.models.vit import VIT_SIZES, ViT

#: The order of rows; the names are what `brevact.parse_policy` reads.
POLICIES = (
    *("DEFAULT", "DitherBackward6bit:recompute=128", "RECOMPUTE", "DitherBackward8bit:recompute=1024"),
    *("DitherBackward8bit:recompute=4096", "LosslessBackward:recompute=1024"),
)
CHECKPOINT = "checkpoint of each block"
MEMORY_BUDGET = 0.2
"""Of what the compiler would keep for backward: the part that it may keep."""
COMPILED = f"compiled, memory budget {MEMORY_BUDGET}"
FIT = "fit "
FITS = tuple(f"{FIT}{ratio}x" for ratio in (15, 30, 60, 80))
WAYS = (CHECKPOINT, COMPILED, *POLICIES, *FITS)
BATCHES = 4
"""Of which the variance of gradients between batches is the unit of noise."""
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


def _of_volumes(model: nn.Module, size: int, classes: int, batch: int) -> tuple[nn.Module, Batch]:
    return model, (torch.randn(batch, 1, size, size, size), torch.randint(classes, (batch, size, size, size)))


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
    "3-D U-Net, 2 x 48³": lambda: _of_volumes(UNet3D(16, 3), 48, 3, 2),
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


def measure(
    name: str, model: nn.Module, batches: Sequence[Batch], exact: ExactGradients, way: str, rounds: int, draws: int
) -> dict[str, Any] | None:
    """A row for a way to train; None where no policy meets a budget.

    Args:
        name: of the model.
        model: at full precision; it stays so.
        batches: for noise; of the first one are all other figures.
        exact: gradients of the model for these batches.
        way: `CHECKPOINT`, `COMPILED`, "fit" and a budget, or words that `brevact.parse_policy` reads.
        rounds: pairs of steps.
        draws: of the random rounding, for the error, and for the noise of each batch.
    """
    ours, loss, batch = copy.deepcopy(model), loss_of, batches[0]
    if way == CHECKPOINT:
        with_checkpoints(ours)
    elif way == COMPILED:
        loss = _compiled_loss()
    elif way.startswith(FIT):
        try:
            ratio = float(way.removeprefix(FIT)[:-1])
            found = brevact.fit(ours, [batch, _shuffled(batch)], loss_of, ratio=ratio, quick=True)
        except ValueError as error:
            print(f"{name}, {way}: {error}")
            return None
        brevact.quantize_backward(ours, found)
    else:
        brevact.quantize_backward(ours, way)
    packs = way not in (CHECKPOINT, COMPILED)
    steps = _step_of(model, batch, loss_of), _step_of(ours, batch, loss, packs=packs)
    plain_peak, peak = (peak_of(step, torch.device("cpu")) for step in steps)
    plain_bytes = _exact_report(copy.deepcopy(model), batch).plain_bytes
    saved_bytes = _saved_bytes(ours, batch, loss, way)
    if way == COMPILED:  # whose random numbers are others
        model, ours = _without_dropout(model), _without_dropout(ours)
    plain = _gradient(model, batch, 0, loss_of)
    errors = [
        (_gradient(ours, batch, draw, loss, packs=packs) - plain).norm() / plain.norm()
        for draw in range(draws if packs else 1)
    ]
    noise = gradient_noise(ours, batches, loss_of, exact, draws) if packs else None
    return {
        **{"model": name, "policy": way, "plain_bytes": plain_bytes, "saved_bytes": saved_bytes},
        **{"ratio": f"{plain_bytes / saved_bytes:.1f}", "plain_peak": plain_peak, "peak": peak},
        **{"step": f"{_time_ratio(*steps, rounds):.3f}", "error": f"{torch.stack(errors).square().mean().sqrt():.2e}"},
        **{"noise": "", "noise_se": "", "bias2": "", "bias2_se": ""},
        **({} if noise is None else _cells(noise)),
    }


def _cells(found: Distortion) -> dict[str, str]:
    return {
        **{"noise": f"{found.noise.value:.3g}", "noise_se": f"{found.noise.error:.2g}"},
        **{"bias2": f"{found.bias.value:.3g}", "bias2_se": f"{found.bias.error:.2g}"},
    }


def _shuffled(batch: Batch) -> Batch:
    """The inputs with the targets of others."""
    inputs, targets = batch
    return inputs, targets.roll(1, 0)


def _without_dropout(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for each in model.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
    return model


def _compiled_loss() -> Callable[[nn.Module, Batch], Tensor]:
    """The loss as one graph, of which the compiler keeps a part of the bytes that it would keep for backward."""
    torch.compiler.reset()

    def run(model: nn.Module, batch: Batch) -> Tensor:
        with functorch_config.patch(activation_memory_budget=MEMORY_BUDGET):
            return compiled(model, batch)

    compiled = torch.compile(loss_of, fullgraph=True)
    return run


def _step_of(
    model: nn.Module, batch: Batch, loss: Callable[[nn.Module, Batch], Tensor], *, packs: bool = False
) -> Callable[[], None]:
    def run() -> None:
        with brevact.backward_quant(model) if packs else nullcontext():
            value = loss(model, batch)
        value.backward()
        model.zero_grad(set_to_none=True)

    return run


def _time_ratio(plain: Callable[[], None], ours: Callable[[], None], rounds: int) -> float:
    """Median, over pairs of steps, of the processor time of ours over that of plain ones."""
    ratios = []
    for number in range(rounds):
        seconds = {}
        for step in (plain, ours) if number % 2 else (ours, plain):
            start = time.process_time()
            step()
            seconds[step] = time.process_time() - start
        ratios.append(seconds[ours] / seconds[plain])
    return statistics.median(ratios)


def _exact_report(model: nn.Module, batch: Batch) -> brevact.MemoryReport:
    return brevact.memory_report(brevact.quantize_backward(model, brevact.Policy({"": None})), batch, loss_of)


def _saved_bytes(model: nn.Module, batch: Batch, loss: Callable[[nn.Module, Batch], Tensor], way: str) -> int:
    """Bytes of the distinct storages that autograd keeps for backward, without weights."""
    if way == CHECKPOINT:
        return _exact_report(copy.deepcopy(model), batch).saved_bytes
    if way != COMPILED:
        return brevact.memory_report(model, batch, loss).saved_bytes
    kept: dict[int, UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        kept[storage.data_ptr()] = storage
        return x

    with saved_tensors_hooks(keep, lambda x: x):
        value = loss(model, batch)
    weights = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    found = sum(storage.nbytes() for place, storage in kept.items() if place not in weights)
    del value
    return found


def _gradient(
    model: nn.Module, batch: Batch, draw: int, loss: Callable[[nn.Module, Batch], Tensor], *, packs: bool = False
) -> Tensor:
    """The gradient of all weights, in one vector; of the model's own random numbers there is one draw."""

    def run(model: nn.Module, batch: Batch) -> Tensor:
        with brevact.backward_quant(model) if packs else nullcontext():
            return loss(model, batch)

    return torch.cat([each.flatten() for each in gradients(model, batch, run, 0, draw)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark.

    Args:
        arguments: of the command line; None for those of the process.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *TINY], default=list(MODELS), metavar="MODEL")
    parser.add_argument("--policies", nargs="+", default=list(WAYS), help=f"of {WAYS}, or texts of policies")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of steps (default: 5)")
    parser.add_argument("--draws", type=int, default=3, help="of random rounding (default: 3)")
    parser.add_argument("--csv", help="file that rows are appended to")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in tqdm(options.models, desc="models"):
        torch.manual_seed(0)
        make = {**MODELS, **TINY}[name]
        model, batch = make()
        model.train()
        batches = [batch, *(make()[1] for _ in range(BATCHES - 1))]
        exact = exact_gradients(model, batches, loss_of)
        for way in tqdm(options.policies, desc=name, leave=False):
            row = measure(name, model, batches, exact, way, options.rounds, options.draws)
            if row is not None:
                write_rows([row], options.csv)


if __name__ == "__main__":
    main()
