"""Draw the error of gradients over bytes, with the time of a step beside each point, from the rows of `recompute.csv`.

python -m scripts.recompute_picture      # writes docs/recompute.png
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from scripts.figure_results import Results, Row
from scripts.figure_tables import FITS_OF_RECOMPUTE, WAYS_OF_RECOMPUTE
from scripts.figures import RESULTS, ROOT

PICTURE = ROOT / "docs" / "recompute.png"
#: Errors below it are those of roundings: their points stand on this line.
EXACT = 1e-3
_STYLES = ("ks", "kD", "C3*", "C0v", "C1o", "C0^", "C5<", "C4P")


def main() -> None:
    """Draw and write."""
    draw(Results(RESULTS)).savefig(PICTURE, dpi=120)


def draw(results: Results) -> Figure:
    """Return the picture: a panel a model, a point a way to keep less; fitted policies are joined."""
    models: dict[str, list[Row]] = {}
    for row in results.last("recompute", "model", "policy").values():
        models.setdefault(row["model"], []).append(row)
    columns = min(3, len(models))
    lines = math.ceil(len(models) / columns)
    figure = Figure(figsize=(3.5 * columns, 3.2 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Sequence[Axes] = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel in panels[len(models) :]:
        panel.remove()
    for panel, (model, rows) in zip(panels, models.items(), strict=False):
        _draw_model(panel, model, rows)
        if panel.get_subplotspec().is_first_col():
            panel.set_ylabel("error of the gradient")
        if panel.get_subplotspec().is_last_row():
            panel.set_xlabel("times fewer bytes")
    labels = {label: line for panel in panels for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels, fontsize=8, loc="outside lower center", ncols=4)
    return figure


def _draw_model(panel: Axes, model: str, rows: Sequence[Row]) -> None:
    points = {row["policy"]: (float(row["ratio"]), max(float(row["error"]), EXACT)) for row in rows}
    steps = {row["policy"]: f"{float(row['step']):.2f}" for row in rows}
    others = [way for way in WAYS_OF_RECOMPUTE if way not in FITS_OF_RECOMPUTE]
    for way, style in zip(others, _STYLES, strict=True):
        if way in points:
            panel.plot(*points[way], style, markersize=10 if style.endswith("*") else 6, label=_plain(way))
    fits = [way for way in FITS_OF_RECOMPUTE if way in points]
    if fits:
        panel.plot(*zip(*(points[way] for way in fits), strict=True), "C2x:", label="brevact.fit, 15 to 80 times")
    for index, way in enumerate(sorted((way for way in WAYS_OF_RECOMPUTE if way in points), key=points.__getitem__)):
        place = (5, 5 if index % 2 else -11)
        panel.annotate(steps[way], points[way], place, textcoords="offset points", fontsize=8)
    panel.set(title=model, xscale="log", yscale="log")
    panel.set_xticks(ticks := (2, 5, 10, 20, 50, 100, 200), map(str, ticks))
    panel.minorticks_off()
    panel.set_yticks(ticks := (EXACT, 0.01, 0.1, 1.0), ("none", "1 %", "10 %", "100 %"))
    panel.set(xlim=(1.4, 400), ylim=(0.5e-3, 1.3))
    panel.grid(alpha=0.3)


def _plain(way: str) -> str:
    return WAYS_OF_RECOMPUTE[way].replace("`", "")


if __name__ == "__main__":
    main()
