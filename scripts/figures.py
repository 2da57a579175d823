"""Fill figures of README.md and docs/, and the tables in docs/tables, from rows: `docs/bench.csv` and those beside it.

    python -m scripts.figures

A figure stands between marks, ``<!--figure:bench.ResNet-50.DEFAULT.kept-->8.3<!--end-->``, which no reader of the page
sees. Rows that are measured again change the page by this command, and a test fails until it has run. Names:

bench.MODEL.POLICY.COLUMN   of the last row: kept, less, peak, growth, step, speed, error, noise or bias
range.GROUP.POLICY.COLUMN   the least and the largest of a group of models
median.GROUP.POLICY.COLUMN  the median, and count.GROUP.POLICY.COLUMN the number of models
STUDY.POLICY.COLUMN         pairs, less, loss or accuracy of a study: study (the long one), short, compiled, or w4a4
total.TABLE                 the number of rows of a table
"""

from __future__ import annotations

import csv
import difflib
import io
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu import MODELS as GPU
from benchmarks.models import GROUPS, models_of
from recipes.study import comparisons

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
Row = dict[str, str]
Bench = Mapping[tuple[str, str], Row]
_MARK = re.compile(r"<!--figure:(?P<name>[^>]*?)-->(?P<text>.*?)<!--end-->", re.S)


def noise_text(value: str) -> str:
    """A noise with more decimals, the smaller it is.

    >>> [noise_text(value) for value in ("0.588", "0.0305", "0.00045", "-1e-6")]
    ['0.59', '0.030', '0.0004', '0.0000']
    """
    places = 4 if abs(float(value)) < 0.001 else 3 if abs(float(value)) < 0.1 else 2
    return f"{float(value):.{places}f}".replace("-0.0000", "0.0000")


#: From the name of a figure to the column, and how it is written.
COLUMNS: dict[str, tuple[str, Callable[[str], str]]] = {
    "kept": ("kept_mib", lambda value: f"{float(value):,.1f}" if float(value) >= 10 else f"{float(value):.2f}"),
    "less": ("kept_less", lambda value: f"{float(value):.1f}"),
    "peak": ("peak_mib", lambda value: f"{float(value):,.0f}"),
    "peak-less": ("peak_less", lambda value: f"{float(value):.1f}"),
    "growth": ("growth_mib", lambda value: f"{float(value):,.0f}"),
    "step": ("step", lambda value: f"{float(value):.2f}"),
    "speed": ("step", lambda value: f"{1 / float(value):.2f}"),
    "error": ("error", lambda value: f"{100 * float(value):.1f} %"),
    "noise": ("noise", noise_text),
    "bias": ("bias", noise_text),
}
_HEADS = {
    **{"kept": "kept, MiB", "less": "times less", "peak": "peak, MiB", "growth": "growth of the process, MiB"},
    **{"error": "error of the gradient", "bias": "bias²"},
}


@dataclass(frozen=True)
class Table:
    """A row per model and policy: a group of models, or their names, policies (None: all with rows) and columns."""

    models: str | tuple[str, ...]
    policies: tuple[str, ...] | None
    columns: tuple[str, ...]

    def lines(self, rows: Bench) -> list[list[str]]:
        """The heads, and the row of each model and policy that has a figure."""
        found: list[list[str]] = []
        for model in models_of(self.models):
            measured = [policy for name, policy in rows if name == model]
            for policy in measured if self.policies is None else self.policies:
                row = rows.get((model, policy), {})
                cells = [_cell(row, column) for column in self.columns]
                if any(cells):
                    found.append([model, policy, *cells])
        return [["model", "policy", *(_HEADS.get(column, column) for column in self.columns)], *found]


_LARGE = ("plain", "checkpoint", "compile", "DEFAULT", "RECOMPUTE", "LosslessBackward:recompute=1024")
_QAT = ("plain", "LosslessBackward", "LosslessBackward:residual_bit_width=2", "StochBackward2bit", "DEFAULT")
_GPU = ("plain", "checkpoint", "DEFAULT", "RECOMPUTE", "LosslessBackward", "plain+captured", "DEFAULT+captured")
TABLES = {
    "large": Table("large", _LARGE, ("kept", "less", "peak", "growth", "step", "error", "noise", "bias")),
    "qat": Table("qat", _QAT, ("kept", "less", "peak", "growth", "step")),
    "trained": Table("trained", None, ("less", "error", "noise", "bias")),
    "models": Table((*GROUPS["small"], *GROUPS["images"], *GROUPS["domains"]), ("DEFAULT",), ("kept", "less", "step")),
    "gpu": Table(tuple(GPU), _GPU, ("kept", "less", "peak", "speed")),
}


def read(name: str) -> list[Row]:
    with open(DOCS / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def bench(rows: Iterable[Row]) -> dict[tuple[str, str], Row]:
    """The last figure in each column, by model and policy."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        found.setdefault((row["model"], row["policy"]), {}).update({name: x for name, x in row.items() if x})
    for (model, _), row in found.items():
        plain = found.get((model, "plain"), {}).get("peak_mib")
        if plain and row.get("peak_mib"):
            row["peak_less"] = str(float(plain) / float(row["peak_mib"]))
    return found


#: Models whose rows have every way to save memory, and those that no one here wrote.
COMPARED = ("EfficientNetV2-S", "ResNet-50", "ViT-S", "3-D U-Net")
FOUND_ELSEWHERE = (*GROUPS["images"], *GROUPS["domains"])


def figures() -> dict[str, str]:
    """Return all figures by name, as they are written."""
    rows = bench(read("bench"))
    found: dict[str, str] = {}
    for (model, policy), row in rows.items():
        found |= {f"bench.{model}.{policy}.{column}": _cell(row, column) for column in COLUMNS}
    groups = {**{name: models_of(name) for name in GROUPS}, "gpu": tuple(GPU)}
    for group, models in (groups | {"compared": COMPARED, "elsewhere": FOUND_ELSEWHERE}).items():
        for policy, column in itertools.product(dict.fromkeys(policy for _, policy in rows), COLUMNS):
            cells = [_cell(rows[model, policy], column) for model in models if (model, policy) in rows]
            if values := sorted(filter(None, cells), key=_number):
                found[f"range.{group}.{policy}.{column}"] = " to ".join(dict.fromkeys((values[0], values[-1])))
                found[f"median.{group}.{policy}.{column}"] = values[len(values) // 2]
                found[f"count.{group}.{policy}.{column}"] = str(len(values))
    found |= {f"total.{name}": str(len(lines) - 1) for name, lines in tables().items()}
    for each in comparisons(read("studies")):
        _, recipe, _, size, settings = each.kind
        short = "w4a4" if recipe == "qat" else "short" if size == "5000" else "middle"
        values = {"pairs": str(each.pairs), "less": f"{each.less:.1f}", "loss": each.loss, "accuracy": each.accuracy}
        if settings in ("", "compiled"):
            name = settings or ("study" if each.is_long else short)
            found |= {f"{name}.{each.label}.{column}": str(value) for column, value in values.items()}
    return found


def tables() -> dict[str, list[list[str]]]:
    """Return the tables of docs/tables, whose first line has the heads."""
    rows = bench(read("bench"))
    found = {name: table.lines(rows) for name, table in TABLES.items()}
    return found | {"formats": _formats(), "quantizers": _quantizers(), "plan": _plan(), "studies": _studies()}


def _cell(row: Mapping[str, str], name: str) -> str:
    column, text = COLUMNS[name]
    return text(row[column]) if row.get(column) else ""


def _number(text: str) -> float:
    return float(text.replace(",", "").removesuffix(" %"))


def _formats() -> list[list[str]]:
    last = {(row["quantizer"], row["data"]): row for row in read("formats")}
    kinds = ("normal", "after ReLU", "long-tailed", "EfficientNetV2")
    lines = [["quantizer", "bits", "normal", "ReLU", "tailed", "net", "bias", "pack", "decode"]]
    for name in dict.fromkeys(name for name, _ in last):
        row = last[name, kinds[-1]]
        errors = (last[name, kind]["error"] for kind in kinds)
        lines.append([name, row["bits"], *errors, row["bias"], row["quantize"], row["decode"]])
    return lines


def _plan() -> list[list[str]]:
    """Kept bytes at 4,096 tokens, and the longest sequence in each memory."""
    rows = read("plan")
    memories = [name for name in rows[0] if name.isdecimal()]
    heads = ["model", "activations", "kept of 4,096 tokens, GiB", *(f"tokens in {each} GiB" for each in memories)]
    return [heads, *([r["model"], r["way"], r["kept_gib"], *(f"{int(r[each]):,}" for each in memories)] for r in rows)]


def _quantizers() -> list[list[str]]:
    names = ("operation", "device", "dtype", "bit_width", "ns", "of_clone")
    last = {tuple(row[name] for name in names[:4]): [row[name] for name in names] for row in read("quantizers")}
    return [["operation", "device", "dtype", "bits", "ns per element", "times clone()"], *last.values()]


def _studies() -> list[list[str]]:
    lines = [["trained", "stored by", "pairs", "times less", "training loss", "test accuracy, points"]]
    for each in comparisons(read("studies")):
        lines.append([*each.names(), str(each.pairs), f"{each.less:.1f}", str(each.loss), str(each.accuracy)])
    return lines


def pages() -> list[Path]:
    """The pages that may have figures."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def names_on(text: str) -> set[str]:
    """The names of the figures on a page."""
    return {mark["name"] for mark in _MARK.finditer(text)}


def with_figures(text: str, found: Mapping[str, str]) -> str:
    """Return the text of a page with its figures filled; a KeyError for a figure that is not among them.

    >>> with_figures("<!--figure:a-->1<!--end--> MiB", {"a": "2"})
    '<!--figure:a-->2<!--end--> MiB'
    """

    def filled(mark: re.Match[str]) -> str:
        name = mark["name"]
        if not found.get(name):
            near = difflib.get_close_matches(name, found, n=5, cutoff=0.4) or sorted(found)[:5]
            raise KeyError(f"figure {name!r} has no row; near are {', '.join(near)}")
        return f"<!--figure:{name}-->{found[name]}<!--end-->"

    return _MARK.sub(filled, text)


def as_csv(lines: Iterable[Sequence[str]]) -> str:
    """A table as text of a CSV file."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(lines)
    return file.getvalue()


def main() -> None:
    for name, lines in tables().items():
        (DOCS / "tables" / f"{name}.csv").write_text(as_csv(lines), "utf-8")
    found = figures()
    for page in pages():
        text = page.read_text("utf-8")
        if (filled := with_figures(text, found)) != text:
            page.write_text(filled, "utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
