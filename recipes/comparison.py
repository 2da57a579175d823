"""Full precision against backward quantizers: one table, one picture."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from recipes import files, plots
from recipes.data import ImageDataset
from recipes.errors import RecipeError
from recipes.runs import CHECKPOINT, COMPARISON, MIB, Result, clear_results, train
from recipes.settings import Settings

FULL_PRECISION = "full-precision"
COLUMNS = ("run", "test_accuracy", "best_test_accuracy", "saved_mib", "times_less", "seconds_per_epoch")


def make_cases(settings: Settings, quantizers: Sequence[str]) -> dict[str, Settings]:
    """Settings at full precision and with each backward quantizer, by the name of the case's folder.

    Args:
        settings: of all cases; their overrides go to every quantizer.
        quantizers: names of backward quantizers of brevact.
    """
    reference = replace(settings, act_quant=None, act_override=())
    return {FULL_PRECISION: reference} | {name: replace(settings, act_quant=name) for name in quantizers}


def begin(settings: Settings, quantizers: Sequence[str], folder: Path) -> None:
    """Removes an earlier comparison of the same cases and writes down which comparison `folder` holds from now on.

    Args:
        settings: as for `make_cases`.
        quantizers: as for `make_cases`.
        folder: of the comparison; made if it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for place in (folder, *(folder / name for name in make_cases(settings, quantizers))):
        clear_results(place)
    files.write_json(folder / COMPARISON, {"quantizers": list(quantizers), "settings": asdict(settings)})


def begun(folder: Path) -> tuple[Settings, tuple[str, ...]]:
    """What `begin` wrote down: the settings and the quantizers.

    Args:
        folder: of the comparison.

    Raises:
        RecipeError: the file is damaged.
    """
    path = folder / COMPARISON
    content = files.read_json(path)
    quantizers = content.get("quantizers") if isinstance(content, dict) else None
    if not isinstance(quantizers, list) or not all(isinstance(name, str) for name in quantizers):
        raise RecipeError(f"{path} does not name the quantizers of a comparison; start a new one")
    return Settings.restored(content.get("settings"), path), tuple(quantizers)


def compare(cases: dict[str, Settings], data: ImageDataset, folder: Path, *, resume: bool = False) -> str:
    """Trains each case in a folder of its own and compares the results.

    Args:
        cases: settings by the name of the case's folder; the first one is what the others are compared with.
        data: the images, the same for all.
        folder: receives the cases' folders, comparison.csv and comparison.png.
        resume: continue each case that has a checkpoint; otherwise runs that are in these folders are replaced.

    Returns:
        The table, to be printed.
    """
    results = [
        train(settings, data, folder / name, resume=resume and (folder / name / CHECKPOINT).exists())
        for name, settings in cases.items()
    ]
    rows = [_row(result) for result in results]
    files.write_rows(folder / "comparison.csv", COLUMNS, rows)
    settings = next(iter(cases.values()))
    plots.plot_comparison(
        folder / "comparison.png",
        f"EfficientNetV2 {settings.model}, {settings.dataset}, batches of {settings.batch_size}",
        {result.label: [row["test_accuracy"] for row in result.history] for result in results},
        {result.label: result.saved_bytes / MIB for result in results},
    )
    return _table(rows)


def _row(result: Result) -> dict[str, object]:
    return {
        "run": result.label,
        "test_accuracy": result.accuracy,
        "best_test_accuracy": result.best_accuracy,
        "saved_mib": result.saved_bytes / MIB,
        "times_less": result.times_less,
        "seconds_per_epoch": result.seconds_per_epoch,
    }


def _table(rows: list[dict[str, object]]) -> str:
    width = max(len(str(row["run"])) for row in rows)
    lines = [f"{'':{width}}  test accuracy     best  stored for backward  s/epoch"]
    for row in rows:
        less = f" ({row['times_less']:.1f}x less)" if row["times_less"] > 1 else ""
        stored = f"{row['saved_mib']:.2f} MiB{less}"
        lines.append(
            f"{row['run']:{width}}  {row['test_accuracy']:13.2%}  {row['best_test_accuracy']:7.2%}  {stored:>19}  "
            f"{row['seconds_per_epoch']:7.1f}"
        )
    return "\n".join(lines)
