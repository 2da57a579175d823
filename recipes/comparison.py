"""Full precision against backward quantizers: one table, one picture."""

from pathlib import Path

from recipes import files, plots
from recipes.data import ImageDataset
from recipes.runs import CHECKPOINT, MIB, Result, train
from recipes.settings import Settings

COLUMNS = ("run", "test_accuracy", "best_test_accuracy", "saved_mib", "times_less", "seconds_per_epoch")


def compare(cases: dict[str, Settings], data: ImageDataset, folder: Path, *, resume: bool = False) -> str:
    """Trains each case in a folder of its own and compares the results.

    Args:
        cases: settings by the name of the case's folder; the first one is what the others are compared with.
        data: the images, the same for all.
        folder: receives the cases' folders, comparison.csv and comparison.png.
        resume: continue each case that has a checkpoint; otherwise runs that are in the folder are replaced.

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
