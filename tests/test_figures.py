"""Figures and tables of pages are those of the rows in docs/."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import figures

FOUND = figures.figures()
#: Heads of tables whose numbers are measured.
_MEASURED = re.compile(r"\b(MiB|ms|seconds|times less|step|speed|noise|error|accuracy|loss)\b")


@pytest.mark.parametrize("page", figures.pages(), ids=lambda path: path.name)
def test_figures_of_a_page_are_those_of_the_rows(page: Path):
    """`python -m scripts.figures` writes them."""
    text = page.read_text("utf-8")
    assert figures.with_figures(text, FOUND) == text
    # A comment at the start of a line ends the paragraph on the site; a table's mark has a line of its own.
    assert re.findall(r"^ *<!--figure:[^>\n]*-->(?!\n)", text, re.M) == []


@pytest.mark.parametrize("page", figures.pages(), ids=lambda path: path.name)
def test_tables_of_measured_figures_are_filled_from_rows(page: Path):
    text = re.sub(r"<!--figure:.*?<!--end-->", "", page.read_text("utf-8"), flags=re.S)
    for head, body in re.findall(r"^(\|.*\|)\n\|[-| :]+\|\n((?:\|.*\|\n)+)", text, re.M):
        cells = [cell.strip() for line in body.splitlines() for cell in line.strip("|").split("|")]
        typed = [cell for cell in cells if re.fullmatch(r"[-+]?\d[\d,]*\.\d+( .*)?", cell)]
        assert not (typed and _MEASURED.search(head)), f"{head}\n{typed}: fill the table from rows"


def test_readme_has_figures():
    assert len(figures.names_on((figures.ROOT / "README.md").read_text("utf-8"))) >= 8


def test_with_figures_refuses_names_without_a_row():
    with pytest.raises(KeyError, match=r"figure 'nosie' has no row; near are noise"):
        figures.with_figures("<!--figure:nosie-->1<!--end-->", {"noise": "1"})


def test_figures_are_of_the_last_row_that_has_them():
    rows = [
        {"model": "ResNet-50", "policy": "DEFAULT", "kept_mib": "12.345", "step": "1.5"},
        {"model": "ResNet-50", "policy": "DEFAULT", "kept_mib": "11", "step": ""},
    ]
    found = figures.bench(rows)
    assert found["ResNet-50", "DEFAULT"]["kept_mib"] == "11" and found["ResNet-50", "DEFAULT"]["step"] == "1.5"
    text = figures.Table(("ResNet-50",), ("DEFAULT", "RECOMPUTE"), ("kept", "peak", "step")).text(found)
    assert text == "\n\n| model |  | kept, MiB | step |\n|---|---|---|---|\n| ResNet-50 | `DEFAULT` | 11.0 | 1.50 |\n\n"
