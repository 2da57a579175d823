"""Fill figures in the prose of README.md and docs/ from the rows in `benchmarks/results`.

    python -m scripts.figures

A figure stands between marks, ``<!--figure:step.resnet50.kept-->50.2<!--end-->``, which no reader of the page sees; the
name is one of `figures`. A row that is measured again changes the page by this command, and a test fails until it has
run. Figures without marks are of measurements whose rows are not kept.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path

from scripts import figure_domains, figure_models, figure_rows, figure_runs, figure_tables
from scripts.figure_results import Results

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_MARK = re.compile(r"<!--figure:(?P<name>[^>]*?)-->(?P<text>.*?)<!--end-->", re.S)


def main() -> None:
    """Write all pages anew."""
    found = figures()
    for page in pages():
        text = page.read_text("utf-8")
        if (filled := with_figures(text, found)) != text:
            page.write_text(filled, "utf-8")
            print(page.relative_to(ROOT))


def pages() -> list[Path]:
    """The pages that may have figures."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def names_on(text: str) -> set[str]:
    """The names of the figures on a page."""
    return {mark["name"] for mark in _MARK.finditer(text)}


def with_figures(text: str, found: Mapping[str, str]) -> str:
    """Return the text of a page with its figures filled.

    >>> with_figures("<!--figure:a-->1<!--end--> MiB", {"a": "2"})
    '<!--figure:a-->2<!--end--> MiB'

    Args:
        text: of the page.
        found: figures by name.

    Raises:
        KeyError: the page has a figure that is not among them.
    """

    def filled(mark: re.Match[str]) -> str:
        name = mark["name"]
        if name not in found:
            near = difflib.get_close_matches(name, found, n=5, cutoff=0.4) or sorted(found)[:5]
            raise KeyError(f"figure {name!r} is not known; near are {', '.join(near)}")
        return f"<!--figure:{name}-->{found[name]}<!--end-->"

    return _MARK.sub(filled, text)


def figures() -> dict[str, str]:
    """Return all figures by name, as they are written."""
    results = Results(RESULTS)
    kinds = (*figure_rows.KINDS, *figure_tables.KINDS, *figure_runs.KINDS, *figure_models.KINDS)
    kinds = (*kinds, figure_domains.of_domains)
    return {name: text for kind in kinds for name, text in kind(results).items()}


if __name__ == "__main__":
    main()
