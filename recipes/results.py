"""The table and the picture of a recipe's runs."""

import statistics
from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipes.files import write_atomically
from recipes.policies import PLAIN
from recipes.recipe import Recipe

TABLE, PICTURE = "table.csv", "comparison.png"
COLUMNS = (
    *("recipe", "variant", "kept_mib", "kept_less", "seeds", "value", "value_se", "difference", "difference_se"),
    "seconds",
)

Row = Mapping[str, Any]


def table_rows(recipe: Recipe, settings: Any, variants: Sequence[str], runs: Sequence[Row]) -> list[dict[str, Any]]:
    """A row per variant: bytes kept for backward, the metric over the seeds, and seconds of an epoch.

    `difference` is from plain training of the same seed, if there is one; `_se` is a standard error of a mean.
    """
    by_variant = {name: {int(row["seed"]): row for row in runs if row["variant"] == name} for name in variants}
    plain, rows = by_variant.get(PLAIN, {}), []
    for variant, own in by_variant.items():
        kept = _median(own, "kept_mib")
        less = (_median(plain, "kept_mib") if plain else _median(own, "plain_mib")) / kept
        row = {"recipe": recipe.name, "variant": variant, "kept_mib": kept, "kept_less": less, "seeds": len(own)}
        values = {seed: float(each["value"]) for seed, each in own.items()}
        row["value"], row["value_se"] = _mean_and_error(list(values.values()))
        differences = [value - float(plain[seed]["value"]) for seed, value in values.items() if seed in plain]
        is_pair = variant != PLAIN and differences
        row["difference"], row["difference_se"] = _mean_and_error(differences) if is_pair else ("", "")
        rows.append({**row, "seconds": _median(own, "seconds") / settings.epochs})
    return rows


def _median(rows: Mapping[int, Row], column: str) -> float:
    return statistics.median(float(row[column]) for row in rows.values())


def _mean_and_error(values: Sequence[float]) -> tuple[float, float | str]:
    mean = statistics.mean(values)
    return mean, statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else ""


def table(recipe: Recipe, rows: Sequence[Row]) -> str:
    """The rows as text; ± is a standard error."""
    spec, words = recipe.metric.spec, recipe.metric.words
    cells = [["", "kept MiB", words, f"{words} - plain", "s/epoch"]]
    for row in rows:
        kept = _kept(row, ".2f")
        errors = (_with_error(row, "value", spec), _with_error(row, "difference", f"+{spec}"))
        cells.append([row["variant"], kept, *errors, f"{row['seconds']:.1f}"])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in cells)


def _kept(row: Row, spec: str) -> str:
    return f"{row['kept_mib']:{spec}}" + ("" if row["kept_less"] == 1 else f" ({row['kept_less']:.1f}x less)")


def _with_error(row: Row, column: str, spec: str) -> str:
    if row[column] == "":
        return ""
    error = row[f"{column}_se"]
    return format(row[column], spec) + (f" ± {error:{spec.lstrip('+')}}" if error != "" else "")


def draw(recipe: Recipe, rows: Sequence[Row], epochs: Sequence[Row], folder: Path) -> None:
    """Draws the metric over the epochs, the mean over the seeds and each of them thinly, and what a step keeps."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    colors = []
    for row in rows:
        runs: dict[int, list[float]] = {}
        for epoch in epochs:
            if epoch["variant"] == row["variant"]:
                runs.setdefault(int(epoch["seed"]), []).append(float(epoch["value"]))
        means = [statistics.mean(values) for values in zip(*runs.values(), strict=True)]
        (line,) = left.plot(range(1, len(means) + 1), means, "o-", markersize=3, label=row["variant"])
        colors.append(line.get_color())
        for values in runs.values():
            left.plot(range(1, len(values) + 1), values, linewidth=0.5, alpha=0.6, color=colors[-1])
    left.set(title=recipe.name, xlabel="epoch", ylabel=recipe.metric.words)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.grid(alpha=0.3)
    left.legend()
    kept = [row["kept_mib"] for row in rows]
    bars = right.barh([row["variant"] for row in rows], kept, color=colors)
    right.bar_label(bars, [_kept(row, ".1f") for row in rows], padding=4)
    right.invert_yaxis()
    right.set(xlabel="kept for backward (MiB a batch)", xlim=(0, 1.8 * max(kept)))
    save(figure, folder / PICTURE)


def save(figure: Figure, path: Path) -> None:
    """Writes a figure as a PNG file, whole or not at all; no display is needed."""
    FigureCanvasAgg(figure)
    buffer = BytesIO()
    figure.savefig(buffer, dpi=120, format="png")
    write_atomically(path, lambda file: file.write(buffer.getvalue()))
