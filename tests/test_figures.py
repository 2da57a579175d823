"""Figures in prose are those of the rows in benchmarks/results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import figure_domains, figure_rows, figures
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
    named = {page: figures.names_on(page.read_text("utf-8")) for page in figures.pages()}
    assert len(next(names for page, names in named.items() if page.name == "README.md")) >= 8
    with_figures = {page.name for page, names in named.items() if names and page.parent.name == "docs"}
    assert {"index.md", "performance.md", "qat.md", "choosing.md"} <= with_figures


def test_with_figures_leaves_the_rest():
    text = "a <!--figure:x y-->old<!--end-->, <!-- study: x -->b<!-- end -->, <!--figure:z--><!--end-->"
    filled = "a <!--figure:x y-->1 % ± 2<!--end-->, <!-- study: x -->b<!-- end -->, <!--figure:z-->3<!--end-->"
    assert figures.with_figures(text, {"x y": "1 % ± 2", "z": "3"}) == filled


def test_with_figures_refuses_names_that_are_not_known():
    with pytest.raises(KeyError, match=r"figure 'nosie' is not known; near are noise"):
        figures.with_figures("<!--figure:nosie-->1<!--end-->", {"noise": "1"})


def test_figures_are_of_the_last_row(tmp_path: Path):
    (tmp_path / "first_step.csv").write_text("model,case,seconds\nmlp,plain,2.69\nmlp,plain,1.26\n")
    assert figure_rows.of_first_steps(Results(tmp_path)) == {"first.mlp.plain": "1.3"}


def test_tables_of_domains_are_those_of_a_recipe_and_its_kinds(tmp_path: Path):
    from recipes.domains.results import COLUMNS

    plain = {"recipe": "finetune", "variant": "plain", "kept_mib": "40", "kept_less": "1", "cpu_ratio": "1"}
    plain |= {"value": "2.5", "value_se": "0.1", "difference": "0", "settings": "method=full size=tiny"}
    packed = {**plain, "variant": "DEFAULT", "kept_mib": "4", "kept_less": "10", "difference": "0.01"}
    lora = {**plain, "settings": "method=lora size=tiny", "size": "context", "memory_mib": "2048", "largest": "4096"}
    lines = [",".join(row.get(column, "") for column in COLUMNS) for row in (plain, packed, lora)]
    (tmp_path / "domains.csv").write_text("\n".join([",".join(COLUMNS), *lines, ""]))
    assert figure_domains.of_domains(Results(tmp_path)) == {
        "domains.finetune.method=lora.plain.largest": "4096",
        "domains.finetune": "\n\n|  | kept, MiB | time of a step | bits per character | difference from plain |\n"
        "|---|---|---|---|---|\n"
        "| plain | 40.0 | 1.00 | 2.5000 ± 0.1000 |  |\n"
        "| `DEFAULT` | 4.0 (10.0 times less) | 1.00 | 2.5000 ± 0.1000 | +0.0100 |\n\n",
        "domains.finetune.method=lora": "\n\n|  | kept, MiB | time of a step | bits per character | "
        "largest `--context` in 2,048 MiB |\n|---|---|---|---|---|\n"
        "| plain | 40.0 | 1.00 | 2.5000 ± 0.1000 | 4,096 |\n\n",
    }
