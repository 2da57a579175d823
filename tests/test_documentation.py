"""Every Python snippet of the README and of the pages in docs/ runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
SNIPPETS = [
    pytest.param(snippet, id=f"{page.name} {number}")
    for page in PAGES
    for number, snippet in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S), 1)
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet_runs(snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "<snippet>", "exec"), {})


def test_readme_has_snippets():
    assert sum("README" in case.id for case in SNIPPETS) >= 4
