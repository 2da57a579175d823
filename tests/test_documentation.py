"""Every Python snippet of the README and of the pages in docs/ runs as it stands."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import brevact
import brevact.api
import brevact.nn
from brevact.policy.files import LEAVES
from scripts.notebook import run_cells

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
#: The page whose snippets are one program.
NOTEBOOK = DOCS / "notebook.md"
#: Of all pages of the site but the API's, whose reference and changelog stand in other files.
MOST_PAGES, MOST_WORDS = 12, 20_000

SNIPPETS = [
    pytest.param(snippet, id=f"{page.name} {number}")
    for page in PAGES
    if page != NOTEBOOK
    for number, snippet in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.M | re.S), 1)
]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippet_runs(snippet: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "<snippet>", "exec"), {})


@pytest.mark.exhaustive
def test_the_notebook_runs(tmp_path: Path):
    text = NOTEBOOK.read_text("utf-8")
    outputs = run_cells(text, tmp_path)
    shown = re.findall(r"^```text\n(.*?)^```", text, re.M | re.S)
    # all but numbers, which depend on the machine
    assert [re.sub(r"[-\s\d.]+", " ", each).strip() for each in outputs if each] == [
        re.sub(r"[-\s\d.]+", " ", each).strip() for each in shown
    ]
    assert "same outputs: True" in outputs[2] and [bool(output) for output in outputs] == [False, *[True] * 5]
    assert {path.name for path in tmp_path.iterdir()} == {"memory.png"}
    noise = [float(value) for value in re.findall(r"noise (\d\.\d+)", outputs[3])]
    assert 0 < noise[0] < noise[1]


def test_pages_are_few_and_short():
    pages = [page for page in PAGES[1:] if page.parent == DOCS and page.stem not in ("api", "changelog")]
    assert len(pages) <= MOST_PAGES
    assert sum(len(page.read_text("utf-8").split()) for page in pages) <= MOST_WORDS


def test_pages_have_snippets():
    assert len(SNIPPETS) >= 8 and any("README" in case.id for case in SNIPPETS)


def _with_parts(page: Path) -> str:
    """The text of a page, with the parts of other pages that the site puts into it."""

    def part(found: re.Match[str]) -> str:
        text = (ROOT / found[1]).read_text("utf-8")
        return text.partition(f"[start:{found[2]}]")[2].partition(f"[end:{found[2]}]")[0] if found[2] else text

    return re.sub(r'^--8<-- "(\S+\.md)(?::(\w+))?"$', part, page.read_text("utf-8"), flags=re.M)


def test_links_of_pages_lead_to_files():
    """The site's own check (``make docs``) sees places on pages, too."""
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)#\s]+)", _with_parts(page))]
    assert [each for each in links if "://" not in each[1] and not (each[0].parent / each[1]).exists()] == []


def test_every_page_is_in_the_navigation():
    navigation = set(re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M))
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES[1:]}
    assert navigation == pages


def test_the_page_of_limits_quotes_errors_of_the_source():
    source = "".join(path.read_text("utf-8") for path in (ROOT / "brevact").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # of literals that go on in the next line
    page = (DOCS / "how.md").read_text("utf-8")
    quotes = re.findall(r"^\| .*? \| `(.*?)` \|", page[page.index("{ #raises }") :], re.M)
    parts = [part for quote in quotes for part in re.split(r"\s*\.\.\.\s*", quote) if part]
    assert len(quotes) >= 15 and [part for part in parts if part not in source] == []


def test_api_page_has_every_public_name():
    page = "".join(path.read_text("utf-8") for path in (DOCS / "api.md", *(DOCS / "api").glob("*.md")))
    named = re.findall(r"^::: brevact\.((?!trainers)\S+)", page, re.M)
    leading = [name.removeprefix("quant.") for name in named if name.startswith("quant.")]
    assert set(leading) == {*brevact.__all__} & LEAVES.keys()
    assert f"^({'|'.join(leading)})$" in page  # of brevact.quant, which has the others
    modules = {"quant", *(f"distributed.{name}" for name in brevact.distributed.__all__)}
    assert set(named) == {*PUBLIC} - LEAVES.keys() | modules | {f"quant.{name}" for name in leading}


def test_api_page_lists_the_layers():
    rows = re.findall(r"^\| [A-Z].*? \| (`.*) \|$", (DOCS / "api" / "nn.md").read_text("utf-8"), re.M)
    assert sorted(re.findall(r"`(\w+)`", "".join(rows))) == sorted(brevact.nn.__all__)


PUBLIC = {
    name: found for name, found in vars(brevact.api).items() if not name.startswith("_") and name != "distributed"
}
PUBLIC["distributed.quantized_hook"] = brevact.distributed.quantized_hook


def test_public_names_have_a_docstring_and_an_example():
    """The examples run with the suite (``--doctest-modules``); tests/injectors/test_leaves.py checks leaves."""
    for name, found in PUBLIC.items():
        documentation = inspect.getdoc(found) or ""
        assert ">>>" in documentation or name in LEAVES, name
        if inspect.isfunction(found):
            missing = [each for each in inspect.signature(found).parameters if f"{each}: " not in documentation]
            assert not missing and "Returns:" in documentation and "Raises:" in documentation, name
