"""The table, the rows and the pictures of a recipe."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from recipes import files, machine, plots
from recipes.domains.domain import Domain
from recipes.domains.variants import PLAIN

TABLE, CURVES, MEMORY = "table.csv", "curves.png", "memory.png"
COLUMNS = (
    *("recipe", "variant", "kept_mib", "kept_less", "peak_mib", "loaded_mib", "step_s", "step_ratio", "cpu_s"),
    *("cpu_ratio", "metric", "seeds", "value", "value_se", "difference", "difference_se"),
    *("size", "measured_at", "memory_mib", "largest", "settings", *machine.COLUMNS),
)

Row = Mapping[str, Any]


def table_rows(
    domain: Domain,
    settings: Any,
    device: torch.device,
    variants: Sequence[str],
    measured: Sequence[Row],
    runs: Sequence[Row],
    fits: Sequence[Row],
) -> list[dict[str, Any]]:
    """A row a variant, of what was measured, trained and searched; what was not stays empty.

    Args:
        domain: of the recipe.
        settings: of all.
        device: that was used.
        variants: in the order of the rows.
        measured: with `variant`, `size`, `round` and what `processes.measure` returns.
        runs: with `variant`, `seed` and `value`.
        fits: with `variant`, `memory_mib` and `size`.

    Returns:
        Rows with the keys `COLUMNS`. Times are medians over rounds; ratios are medians of ratios to plain training's in
        the same round. `difference` is from plain training of the same seed, `_se` a standard error of a mean.
    """
    words = " ".join(f"{name}={value}" for name, value in asdict(settings).items() if name != "data_dir")
    rows = []
    for variant in variants:
        row: dict[str, Any] = {**dict.fromkeys(COLUMNS, ""), "recipe": domain.name, "variant": variant}
        row |= {"size": domain.size.field if domain.size else "", "settings": words, **machine.place(device)}
        row |= _measured(_of(measured, "round", variant), _of(measured, "round", PLAIN))
        row |= _trained(_of(runs, "seed", variant), _of(runs, "seed", PLAIN), domain.metric.name)
        if found := _of(fits, "memory_mib", variant):
            (fit,) = found.values()
            row |= {"memory_mib": fit["memory_mib"], "largest": fit["size"]}
        rows.append(row)
    return rows


def _of(rows: Sequence[Row], by: str, variant: str) -> dict[int, Row]:
    """Rows of a variant by the number in a column."""
    return {int(row[by]): row for row in rows if row["variant"] == variant}


def _measured(own: Mapping[int, Row], plain: Mapping[int, Row]) -> dict[str, Any]:
    if not own:
        return {}

    def median(column: str) -> float:
        return statistics.median(float(row[column]) for row in own.values())

    found: dict[str, Any] = {"measured_at": next(iter(own.values()))["size"]}
    found |= {name: median(name) for name in ("kept_mib", "peak_mib", "loaded_mib", "step_s", "cpu_s")}
    if common := own.keys() & plain.keys():
        for name in ("step", "cpu"):
            column = f"{name}_s"
            ratios = [float(own[number][column]) / float(plain[number][column]) for number in common]
            found[f"{name}_ratio"] = statistics.median(ratios)
        kept = statistics.median(float(row["kept_mib"]) for row in plain.values())
        found["kept_less"] = kept / found["kept_mib"]
    return found


def _trained(own: Mapping[int, Row], plain: Mapping[int, Row], metric: str) -> dict[str, Any]:
    if not own:
        return {}
    values = {seed: float(row["value"]) for seed, row in own.items()}
    found: dict[str, Any] = {"metric": metric, "seeds": len(values)}
    found["value"], found["value_se"] = _mean_and_error(list(values.values()))
    differences = [value - float(plain[seed]["value"]) for seed, value in values.items() if seed in plain]
    if differences and own != plain:
        found["difference"], found["difference_se"] = _mean_and_error(differences)
    return found


def _mean_and_error(values: Sequence[float]) -> tuple[float, float | str]:
    mean = statistics.mean(values)
    return mean, statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else ""


def table(domain: Domain, rows: Sequence[Row]) -> str:
    """The rows as text; ± is a standard error."""
    metric = domain.metric
    at = next((f"{row['size']} {row['measured_at']}" for row in rows if row["measured_at"]), "")
    cells = [[at, "kept MiB", "peak MiB", "step s", metric.words, f"{metric.words} - plain"]]
    if searched := any(row["largest"] != "" for row in rows):
        memory = next(row["memory_mib"] for row in rows if row["memory_mib"] != "")
        cells[0].append(f"largest {domain.size.field} in {memory} MiB")
    for row in rows:
        line = [row["variant"]]
        line.append(_with(row["kept_mib"], ".1f", row["kept_less"], "({:.1f}x less)"))
        line.append(_with(row["peak_mib"], ".0f", "", ""))
        line.append(_with(row["step_s"], ".2f", row["step_ratio"], "({:.2f}x)"))
        line.append(_with(row["value"], metric.spec, row["value_se"], f"± {{:{metric.spec}}}"))
        line.append(_with(row["difference"], f"+{metric.spec}", row["difference_se"], f"± {{:{metric.spec}}}"))
        if searched:
            line.append(str(row["largest"]))
        cells.append(line)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    first, *others = widths
    return "\n".join(
        "  ".join([line[0].ljust(first), *(text.rjust(width) for text, width in zip(line[1:], others, strict=True))])
        for line in cells
    )


def _with(value: Any, spec: str, other: Any, template: str) -> str:
    if value == "":
        return ""
    text = format(value, spec)
    return f"{text} {template.format(other)}" if other != "" and template else text


def draw(domain: Domain, rows: Sequence[Row], epochs: Sequence[Row], folder: Path) -> None:
    """Draws the metric over the epochs, and kept bytes beside peaks, as far as they are there.

    Args:
        domain: of the recipe.
        rows: of the table.
        epochs: rows of `training.COLUMNS_OF_EPOCHS`.
        folder: receives `CURVES` and `MEMORY`.
    """
    if epochs:
        wanted = {(row["variant"], int(row["seed"])) for row in epochs}
        curves = plots.curves_of(epochs, "variant", "value", wanted)
        plots.plot_seeds(folder / CURVES, curves, title=domain.name, ylabel=domain.metric.words)
    measured = [row for row in rows if row["kept_mib"] != ""]
    if measured:
        figure = Figure(figsize=(9, 0.9 + 0.45 * len(measured)), layout="constrained")
        figure.suptitle(domain.name)
        names = [row["variant"] for row in measured]
        for axes, column, label in zip(
            figure.subplots(1, 2, sharey=True),
            ("kept_mib", "peak_mib"),
            ("kept for backward (MiB)", "peak of the process (MiB)"),
            strict=True,
        ):
            values = [row[column] for row in measured]
            bars = axes.barh(names, values, color=[f"C{number}" for number in range(len(names))])
            axes.bar_label(bars, [f"{value:.0f}" for value in values], padding=4)
            axes.set(xlabel=label, xlim=(0, 1.2 * max(values)))
        axes.invert_yaxis()
        plots.save(figure, folder / MEMORY)


def append(rows: Sequence[Row], path: Path) -> None:
    """Appends rows of the table to a CSV file, made with a header if it is new."""
    found = [{**dict.fromkeys(COLUMNS, ""), **row} for row in files.read_rows(path)] if path.exists() else []
    files.write_rows(path, COLUMNS, [*found, *rows])
