"""The table and the picture of a recipe."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes import plots
from recipes.domains.domain import Domain
from recipes.domains.variants import PLAIN

TABLE, CURVES = "table.csv", "curves.png"
COLUMNS = ("recipe", "variant", "kept_mib", "kept_less", "seeds", "value", "value_se", "difference", "difference_se")

Row = Mapping[str, Any]


def table_rows(domain: Domain, variants: Sequence[str], runs: Sequence[Row]) -> list[dict[str, Any]]:
    """A row per variant: bytes kept for backward, and the metric over the seeds.

    `difference` is from plain training of the same seed, `_se` a standard error of a mean.
    """
    by_variant = {name: {int(row["seed"]): row for row in runs if row["variant"] == name} for name in variants}
    plain, rows = by_variant[PLAIN], []
    for variant, own in by_variant.items():
        kept, of_plain = (statistics.median(float(row["kept_mib"]) for row in each.values()) for each in (own, plain))
        row = {"recipe": domain.name, "variant": variant, "kept_mib": kept, "kept_less": of_plain / kept}
        values = {seed: float(each["value"]) for seed, each in own.items()}
        row["seeds"], (row["value"], row["value_se"]) = len(values), _mean_and_error(list(values.values()))
        differences = [value - float(plain[seed]["value"]) for seed, value in values.items()]
        row["difference"], row["difference_se"] = ("", "") if variant == PLAIN else _mean_and_error(differences)
        rows.append(row)
    return rows


def _mean_and_error(values: Sequence[float]) -> tuple[float, float | str]:
    mean = statistics.mean(values)
    return mean, statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else ""


def table(domain: Domain, rows: Sequence[Row]) -> str:
    """The rows as text; ± is a standard error."""
    spec, words = domain.metric.spec, domain.metric.words
    cells = [["", "kept MiB", words, f"{words} - plain"]]
    for row in rows:
        kept = f"{row['kept_mib']:.1f} ({row['kept_less']:.1f}x less)"
        errors = (_with_error(row, "value", spec), _with_error(row, "difference", f"+{spec}"))
        cells.append([row["variant"], kept, *errors])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in cells)


def _with_error(row: Row, column: str, spec: str) -> str:
    if row[column] == "":
        return ""
    error = row[f"{column}_se"]
    return format(row[column], spec) + (f" ± {error:{spec.lstrip('+')}}" if error != "" else "")


def draw(domain: Domain, epochs: Sequence[Row], folder: Path) -> None:
    wanted = {(row["variant"], int(row["seed"])) for row in epochs}
    curves = plots.curves_of(epochs, "variant", "value", wanted)
    plots.plot_seeds(folder / CURVES, curves, title=domain.name, ylabel=domain.metric.words)
