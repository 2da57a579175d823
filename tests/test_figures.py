"""Figures in prose are those of the rows in benchmarks/results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import figure_rows, figures
from scripts.figure_results import Results

FOUND = figures.figures()


@pytest.mark.parametrize("page", figures.pages(), ids=lambda path: path.name)
def test_figures_of_a_page_are_those_of_the_rows(page: Path):
    """`python -m scripts.figures` writes them."""
    text = page.read_text("utf-8")
    assert figures.with_figures(text, FOUND) == text


@pytest.mark.parametrize("page", figures.pages(), ids=lambda path: path.name)
def test_marks_of_figures_in_prose_do_not_begin_a_line(page: Path):
    """A comment at the start of a line ends the paragraph on the site; a table's mark has a line of its own."""
    assert re.findall(r"^ *<!--figure:[^>\n]*-->(?!\n)", page.read_text("utf-8"), re.M) == []


def test_pages_have_figures():
    named = {page.name: figures.names_on(page.read_text("utf-8")) for page in figures.pages()}
    assert len(named["README.md"]) >= 8
    assert {"index.md", "performance.md", "qat.md", "choosing.md"} <= {page for page, names in named.items() if names}


def test_with_figures_leaves_the_rest():
    text = "a <!--figure:x y-->old<!--end-->, <!-- study: x -->b<!-- end -->, <!--figure:z--><!--end-->"
    filled = "a <!--figure:x y-->1 % ± 2<!--end-->, <!-- study: x -->b<!-- end -->, <!--figure:z-->3<!--end-->"
    assert figures.with_figures(text, {"x y": "1 % ± 2", "z": "3"}) == filled


def test_with_figures_refuses_names_that_are_not_known():
    with pytest.raises(KeyError, match=r"figure 'nosie' is not known; the figures are noise"):
        figures.with_figures("<!--figure:nosie-->1<!--end-->", {"noise": "1"})


def test_figures_are_of_the_last_row(tmp_path: Path):
    (tmp_path / "first_step.csv").write_text("model,case,seconds\nmlp,plain,2.69\nmlp,plain,1.26\n")
    assert figure_rows.of_first_steps(Results(tmp_path)) == {"first.mlp.plain": "1.3"}
