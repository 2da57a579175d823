"""Fill figures and tables of README.md and docs/ from rows of measurements: `docs/bench.csv` and the CSVs beside it.

    python -m scripts.figures

A figure stands between marks, ``<!--figure:bench.ResNet-50.DEFAULT.kept-->8.3<!--end-->``, which no reader of the page
sees. Rows that are measured again change the page by this command, and a test fails until it has run. Names:

bench.MODEL.POLICY.COLUMN   of the last row: kept, less, peak, growth, step, speed, error, noise or bias
range.GROUP.POLICY.COLUMN   the least and the largest of a group of models
median.GROUP.POLICY.COLUMN  the median, and count.GROUP.POLICY.COLUMN the number of models
table.NAME                  a key of `TABLES`, or formats, plan, quantizers, studies
study.POLICY.COLUMN         of the long study: pairs, less, loss, accuracy, accuracy-below, accuracy-below-interval
"""

from __future__ import annotations

import csv
import difflib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu import MODELS as GPU
from benchmarks.models import GROUPS
from recipes.study import Comparison, comparisons

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

    def text(self, rows: Bench) -> str:
        """The table in Markdown; columns without a figure are left out."""
        found: list[list[str]] = []
        for model in models_of(self.models):
            measured = [policy for name, policy in rows if name == model]
            for policy in measured if self.policies is None else self.policies:
                row = rows.get((model, policy), {})
                cells = [_cell(row, column) for column in self.columns]
                if any(cells):
                    name = policy if policy.islower() and ":" not in policy else f"`{policy}`"
                    found.append([model if not found or model not in {line[0] for line in found} else "", name, *cells])
        kept = [0, 1, *(at for at in range(2, len(self.columns) + 2) if any(line[at] for line in found))]
        heads = ["model", "", *(_HEADS.get(column, column) for column in self.columns)]
        return markdown([heads[at] for at in kept], [[line[at] for at in kept] for line in found])


_LARGE = ("plain", "checkpoint", "compile", "DEFAULT", "RECOMPUTE", "LosslessBackward:recompute=1024", "fit:30x")
_QAT = ("plain", "LosslessBackward", "LosslessBackward:residual_bit_width=2", "StochBackward2bit", "DEFAULT")
_GPU = ("plain", "checkpoint", "DEFAULT", "RECOMPUTE", "LosslessBackward", "plain+captured", "DEFAULT+captured")
TABLES = {
    "large": Table("large", _LARGE, ("kept", "less", "peak", "growth", "step", "error", "noise", "bias")),
    "qat": Table("qat", _QAT, ("kept", "less", "peak", "growth", "step")),
    "trained": Table((*GROUPS["cifar10"], *GROUPS["trained"]), None, ("less", "error", "noise", "bias")),
    "small": Table("small", ("DEFAULT",), ("kept", "less")),
    "images": Table("images", ("DEFAULT",), ("kept", "less")),
    "domains": Table("domains", ("DEFAULT",), ("kept", "less", "step")),
    "gpu": Table("gpu", _GPU, ("kept", "less", "peak", "speed")),
}


def models_of(names: str | tuple[str, ...]) -> list[str]:
    """The models of a group, or these."""
    return list(GPU if names == "gpu" else GROUPS[names]) if isinstance(names, str) else list(names)


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table with the empty lines that it needs between marks."""
    text = [f"| {' | '.join(line)} |" for line in (heads, *lines)]
    return "\n\n" + "\n".join([text[0], "|" + "---|" * len(heads), *text[1:]]) + "\n\n"


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
    found = {f"table.{name}": table.text(rows) for name, table in TABLES.items()}
    for (model, policy), row in rows.items():
        found |= {f"bench.{model}.{policy}.{column}": _cell(row, column) for column in COLUMNS}
    groups = {name: models_of(name) for name in (*GROUPS, "gpu")}
    for group, models in (groups | {"compared": COMPARED, "elsewhere": FOUND_ELSEWHERE}).items():
        for policy, column in itertools.product(dict.fromkeys(policy for _, policy in rows), COLUMNS):
            cells = [_cell(rows[model, policy], column) for model in models if (model, policy) in rows]
            if values := sorted(filter(None, cells), key=_number):
                found[f"range.{group}.{policy}.{column}"] = " to ".join(dict.fromkeys((values[0], values[-1])))
                found[f"median.{group}.{policy}.{column}"] = values[len(values) // 2]
                found[f"count.{group}.{policy}.{column}"] = str(len(values))
    return found | {"table.formats": _formats(), "table.quantizers": _quantizers(), "table.plan": _plan()} | _studies()


def _cell(row: Mapping[str, str], name: str) -> str:
    column, text = COLUMNS[name]
    return text(row[column]) if row.get(column) else ""


def _number(text: str) -> float:
    return float(text.replace(",", "").removesuffix(" %"))


def _formats() -> str:
    last = {(row["quantizer"], row["data"]): row for row in read("formats")}
    kinds = ("normal", "after ReLU", "long-tailed", "EfficientNetV2")
    lines = []
    for name in dict.fromkeys(name for name, _ in last):
        row = last[name, kinds[-1]]
        errors = (last[name, kind]["error"] for kind in kinds)
        lines.append([f"`{name}`", row["bits"], *errors, row["bias"], row["quantize"], row["decode"]])
    return markdown(["quantizer", "bits", "normal", "ReLU", "tailed", "net", "bias", "pack", "decode"], lines)


def _plan() -> str:
    """Kept bytes at 4,096 tokens, and the longest sequence in each memory."""
    rows = read("plan")
    memories = [name for name in rows[0] if name.isdecimal()]
    heads = ("model", "activations", "kept of 4,096 tokens, GiB", *(f"tokens in {each} GiB" for each in memories))
    ways = {"plain": "plain", "checkpointed": "checkpointed", "DEFAULT": "`DEFAULT`", "RECOMPUTE": "`RECOMPUTE`"}
    return markdown(
        heads,
        ((r["model"], ways[r["way"]], r["kept_gib"], *(f"{int(r[each]):,}" for each in memories)) for r in rows),
    )


def _quantizers() -> str:
    last = {(row["operation"], row["device"], row["dtype"], row["bit_width"]): row for row in read("quantizers")}
    columns = list(dict.fromkeys(key[1:] for key in last))
    lines = []
    for operation in dict.fromkeys(key[0] for key in last):
        rows = [last.get((operation, *column)) for column in columns]
        lines.append([operation, *(f"{row['ns']} ({row['of_clone']})" if row else "" for row in rows)])
    return markdown(["", *(f"{device}, {dtype}, {bits} bits" for device, dtype, bits in columns)], lines)


def _studies() -> dict[str, str]:
    found, lines = {}, []
    for each in comparisons(read("studies")):
        lines.append([*each.names(), str(each.pairs), f"{each.less:.1f}", str(each.loss), str(each.accuracy)])
        if each.is_long:
            found |= _of_study(each)
    heads = ["trained", "stored by", "pairs", "times less", "training loss", "test accuracy, points"]
    return {**found, "table.studies": markdown(heads, lines)}


def _of_study(each: Comparison) -> dict[str, str]:
    low, high = (-each.accuracy.mean + half for half in (-each.accuracy.half_width, each.accuracy.half_width))
    values = {"pairs": str(each.pairs), "less": f"{each.less:.1f}", "loss": str(each.loss)}
    values |= {"accuracy": str(each.accuracy), "accuracy-below": f"{-each.accuracy.mean:.2f}"}
    values["accuracy-below-interval"] = f"{low:.2f} to {high:.2f}"
    return {f"study.{each.policy}.{name}": text for name, text in values.items()}


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


def main() -> None:
    found = figures()
    for page in pages():
        text = page.read_text("utf-8")
        if (filled := with_figures(text, found)) != text:
            page.write_text(filled, "utf-8")
            print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
