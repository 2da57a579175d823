"""What quantization does to the gradients of trained models, in units of the noise between minibatches, over bytes.

    python -m benchmarks.noise --data data --csv benchmarks/results/noise.csv --plot docs/noise.png

Models of the recipes learn for a few hundred steps at full precision. Then, with g_b the exact gradient of batch b, all
weights in one vector, h_bs the gradient of the same batch under a policy with seed s, and E the mean over seeds:

noise = mean_b E |h_bs - E h_bs|^2 / V,    bias^2 = mean_b |E h_bs - g_b|^2 / V,    V = variance of g_b over batches

each estimated without bias: sums of squares over the draws less one, and from the squared mean error the sampling
variance that is in it. Noise 1 is what halving the batch adds; both scale as 1 / batch size like V, so that neither
depends on it. Nothing but quantization is random: no dropout. Bytes are those of `brevact.memory_report`, the loss
included.

A policy is a name of brevact, with settings, and with other quantizers for parts of the model: StochBackward2bit,
StochBackward4bit:bucket_size=256, StochBackward2bit+norms=StochBackward4bit+loss=None (parts: norms, activations,
linear, attention, loss). Or one that `brevact.fit` makes on batches that are not measured: fit:24x, fit:noise=0.05, or
fit:bytes=StochBackward3bit, for the bytes of another policy; or adaptive:bytes=DEFAULT, by `brevact.Adaptive`.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter
from tqdm import tqdm

import brevact
from benchmarks.labels import place_labels
from benchmarks.records import append_rows, check_columns, estimate_text, print_table, read_rows
from benchmarks.trained_models import TASKS, data_name, learned, loss_of
from brevact.reports.gradient_noise import exact_gradients, gradient_noise
from recipes.fitted_policies import ADAPTIVE, FIT, FittedPolicy, policy_or_fit
from recipes.policy_names import NamedPolicy

Row = dict[str, Any]

_QUANTIZERS = (
    *(f"StochBackward{bits}bit" for bits in (2, 3, 4, 8)),
    *(f"DitherBackward{bits}bit" for bits in (2, 3, 4, 5, 6, 8)),
    "NearestBackward2bit",
    "NearestBackward4bit",
)
POLICIES = (*_QUANTIZERS, "StochBackward2bit4bitMix", "L4Backward", "StochL4Backward", "CONV_NET", "TRANSFORMER")
POLICIES += ("DEFAULT", "fit:bytes=DEFAULT", "adaptive:bytes=DEFAULT", "fit:noise=0.05")
POLICIES += tuple(f"fit:bytes=DitherBackward{bits}bit" for bits in (2, 3, 4, 5, 6))
COLUMNS = (
    *("model", "data", "policy", "noise", "noise_se", "bias2", "bias2_se", "saved_bytes", "plain_bytes", "ratio"),
    *("batch_size", "batches", "draws", "unit_batches", "loss"),
)

#: Policies that a line of the picture joins.
_LINES = (
    (r"StochBackward\dbit", "best of one width, stochastic", {"color": "C0", "linestyle": ":"}),
    (r"DitherBackward\dbit", "best of one width, dithered", {"color": "C1", "linestyle": ":"}),
    (rf"{FIT}.*", "brevact.fit", {"color": "C2"}),
    (rf"{ADAPTIVE}.*", "brevact.Adaptive", {"color": "C4"}),
)
#: Batches on which policies are fitted.
_OF_FIT = 12


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=TASKS, default=list(TASKS), metavar="MODEL", help=", ".join(TASKS)
    )
    parser.add_argument("--policies", nargs="+", type=policy_or_fit, default=None, help=", ".join(POLICIES))
    parser.add_argument("--data", type=Path, help="folder that holds CIFAR-10; without it, scikit-learn's digits")
    parser.add_argument("--batches", type=int, default=6, help="that policies are measured on (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=4, help="seeds a batch (default: %(default)s)")
    parser.add_argument("--unit-batches", type=int, default=32, help="for the unit V (default: %(default)s)")
    parser.add_argument("--cache", type=Path, help="folder that keeps trained weights for a next run")
    parser.add_argument("--csv", help="append the rows to this file; plot and page then show all that it has")
    parser.add_argument("--plot", type=Path, help="draw noise over bytes into this file")
    parser.add_argument("--quick", action="store_true", help="a minute: one epoch on less data, few batches and draws")
    options = parser.parse_args(arguments)
    if options.quick:
        options.batches, options.draws, options.unit_batches = 2, 2, 8
    for name, least in (("batches", 2), ("draws", 2), ("unit_batches", max(3, options.batches))):
        if (value := getattr(options, name)) < least:
            parser.error(f"--{name.replace('_', '-')} {value} is not possible: use at least {least}")
    policies = options.policies or [policy_or_fit(name) for name in POLICIES]
    if any(isinstance(policy, FittedPolicy) for policy in policies) and options.unit_batches < options.batches + 2:
        parser.error(f"--unit-batches {options.unit_batches} leaves fewer than 2 batches to fit on: use more")
    if options.csv:
        check_columns(options.csv, COLUMNS)
    rows = []
    for name in options.models:
        for row in measure_model(name, policies, options):
            rows.append(row)
            if options.csv:
                append_rows([row], options.csv)
    print_table([readable(row) for row in rows])
    if options.csv:
        rows = latest(read_rows(options.csv))
    if options.plot:
        plot(rows).savefig(options.plot, dpi=120)


def measure_model(
    name: str, policies: Sequence[NamedPolicy | FittedPolicy], options: argparse.Namespace
) -> Iterator[Row]:
    """Train a model, or take its weights from the cache, and measure policies on it.

    Args:
        name: key of `TASKS`.
        policies: to measure.
        options: of the command line.

    Yields:
        One row a policy, with the keys `COLUMNS`.
    """
    model, later_batches, settings = learned(name, options.data, options.cache, is_quick=options.quick)
    batches = list(itertools.islice(later_batches, options.unit_batches))
    total = 1 + options.unit_batches + len(policies) * options.batches * options.draws
    with tqdm(total=total, desc=name, unit="gradient") as bar:
        exact = exact_gradients(model, batches, loss_of, bar.update)
        others, batches = batches[options.batches :][:_OF_FIT], batches[: options.batches]
        with torch.no_grad():
            loss = sum(float(model(**batch)) for batch in batches) / len(batches)
        for words in policies:
            policy = words.named(model, others, loss_of) if isinstance(words, FittedPolicy) else words
            changed = policy.apply(copy.deepcopy(model))
            noise, bias2 = gradient_noise(changed, batches, loss_of, exact, options.draws, bar.update)
            report = brevact.memory_report(changed, batches[0])
            kept = report.plain_bytes if policy.source is None else report.saved_bytes
            yield {
                "model": name,
                "data": data_name(settings),
                "policy": policy.name,
                "noise": f"{noise.value:.4g}",
                "noise_se": f"{noise.error:.2g}",
                "bias2": f"{bias2.value:.4g}",
                "bias2_se": f"{bias2.error:.2g}",
                "saved_bytes": kept,
                "plain_bytes": report.plain_bytes,
                "ratio": f"{report.plain_bytes / kept:.2f}",
                "batch_size": settings.batch_size,
                "batches": options.batches,
                "draws": options.draws,
                "unit_batches": options.unit_batches,
                "loss": f"{loss:.4f}",
            }


def latest(rows: Sequence[Row]) -> list[Row]:
    """The last row of each model and policy, models together."""
    found = {(row["model"], row["policy"]): row for row in rows}
    models = list(dict.fromkeys(model for model, _ in found))
    return sorted(found.values(), key=lambda row: models.index(row["model"]))


def readable(row: Row) -> dict[str, str]:
    """A row of the table that people read."""
    return {
        "model": row["model"],
        "policy": row["policy"],
        "noise": estimate_text(row["noise"], row["noise_se"]),
        "bias²": estimate_text(row["bias2"], row["bias2_se"]),
        "kept": f"{int(row['saved_bytes']) / 2**20:.2f} MiB",
        "times less": row["ratio"],
    }


def plot(rows: Sequence[Row]) -> Figure:
    """Noise, and bias^2 where it is larger, over bytes: a panel a model, a point a policy.

    Args:
        rows: of `measure_model`.

    Returns:
        The figure. What is 0 has no place on its axes and is left out.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(10, 4.6 * math.ceil(len(models) / 2)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(math.ceil(len(models) / 2), 2, squeeze=False).flatten()
    for panel in panels[len(models) :]:
        panel.remove()
    for panel, model in zip(panels, models, strict=False):
        labels = []
        for row in (row for row in rows if row["model"] == model):
            noise, bias2, mib = float(row["noise"]), float(row["bias2"]), int(row["saved_bytes"]) / 2**20
            mostly_noise = noise >= bias2
            figure_of, error = (noise, row["noise_se"]) if mostly_noise else (bias2, row["bias2_se"])
            if figure_of <= 0:
                continue
            style = {"color": "C0"} if mostly_noise else {"color": "C3", "markerfacecolor": "none"}
            if row["policy"].startswith(FIT):
                style = {"color": "C2", "zorder": 3}
            panel.errorbar(mib, figure_of, float(error), fmt="o", markersize=5, capsize=2, **style)
            if not row["policy"].startswith(FIT):
                labels.append((row["policy"].replace("Backward", ""), mib, figure_of))
        for begin, label, style in _LINES:
            points = _worth_it([row for row in rows if row["model"] == model and re.fullmatch(begin, row["policy"])])
            if len(points) > 1:
                panel.plot(*zip(*points, strict=True), label=label, linewidth=1, **style)
                panel.legend(fontsize=8)
        panel.set(title=model, xlabel="kept for backward (MiB a batch)", xscale="log", yscale="log")
        panel.margins(x=0.15)
        panel.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 3, 5, 7)))
        panel.xaxis.set_major_formatter(ScalarFormatter())
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_ylabel("noise (hollow: bias²), in minibatch noise")
        panel.grid(alpha=0.3, which="both")
        place_labels(panel, labels)
    return figure


def _worth_it(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """MiB and noise of the policies that have less noise than all that store less."""
    found: list[tuple[float, float]] = []
    for size, noise in sorted((int(row["saved_bytes"]) / 2**20, float(row["noise"])) for row in rows):
        if noise > 0 and (not found or noise < found[-1][1]):
            found.append((size, noise))
    return found


if __name__ == "__main__":
    main()
