"""A picture of a study, as the thesis draws them: accuracy over the epochs, and what is left at the end."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipes.plots import save
from recipes.study.analysis import MEASURES, Comparison, Measure, comparisons
from recipes.study.cases import Study
from recipes.study.run import Key, Size
from recipes.study.training import PROBED, Row


def draw(path: Path, study: Study, rows: Mapping[Key, Row], size: Size, seeds: Sequence[int]) -> bool:
    """Draws accuracy over the epochs, and the differences of training loss and test accuracy with their intervals.

    Args:
        path: of the PNG file.
        study: to be drawn.
        rows: of finished runs.
        size: of the runs.
        seeds: of the runs.

    Returns:
        Whether there was anything to draw; without a run no file is written.
    """
    first = study.cases[0]
    found = [each for each in comparisons(study, rows, size, seeds) if each.against in (None, first) and each.rows]
    if not found:
        return False
    figure = Figure(figsize=(10, 1.6 + max(3.0, 0.34 * len(found))), layout="constrained")
    images = f"{size.train_size:,}" if size.train_size else "all"
    figure.suptitle(f"{study.question}\n{size.dataset}, {size.epochs} epochs, {images} images", fontsize=11)
    curves, *panels = figure.subplots(1, 1 + len(MEASURES), width_ratios=(4, 3, 3))
    colors = dict(zip((case.label for case in study.cases), _colors(len(study.cases)), strict=True))
    _draw_curves(curves, found, colors)
    for index, (panel, measure) in enumerate(zip(panels, MEASURES, strict=True)):
        _draw_differences(panel, [each for each in found if each.differences], measure, colors)
        panel.tick_params(labelleft=index == 0)
    save(figure, path)
    return True


def _colors(count: int) -> list[object]:
    """Black for what others are compared with, then a scale, since cases are mostly in an order."""
    scale = colormaps["viridis"]
    return ["black", *(scale(0.92 * index / max(1, count - 2)) for index in range(count - 1))]


def _draw_curves(axes: Axes, found: Sequence[Comparison], colors: Mapping[str, object]) -> None:
    """Mean accuracy on the probed images after each epoch."""
    for each in found:
        runs = [[100 * float(word) for word in row["accuracies"].split()] for row in each.rows.values()]
        means = [statistics.fmean(values) for values in zip(*runs, strict=False)]
        label = each.case.label if len(runs) == 1 else f"{each.case.label} ({len(runs)})"
        width = 2.0 if each.against is None else 1.2
        axes.plot(range(1, len(means) + 1), means, color=colors[each.case.label], linewidth=width, label=label)
    axes.set(xlabel="epoch", ylabel=f"accuracy on {PROBED:,} test images (%)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _draw_differences(axes: Axes, found: Sequence[Comparison], measure: Measure, colors: Mapping[str, object]) -> None:
    """Mean paired differences, with intervals where there are two pairs."""
    for place, each in enumerate(found):
        difference = each.differences[measure.column]
        half = 0.0 if math.isnan(difference.half_width) else difference.half_width
        style = {"color": colors[each.case.label], "capsize": 3, "markersize": 5}
        axes.errorbar(difference.mean, place, xerr=half, fmt="o" if half else "x", **style)
    axes.axvline(0, color="black", linewidth=1)
    axes.set_yticks(range(len(found)), [each.case.label for each in found], fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.invert_yaxis()
    against = found[0].against.label if found and found[0].against else "reference"
    unit = f" ({measure.unit.strip()})" if measure.unit else ""
    axes.set_xlabel(f"difference in {measure.words}{unit}\nfrom {against}", fontsize=9)
    axes.grid(alpha=0.3, axis="x")
