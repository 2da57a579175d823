"""Which layers' tensors make the gradients of trained models noisy: measured one at a time, and estimated in one pass.

    python -m benchmarks.layer_noise --data data --csv benchmarks/results/layer_noise.csv --plot docs/gradients.png

Models of the recipes learn for a few hundred steps at full precision (`benchmarks/trained_models.py`). Then
`brevact.gradient_report` measures them under a policy, the loss included. It prints how well the closed form for weight
gradients predicts what is measured.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import brevact
from benchmarks.records import append_rows, check_columns, print_table, read_rows
from benchmarks.trained_models import TASKS, data_name, learned, loss_of
from brevact.reports.gradient_table import LayerNoise
from recipes.policy_names import NamedPolicy, named_policy

Row = dict[str, Any]

_FIGURES = ("noise", "noise_error", "bias", "bias_error", "estimate", "estimate_error")
COLUMNS = (
    *("model", "data", "policy", "layer", "kind", "readers", "bit_widths", "saved_bytes", *_FIGURES),
    *("batch_size", "batches", "draws", "layer_draws", "passes"),
)
#: Layer of the row of all of them.
TOTAL = "total"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=TASKS, default=list(TASKS), metavar="MODEL", help=", ".join(TASKS)
    )
    parser.add_argument("--policy", type=named_policy, default="DEFAULT", help="(default: %(default)s)")
    parser.add_argument("--data", type=Path, help="folder that holds CIFAR-10; without it, scikit-learn's digits")
    parser.add_argument("--batches", type=int, default=6, help="(default: %(default)s)")
    parser.add_argument("--draws", type=int, default=4, help="seeds a batch for the whole (default: %(default)s)")
    parser.add_argument("--layer-draws", type=int, default=2, help="seeds a batch for a layer (default: %(default)s)")
    parser.add_argument("--cache", type=Path, help="folder that keeps trained weights for a next run")
    parser.add_argument("--csv", help="append the rows to this file; the plot then shows all that it has")
    parser.add_argument("--plot", type=Path, help="draw estimates over measured noise into this file")
    parser.add_argument("--quick", action="store_true", help="a minute: less data, few batches and draws")
    options = parser.parse_args(arguments)
    if options.quick:
        options.batches, options.draws = 2, 2
    if options.csv:
        check_columns(options.csv, COLUMNS)
    rows = []
    for name in options.models:
        found = measure_model(name, options.policy, options)
        rows += found
        if options.csv:
            append_rows(found, options.csv)
    print_table([summary(name, [row for row in rows if row["model"] == name]) for name in options.models])
    if options.plot:
        plot(read_rows(options.csv) if options.csv else rows).savefig(options.plot, dpi=120)


def measure_model(name: str, policy: NamedPolicy, options: argparse.Namespace) -> list[Row]:
    """Train a model, or take its weights from the cache, and report on its gradients.

    Args:
        name: key of `TASKS`.
        policy: to measure.
        options: of the command line.

    Returns:
        A row a layer and one for all of them, with the keys `COLUMNS`.
    """
    model, later_batches, settings = learned(name, options.data, options.cache, is_quick=options.quick)
    batches = list(itertools.islice(later_batches, options.batches))
    policy.apply(model)
    report = brevact.gradient_report(model, batches, loss_of, draws=options.draws, layer_draws=options.layer_draws)
    whole = (report.noise, report.noise_error, report.bias, report.bias_error)
    total = LayerNoise(TOTAL, "", (), (), report.saved_bytes, *whole)
    facts = {"model": name, "data": data_name(settings), "policy": policy.name}
    counts = {name: getattr(options, name) for name in ("batches", "draws", "layer_draws")}
    rows = []
    for row in (*report.rows, total):
        texts = {field: f"{value:.4g}" if isinstance(value, float) else value for field, value in vars(row).items()}
        texts |= {field: " ".join(map(str, texts[field])) for field in ("readers", "bit_widths")}
        texts["layer"] = row.layer or "(model)"
        rows.append(facts | texts | {"batch_size": settings.batch_size} | counts | {"passes": report.passes})
    return rows


def summary(name: str, rows: Sequence[Row]) -> Row:
    """How well the rows of a model add up, and how well estimates predict them.

    Args:
        name: of the model.
        rows: of `measure_model`.
    """
    layers = [row for row in rows if row["layer"] != TOTAL]
    (total,) = (row for row in rows if row["layer"] == TOTAL)
    noises = {id(row): max(0.0, float(row["noise"])) for row in layers}
    estimated = [row for row in layers if not math.isnan(float(row["estimate"]))]
    largest = sorted(layers, key=lambda row: -noises[id(row)])[: max(1, len(layers) // 4)]
    by_estimate = sorted(estimated, key=lambda row: -float(row["estimate"]))[: len(largest)]
    return {
        "model": name,
        "layers": len(layers),
        "noise": f"{float(total['noise']):.4f} ± {float(total['noise_error']):.4f}",
        "sum of layers": f"{sum(noises.values()):.4f}",
        "sum of estimates": f"{sum(float(row['estimate']) for row in estimated):.4f}",
        "in the noisiest quarter": f"{_share(largest, noises):.2f}",
        "in the quarter by estimate": f"{_share(by_estimate, noises):.2f}",
    }


def _share(rows: Sequence[Row], noises: dict[int, float]) -> float:
    return sum(noises[id(row)] for row in rows) / (sum(noises.values()) or 1.0)


def plot(rows: Sequence[Row]) -> Figure:
    """Estimates over measured noise: a panel a model, a point a layer.

    Args:
        rows: of `measure_model`; of a model that is there twice, all of them.

    Returns:
        The figure. What has no estimate, and what is not above 0, is left out.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(4 * len(models), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, model in zip(figure.subplots(1, len(models), squeeze=False)[0], models, strict=True):
        shown = [row for row in rows if row["model"] == model and row["layer"] != TOTAL]
        shown = [row for row in shown if float(row["noise"]) > 0 and float(row["estimate"]) > 0]
        points = [[float(row[name]) for row in shown] for name in _FIGURES]
        noise, noise_error, _, _, estimate, estimate_error = points
        panel.errorbar(noise, estimate, estimate_error, noise_error, "o", markersize=4, capsize=2)
        if shown:
            ends = min(noise + estimate) / 2, 2 * max(noise + estimate)
            panel.plot(ends, ends, color="C7", linewidth=1)
        panel.set(title=model, xlabel="noise of a layer, measured", xscale="log", yscale="log")
        panel.set_ylabel("estimate: weight gradients alone")
        panel.grid(alpha=0.3)
    return figure


if __name__ == "__main__":
    main()
