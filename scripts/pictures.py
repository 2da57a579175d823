"""Draw docs/pictures from the rows: one picture for each table in docs/tables, whose digest it holds.

python -m scripts.figures && python -m scripts.pictures
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.models import models_of
from recipes.study import FULL_PRECISION, comparisons
from scripts import figures

FOLDER = figures.DOCS / "pictures"


def _figure(panels: int, height: float, rows: int = 1, **ratios: Sequence[float]) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(10, height), layout="constrained")
    return figure, list(figure.subplots(rows, -(-panels // rows), squeeze=False, **ratios).flat)


def _bars(panels: dict[str, dict[str, dict[str, float]]], lines_at: float | None = None) -> Figure:
    """Bars of ways for each model, in a panel for each figure: figure, then model, then way."""
    models = list(dict.fromkeys(model for figure in panels.values() for model in figure))
    ways = list(dict.fromkeys(way for panel in panels.values() for model in panel.values() for way in model))
    figure, axes = _figure(len(panels), 0.9 + 0.22 * len(models) * len(ways))
    for at, (axis, (title, values)) in enumerate(zip(axes, panels.items(), strict=True)):
        for way, name in enumerate(ways):
            place = [row + 0.8 * (way + 0.5) / len(ways) - 0.4 for row in range(len(models))]
            lengths = [values.get(model, {}).get(name, 0.0) for model in models]
            drawn = axis.barh(place, lengths, 0.8 / len(ways), label=name)
            texts = [f"{length:,.0f}" if length > 100 else f"{length:.2f}" if length else "" for length in lengths]
            axis.bar_label(drawn, texts, fontsize=7, padding=2)
        axis.set_yticks(range(len(models)), models if at == 0 else [""] * len(models))
        axis.invert_yaxis()
        axis.set_title(title, fontsize=10)
        axis.margins(x=0.2)
        axis.xaxis.set_major_locator(MaxNLocator(4))
        if lines_at is not None:
            axis.axvline(lines_at, color="lightgray", linewidth=0.8, zorder=0)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=len(ways), fontsize=8)
    return figure


def _of_bench(name: str, ways: Sequence[str], columns: dict[str, str], models: Sequence[str] | None = None) -> Figure:
    """Bars of columns of the bench; peaks and kept bytes as a part of plain PyTorch's."""
    rows = figures.bench(figures.read("bench"))
    panels: dict[str, dict[str, dict[str, float]]] = {title: {} for title in columns}
    for model in models or models_of(figures.TABLES[name].models):
        for title, column in columns.items():
            for way in ways:
                text = rows.get((model, way), {}).get(column, "")
                plain = rows.get((model, "plain"), {}).get(column, "")
                if text and plain:
                    value = float(plain) / float(text) if title.startswith("speed") else float(text) / float(plain)
                    panels[title].setdefault(model, {})[way] = round(value, 3)
    return _bars(panels, 1.0)


def large() -> Figure:
    ways = ("checkpoint", "compile", "DEFAULT", "RECOMPUTE")
    columns = {"kept bytes, part of plain": "kept_mib", "peak, part of plain": "peak_mib", "step, times plain": "step"}
    return _of_bench("large", ways, columns, figures.COMPARED)


def gpu() -> Figure:
    ways = ("checkpoint", "DEFAULT", "RECOMPUTE", "LosslessBackward", "plain+captured", "DEFAULT+captured")
    return _of_bench("gpu", ways, {"peak, part of plain": "peak_mib", "speed, times plain": "step"})


def qat() -> Figure:
    ways = ("LosslessBackward", "StochBackward2bit", "DEFAULT")
    models = [name for name in models_of("qat") if not name.endswith(", float")]
    return _of_bench("qat", ways, {"kept bytes, part of stock": "kept_mib", "step, times stock": "step"}, models)


def plan() -> Figure:
    heads, *lines = figures.tables()["plan"]
    panels: dict[str, dict[str, dict[str, float]]] = {head: {} for head in heads[3:]}
    for model, way, _, *lengths in lines:
        for head, length in zip(heads[3:], lengths, strict=True):
            panels[head].setdefault(model, {})[way] = float(length.replace(",", ""))
    return _bars(panels)


def models() -> Figure:
    """How many times less each model keeps, from the least to the most."""
    rows = figures.bench(figures.read("bench"))
    figure, (axis,) = _figure(1, 4)
    for group in ("small", "images", "domains"):
        names = [name for name in models_of(group) if (name, "DEFAULT") in rows]
        values = sorted((float(rows[name, "DEFAULT"]["kept_less"]), name) for name in names)
        axis.plot([value for value, _ in values], "o", markersize=4, label=group)
        for at, place, align in ((0, (-5, 1 if group == "small" else -8), "right"), (-1, (5, -3), "left")):
            value, name = values[at]
            axis.annotate(name, (at % len(values), value), place, textcoords="offset points", ha=align)
    axis.set(yscale="log", ylabel="times less kept", xlabel="models of a group, sorted", yticks=(2, 5, 10, 20, 40))
    axis.margins(x=0.22, y=0.1)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    axis.legend()
    return figure


def trained() -> Figure:
    """Noise and bytes of policies on trained models."""
    rows = figures.bench(figures.read("bench"))
    names = models_of(figures.TABLES["trained"].models)
    names = [name for name in names if (name, "DEFAULT") in rows]
    figure, axes = _figure(len(names), 7, rows=2)
    for axis, name in zip(axes, names, strict=True):
        found = [(policy, row) for (model, policy), row in rows.items() if model == name and row.get("noise")]
        errors = sorted((max(float(row["noise"]) + float(row["bias"]), 1e-5), policy) for policy, row in found)
        scale, last = 170 / math.log(errors[-1][0] / errors[0][0]), {"left": -9.0, "right": -9.0}  # points
        for at, (error, policy) in enumerate(errors):
            less = float(rows[name, policy]["kept_less"])
            axis.plot(less, error, "o", markersize=4, color="C3" if policy == "DEFAULT" else "C0")
            label = policy.replace("Backward", " ").replace("fit:bytes=DEFAULT", "fit")
            align, height = ("right", "left")[at % 2], scale * math.log(error / errors[0][0])
            last[align] = max(height, last[align] + 8)  # neighbours stand on both sides, and apart
            place = (5 if align == "left" else -5, last[align] - height - 2)
            axis.annotate(label, (less, error), place, textcoords="offset points", fontsize=7, ha=align)
        axis.set(title=name, yscale="log", xlabel="times less kept", ylabel="noise + bias²")
        axis.margins(x=0.3, y=0.1)
    return figure


def formats() -> Figure:
    """Error over bits."""
    figure, (axis,) = _figure(1, 4)
    kinds = ("Stoch", "Dither", "Nearest", "Weibull", "DualPrecision", "SignMagnitude")
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in (*kinds, "other levels")}
    for name, bits, *_, net, _, _, _ in figures.tables()["formats"][1:]:
        kind = next((kind for kind in kinds if name.startswith(kind)), "other levels")
        found[kind].append((float(bits), float(net)))
    for kind, places in found.items():
        axis.plot(*zip(*places, strict=True), "o", markersize=4, label=kind)
    axis.set(xlabel="bits per element", ylabel="relative error on a network's tensors", yscale="log")
    axis.legend(loc="lower left")
    return figure


def quantizers() -> Figure:
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for operation, device, dtype, bits, _, times in figures.tables()["quantizers"][1:]:
        if operation != "clone":
            of = panels.setdefault("CPU, times clone()" if "NVIDIA" not in device else "H200, times clone()", {})
            of.setdefault(operation, {})[f"{dtype}, {bits} bits"] = float(times)
    return _bars(panels, 1.0)


def studies() -> Figure:
    """Differences of accuracy: intervals of six pairs and more, and the pairs of short studies one by one."""
    rows = figures.read("studies")
    figure, (left, right) = _figure(2, 4, width_ratios=(2, 3))
    long = [each for each in comparisons(rows) if each.accuracy.half_width >= 0 and each.against == FULL_PRECISION]
    for at, each in enumerate(long):
        left.errorbar(each.accuracy.mean, at, xerr=each.accuracy.half_width, fmt="o", capsize=3)
    left.set_yticks(range(len(long)), [f"{each.policy}, {each.pairs} pairs" for each in long])
    left.axvline(0, color="gray", linewidth=0.8)
    left.margins(y=0.3)
    left.set_xlabel("accuracy, points; 95 % intervals")
    kind = ("5000", "efficientnetv2", "")
    short = [row for row in rows if (row["train_size"], row["recipe"], row["settings"]) == kind]
    plain = {row["seed"]: float(row["test_accuracy"]) for row in short if row["policy"] == FULL_PRECISION}
    for place, rounding in enumerate(("Stoch", "Nearest", "Dither")):
        for bits in range(1, 9):
            found = [row for row in short if row["policy"] == f"{rounding}Backward{bits}bit" and row["seed"] in plain]
            values = [100 * (float(row["test_accuracy"]) - plain[row["seed"]]) for row in found]
            at = [bits + 0.2 * (place - 1)] * len(values)
            right.plot(at, values, f"C{place}o", markersize=4, label=rounding if bits == 2 else None)
    right.axhline(0, color="gray", linewidth=0.8)
    right.set(xlabel="bits; each dot is a pair of short runs", ylabel="accuracy, points above full precision")
    right.legend()
    return figure


PICTURES: tuple[Callable[[], Figure], ...] = (large, gpu, qat, plan, models, trained, formats, quantizers, studies)


def digest(name: str) -> str:
    """A digest of a table, by which a test sees that its picture is drawn from other rows."""
    return hashlib.sha256(figures.as_csv(figures.tables()[name]).encode()).hexdigest()[:16]


def main() -> None:
    matplotlib.rcParams.update({"svg.hashsalt": "brevact", "svg.fonttype": "none", "font.size": 9})
    for draw in PICTURES:
        name = draw.__name__
        draw().savefig(FOLDER / f"{name}.svg", metadata={"Date": None, "Description": digest(name)})


if __name__ == "__main__":
    main()
