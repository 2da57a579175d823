"""Pictures of runs. Nothing is shown on a screen: they are drawn without a display."""

import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipes.files import write_atomically
from recipes.metrics import Metric


def plot_history(path: Path, label: str, metric: Metric, history: Sequence[dict[str, float]]) -> None:
    """Draws the metric in training and test over the epochs of one run."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    epochs = [row["epoch"] for row in history]
    for split, style, words in (("train", "o--", "training"), ("test", "o-", "test")):
        values = [metric.factor * row[f"{split}_{metric.name}"] for row in history]
        axes.plot(epochs, values, style, markersize=3, label=words)
    axes.set(title=label, xlabel="epoch", ylabel=metric.axis)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def plot_comparison(
    path: Path, title: str, metric: Metric, curves: dict[str, Sequence[float]], saved_mib: dict[str, float]
) -> None:
    """Draws the test metric over the epochs, and MiB stored for backward per batch; the first run is the base."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for label, values in curves.items():
        plotted = [metric.factor * value for value in values]
        left.plot(range(1, len(values) + 1), plotted, "o-", markersize=3, label=label)
    left.set(xlabel="epoch", ylabel=f"test {metric.axis}")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.grid(alpha=0.3)
    left.legend()
    colors = [line.get_color() for line in left.lines]
    bars = right.barh(list(saved_mib), list(saved_mib.values()), color=colors)
    first, *others = saved_mib.values()
    texts = [f"{first:.1f} MiB", *(f"{value:.1f} MiB ({first / value:.1f}x less)" for value in others)]
    right.bar_label(bars, texts, padding=4)
    right.invert_yaxis()
    right.set(xlabel="stored for backward (MiB a batch)", xlim=(0, 1.6 * max(saved_mib.values())))
    save(figure, path)


def curves_of(
    epochs: Iterable[Mapping[str, object]], by: str, column: str, wanted: Container[tuple[str, int]]
) -> dict[str, list[list[float]]]:
    """The curves of runs with several seeds."""
    curves: dict[str, dict[int, list[float]]] = {}
    for row in epochs:
        name, seed = str(row[by]), int(str(row["seed"]))
        if (name, seed) in wanted:
            curves.setdefault(name, {}).setdefault(seed, []).append(float(str(row[column])))
    return {name: list(by_seed.values()) for name, by_seed in curves.items()}


def plot_seeds(path: Path, curves: Mapping[str, Sequence[Sequence[float]]], **axes_settings: str) -> None:
    """Draws a figure over the epochs: the mean over the seeds, and each of them thinly."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for label, runs in curves.items():
        means = [statistics.mean(values) for values in zip(*runs, strict=True)]
        (line,) = axes.plot(range(1, len(means) + 1), means, "o-", markersize=3, label=label)
        for values in runs:
            axes.plot(range(1, len(values) + 1), values, linewidth=0.5, alpha=0.6, color=line.get_color())
    axes.set(xlabel="epoch", **axes_settings)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def save(figure: Figure, path: Path) -> None:
    """Writes a figure as a PNG file, whole or not at all."""
    FigureCanvasAgg(figure)
    buffer = BytesIO()
    figure.savefig(buffer, dpi=120, format="png")
    write_atomically(path, lambda file: file.write(buffer.getvalue()))
