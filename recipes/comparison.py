"""A model without backward quantizers against the same with each of several: one table, one picture."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from recipes import files, plots
from recipes.errors import RecipeError
from recipes.metrics import Metric
from recipes.recipe import Recipe
from recipes.runs import CHECKPOINT, COMPARISON, MIB, Result, clear_results, train
from recipes.settings import Settings


def make_cases(settings: Settings, quantizers: Sequence[str]) -> dict[str, Settings]:
    """Settings without a backward quantizer and with each, by the name of the case's folder."""
    reference = replace(settings, act_quant=None, act_override=(), adapt_every=None)
    return {settings.reference_folder: reference} | {name: replace(settings, act_quant=name) for name in quantizers}


def begin(settings: Settings, quantizers: Sequence[str], folder: Path) -> None:
    """Removes an earlier comparison of the same cases and writes down which comparison `folder` holds from now on."""
    folder.mkdir(parents=True, exist_ok=True)
    for place in (folder, *(folder / name for name in make_cases(settings, quantizers))):
        clear_results(place)
    files.write_json(folder / COMPARISON, {"quantizers": list(quantizers), "settings": asdict(settings)})


def begun(recipe: Recipe, folder: Path) -> tuple[Settings, tuple[str, ...]]:
    """The settings and the quantizers that `begin` wrote down."""
    path = folder / COMPARISON
    content = files.read_json(path)
    quantizers = content.get("quantizers") if isinstance(content, dict) else None
    if not isinstance(quantizers, list) or not all(isinstance(name, str) for name in quantizers):
        raise RecipeError(f"{path} does not name the quantizers of a comparison; start a new one")
    return recipe.settings.restored(content.get("settings"), path), tuple(quantizers)


def compare(recipe: Recipe, cases: dict[str, Settings], data: Any, folder: Path, *, resume: bool = False) -> str:
    """Trains each case in a folder of its own and compares the results.

    Args:
        recipe: whose runs are compared.
        cases: settings by the name of the case's folder; the first one is the baseline.
        data: the recipe's data, the same for all.
        folder: receives the cases' folders, comparison.csv and comparison.png.
        resume: continue each case that has a checkpoint; otherwise runs that are in these folders are replaced.

    Returns:
        The table, to be printed.
    """
    results = [
        train(recipe, settings, data, folder / name, resume=resume and (folder / name / CHECKPOINT).exists())
        for name, settings in cases.items()
    ]
    metric = recipe.metric
    rows = [_row(result) for result in results]
    files.write_rows(folder / "comparison.csv", tuple(rows[0]), rows)
    plots.plot_comparison(
        folder / "comparison.png",
        recipe.title(next(iter(cases.values()))),
        metric,
        {result.label: [row[f"test_{metric.name}"] for row in result.history] for result in results},
        {result.label: result.saved_bytes / MIB for result in results},
    )
    return _table(metric, rows)


def _row(result: Result) -> dict[str, object]:
    name = result.metric.name
    return {
        "run": result.label,
        "test_loss": result.history[-1]["test_loss"],
        f"test_{name}": result.final,
        f"best_test_{name}": result.best,
        "saved_mib": result.saved_bytes / MIB,
        "times_less": result.times_less,
        "seconds_per_epoch": result.seconds_per_epoch,
    }


def _table(metric: Metric, rows: list[dict[str, object]]) -> str:
    width = max(len(str(row["run"])) for row in rows)
    title = f"test {metric.words}"
    lines = [f"{'':{width}}  test loss  {title}     best  stored for backward  s/epoch"]
    for row in rows:
        less = f" ({row['times_less']:.1f}x less)" if row["times_less"] > 1 else ""
        stored = f"{row['saved_mib']:.2f} MiB{less}"
        final, best = (format(row[f"{which}test_{metric.name}"], metric.spec) for which in ("", "best_"))
        lines.append(
            f"{row['run']:{width}}  {row['test_loss']:9.4f}  {final:>{len(title)}}  {best:>7}  {stored:>19}  "
            f"{row['seconds_per_epoch']:7.1f}"
        )
    return "\n".join(lines)
