"""Parts of a page that are written anew."""

import pytest

from recipes.errors import RecipeError
from recipes.study.page import replace_part

PAGE = "# A\n\n<!-- study: one -->\nold\n<!-- end -->\n\ntext\n\n<!-- study: one-more -->\n<!-- end -->\nend\n"


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
