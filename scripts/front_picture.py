"""Draw the picture of the front page, noise over bytes of a few policies, from the rows of `noise.csv`.

    python -m scripts.front_picture      # writes docs/front.png

`docs/noise.png`, by `benchmarks.noise`, has all policies.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from scripts.figure_results import Results, Row
from scripts.figures import RESULTS, ROOT

PICTURE = ROOT / "docs" / "front.png"


def main() -> None:
    """Draw and write."""
    draw(Results(RESULTS)).savefig(PICTURE, dpi=120)


def draw(results: Results) -> Figure:
    """Return the picture: a panel a model; widths of dithered rounding as a line, the default and a fit as points."""
    models: dict[str, list[Row]] = {}
    for row in results.last("noise", "model", "policy").values():
        models.setdefault(row["model"], []).append(row)
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Sequence[Axes] = figure.subplots(1, len(models), squeeze=False)[0]
    for panel, (model, rows) in zip(panels, models.items(), strict=True):
        _draw_model(panel, model, rows)
    panels[0].set_ylabel("noise added to gradients\n(1: as much as between minibatches)")
    panels[min(1, len(models) - 1)].legend(fontsize=8, loc="lower right")
    return figure


def _draw_model(panel: Axes, model: str, rows: Sequence[Row]) -> None:
    points = {row["policy"]: (float(row["ratio"]), float(row["noise"])) for row in rows}
    widths = sorted((int(found[1]), name) for name in points if (found := re.fullmatch(r"DitherBackward(\d)bit", name)))
    panel.plot(*zip(*(points[name] for _, name in widths), strict=True), "o:", color="C0", label="one width")
    for bits, name in widths:
        panel.annotate(f"{bits} bits", points[name], (-5, 5), textcoords="offset points", fontsize=8, ha="right")
    for name, label, style in (("DEFAULT", "DEFAULT", "C3*"), ("fit:bytes=DEFAULT", "fit, bytes of DEFAULT", "C2D")):
        panel.plot(*points[name], style, markersize=11 if style.endswith("*") else 7, label=label)
    panel.set(title=model, xlabel="times fewer bytes", yscale="log")
    panel.margins(x=0.35, y=0.15)
    panel.grid(alpha=0.3, which="both")


if __name__ == "__main__":
    main()
