"""The programs in examples/: short, run, one for each row of the front page's table."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

from tests.libraries import marks_of

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
#: Libraries that an example needs beyond the package's own, which `make test-all` installs.
LIBRARIES = {
    "hugging_face": ("accelerate", "transformers"),
    "lora": ("peft", "transformers"),
    "with_lightning": ("lightning",),
}
#: Inductor compiles it, for seconds.
COMPILED = "compiled"
MOST_STATEMENTS = 12


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(
            path,
            id=path.stem,
            marks=pytest.mark.exhaustive if path.stem == COMPILED else marks_of(LIBRARIES.get(path.stem, ())),
        )
        for path in EXAMPLES
    ],
)
def test_example_runs(example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example), run_name="__main__")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_says_what_for(example: Path):
    tree = ast.parse(example.read_text("utf-8"))
    statements = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    assert ast.get_docstring(tree) and len(statements) <= 1 + MOST_STATEMENTS  # with the docstring


def test_each_row_of_the_front_page_has_an_example():
    table = re.search(r"\[start:table\](.*?)\[end:table\]", (ROOT / "README.md").read_text("utf-8"), re.S)
    assert table is not None
    rows = [line for line in table[1].splitlines() if line.startswith("| ")][1:]
    named = [re.search(r"`(\w+)\.py` \|$", row) for row in rows]
    assert all(named), rows
    pages = "".join(path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md"))
    shown = re.findall(r'^``` \{ \.py \}\n--8<-- "examples/(\w+)\.py"', pages, re.M)
    assert sorted(name[1] for name in named if name) == sorted(shown) == [path.stem for path in EXAMPLES]
