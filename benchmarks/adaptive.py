"""What widths by sensitivity are worth: noise of gradients over bytes, at one mean width, by who has the bits.

    python -m benchmarks.adaptive --data data --csv benchmarks/results/adaptive.csv --plot docs/adaptive.png

The ablation of ActNN (arXiv:2104.14129, figure 5): the variance that packing adds to the gradients of a trained ResNet,
in units of the variance between minibatches, at the same bytes (as in `benchmarks.noise`):

fixed: all layers and samples at one width, ActNN's L2.
samples: the samples of a layer share bits by their ranges, ActNN's L2.5.
layers: `brevact.Adaptive(bit_width=...)`, by measured sensitivities.
layers and samples: the same with `samples=`, ActNN's L3. Gradients of samples are those of the same weights, where
training remembers those of an epoch before: what it is worth at most.

Widths between integers have no fixed counterpart. "own" are tensors that each layer stores for itself in buckets of
256, as ActNN does (`brevact.actnn_level`); "chains" are what brevact stores by default.
"""

from __future__ import annotations

import argparse
import copy
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

import brevact
from benchmarks.records import append_rows, check_columns, print_table, read_rows
from benchmarks.trained_models import TASKS, Learner, LossOf, data_name, settings_of
from brevact.reports.gradient_noise import ExactGradients, exact_gradients, gradient_noise
from brevact.reports.memory import memory_of

Row = dict[str, Any]

STRATEGIES = ("fixed", "samples", "layers", "layers and samples")
STORED = {"own": {"bucket_size": 256, "derive_min_bits": 0}, "chains": {}}
#: Names of both in the picture, as in the table of the page.
WORDS = {"own": "a tensor a layer", "fixed": "one width", "samples": "by samples' ranges", "layers": "by layers"}
WORDS["layers and samples"] = "by layers and samples"
COLUMNS = (
    *("model", "data", "stored", "strategy", "bit_width", "noise", "noise_se", "bias2", "bias2_se", "saved_bytes"),
    *("plain_bytes", "batch_size", "batches", "draws", "unit_batches"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=TASKS, default="ResNet-20", metavar="MODEL", help=", ".join(TASKS))
    parser.add_argument("--widths", nargs="+", type=float, default=[1, 1.5, 2, 3], help="mean bits a code")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--stored", nargs="+", choices=STORED, default=list(STORED))
    parser.add_argument("--data", type=Path, help="folder that holds CIFAR-10; without it, scikit-learn's digits")
    parser.add_argument("--cache", type=Path, help="folder that keeps trained weights for a next run")
    parser.add_argument("--batches", type=int, default=4, help="that are measured (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=3, help="seeds a batch (default: %(default)s)")
    parser.add_argument("--unit-batches", type=int, default=32, help="for the unit (default: %(default)s)")
    parser.add_argument("--csv", help="append the rows to this file; the plot then shows all that it has")
    parser.add_argument("--plot", type=Path, help="draw noise over mean bits into this file")
    parser.add_argument("--train-size", type=int, help="fewer training samples, to try it")
    options = parser.parse_args(arguments)
    if options.csv:
        check_columns(options.csv, COLUMNS)
    rows = []
    for row in measure(options):
        rows.append(row)
        if options.csv:
            append_rows([row], options.csv)
    print_table(rows)
    if options.plot:
        plot(read_rows(options.csv) if options.csv else rows, options.model).savefig(options.plot, dpi=120)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """Train a model, or take its weights from the cache, and measure widths on it.

    Args:
        options: of the command line.

    Yields:
        One row a strategy and width, with the keys `COLUMNS`.
    """
    changes = {"train_size": options.train_size} if options.train_size else {}
    settings = settings_of(TASKS[options.model], options.data, **changes)
    learner = Learner(TASKS[options.model], settings)
    file = None if options.cache is None else options.cache / f"{options.model}.pt".replace(" ", "-").lower()
    learner.learn(f"{options.model} learns", file)
    model = LossOf(learner.objective).train()
    batches = [
        {**batch, "first": torch.tensor(place * settings.batch_size)}
        for place, batch in enumerate(itertools.islice(learner.later_batches(), options.unit_batches))
    ]
    exact = exact_gradients(model, batches, loss_of)
    cases = list(itertools.product(options.stored, options.widths, options.strategies))
    for stored, bit_width, strategy in tqdm(cases, desc=options.model):
        if strategy == "fixed" and bit_width != int(bit_width):
            continue
        try:
            figures = measured(copy.deepcopy(model), batches, exact, stored, strategy, bit_width, options)
        except ValueError as error:  # a budget below what chains store at the least
            tqdm.write(f"{stored}, {strategy}, {bit_width:g} bits: {error}")
            continue
        yield {
            "model": options.model,
            "data": data_name(settings),
            **figures,
            "batch_size": settings.batch_size,
            "batches": options.batches,
            "draws": options.draws,
            "unit_batches": options.unit_batches,
        }


def measured(
    model: nn.Module,
    batches: Sequence[dict[str, Tensor]],
    exact: ExactGradients,
    stored: str,
    strategy: str,
    bit_width: float,
    options: argparse.Namespace,
) -> Row:
    """Noise and bytes of a trained model under a strategy.

    Args:
        model: to quantize.
        batches: exact gradients are those of; the first ones are measured, and widths are chosen on the last ones.
        exact: gradients of the batches.
        stored: key of `STORED`.
        strategy: one of `STRATEGIES`.
        bit_width: in the mean.
        options: of the command line.
    """
    leaf = brevact.StochBackward2bitPerSample if strategy == "samples" else brevact.StochBackward2bit
    own = {"bit_width": bit_width if strategy == "samples" else int(bit_width), **STORED[stored]}
    brevact.quantize_backward(model, leaf, **own)
    loss = loss_of
    if strategy.startswith("layers"):
        samples = len(batches) * len(batches[0]["targets"]) if strategy == "layers and samples" else None
        adaptive = brevact.Adaptive(model, batches[-1], loss_of, bit_width=bit_width, every=1, samples=samples)
        adaptive.step(batches[-2])
        if samples is not None:

            def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
                with adaptive.batch(torch.arange(len(batch["targets"])) + batch["first"]):
                    return loss_of(model, batch)

            for batch in batches[: options.batches]:
                loss(model, batch).backward()  # the gradients of the samples are remembered
            model.zero_grad(set_to_none=True)
    noise, bias = gradient_noise(model, batches[: options.batches], loss, exact, options.draws)
    report = memory_of(model, lambda copied: loss_of(copied, batches[0]), batches[0])
    return {
        "stored": stored,
        "strategy": strategy,
        "bit_width": f"{bit_width:g}",
        "noise": f"{noise.value:.4g}",
        "noise_se": f"{noise.error:.2g}",
        "bias2": f"{bias.value:.4g}",
        "bias2_se": f"{bias.error:.2g}",
        "saved_bytes": report.saved_bytes,
        "plain_bytes": report.plain_bytes,
    }


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """What a `LossOf` returns."""
    return model(batch["inputs"], batch["targets"])


def plot(rows: Sequence[Row], model: str) -> Figure:
    """Noise over mean bits of one model: a panel for each way to store, a line for each strategy.

    Args:
        rows: of `measure`.
        model: whose rows are shown.
    """
    rows = [row for row in rows if row["model"] == model]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(STORED), squeeze=False, sharey=True)[0]
    for panel, stored in zip(panels, STORED, strict=True):
        for strategy in STRATEGIES:
            latest = {
                float(row["bit_width"]): row for row in rows if (row["stored"], row["strategy"]) == (stored, strategy)
            }
            widths = sorted(latest)
            values, errors = ([float(latest[width][key]) for width in widths] for key in ("noise", "noise_se"))
            panel.errorbar(widths, values, errors, marker="o", markersize=4, capsize=2, label=WORDS[strategy])
        panel.set(title=f"{model}, {WORDS.get(stored, stored)}", xlabel="mean bits", yscale="log")
        panel.set_ylabel("noise, in minibatch noise")
        panel.grid(alpha=0.3, which="both")
        panel.legend()
    return figure


if __name__ == "__main__":
    main()
