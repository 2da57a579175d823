"""Parts of a page that are written anew."""

import re
from pathlib import Path

import pytest

from recipes.errors import RecipeError
from recipes.study import noise_along, retrofit_study
from recipes.study.definitions import STUDIES
from recipes.study.page import replace_part

PAGE = "# A\n\n<!-- study: one -->\nold\n<!-- end -->\n\ntext\n\n<!-- study: one-more -->\n<!-- end -->\nend\n"


def test_each_study_has_a_page_in_the_documentation():
    docs = Path(__file__).parents[3] / "docs"
    names = [*STUDIES, noise_along.NAME, retrofit_study.NAME]
    assert sorted(path.stem for path in (docs / "studies").glob("*.md")) == sorted(names)
    summary = (docs / "studies.md").read_text("utf-8")
    for name in names:
        parts = re.findall(r"<!-- study: (\S+) -->.*?<!-- end -->", (docs / "studies" / f"{name}.md").read_text(), re.S)
        assert parts == [name] and f"](studies/{name}.md)" in summary


def test_pages_of_studies_write_intervals_in_brackets():
    """On all pages ± is one standard error (docs/measured.md)."""
    for path in (Path(__file__).parents[3] / "docs" / "studies").glob("*.md"):
        assert "±" not in path.read_text("utf-8"), path


def test_replace_part_leaves_the_rest(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    for _ in range(2):
        replace_part(page, "one", r"new \1")
    assert page.read_text() == PAGE.replace("old", "\nnew \\1\n")


def test_replace_part_needs_the_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    with pytest.raises(RecipeError, match="has no part <!-- study: on -->"):
        replace_part(page, "on", "new")
    assert page.read_text() == PAGE
