"""Figures and tables of pages are those of the rows in docs/."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recipes.study import LEAST_PAIRS
from scripts import figures
from scripts.pictures import digest

FOUND = figures.figures()
#: Heads of tables whose numbers are measured.
_MEASURED = re.compile(r"\b(MiB|ms|seconds|times less|step|speed|noise|error|accuracy|loss)\b")


#: Numbers that are defined, not measured: settings, sizes, bounds that other tests hold.
DEFINED = {"95 %", "96 MiB", "2 GiB", "2 MiB", "24 times", "80 GiB", "0.01", "0.1", "-0.0"}
_UNITS = r"times|-fold|[KMG]iB|GB|ms|ns|[µu]s|(?:nano|micro|milli)?seconds|minutes|hours|points|pairs"
_WORDS = "two|three|four|five|six|seven|eight|nine|ten|twenty|thirty|ninety"
_TYPED = re.compile(
    rf"(?<![\w.,^/\[{{-])[-+]?\d[\d,]*(?:\.\d+)?(?:\s?(?:{_UNITS})\b|\s?%|x\b)|(?<![\w.:/-])[-+]?\d+\.\d+(?![\w-]|\.\d)"
    rf"|\b(?i:{_WORDS}) (?:\w+ )?(?:models|networks|formats|comparisons)\b"  # counts of rows
)


def _prose(text: str) -> str:
    """A page without code, links, marked figures and tables, but for rows with a percentage."""
    for left_out in (
        r"^```.*?^```",
        r"<!--figure:.*?<!--end-->",
        r"`[^`]*`",
        r"\]\([^)]*\)",
        r"(Python|PyTorch|Triton|NumPy below) [\d.]+",
        r"^\|(?![^\n]*\d\s?%)[^\n]*",
    ):
        text = re.sub(left_out, "", text, flags=re.S | re.M)
    return text


@pytest.mark.parametrize("page", figures.pages(), ids=lambda path: path.name)
def test_figures_of_a_page_are_those_of_the_rows(page: Path):
    """`python -m scripts.figures` writes them; one that is defined, not measured, joins `DEFINED`."""
    text = page.read_text("utf-8")
    assert figures.with_figures(text, FOUND) == text
    # A comment at the start of a line ends the paragraph on the site; a table's mark has a line of its own.
    assert re.findall(r"^ *<!--figure:[^>\n]*-->(?!\n)", text, re.M) == []
    for name, interval in re.findall(r"<!--figure:(\w+\.[^>]*)\.\w+-->[^<]*\[([^<]*)\]", text):
        assert int(FOUND[f"{name}.pairs"]) >= LEAST_PAIRS, interval
    assert [found[0] for found in _TYPED.finditer(_prose(text)) if found[0] not in DEFINED] == []
    text = re.sub(r"<!--figure:.*?<!--end-->", "", text, flags=re.S)
    for head, body in re.findall(r"^(\|.*\|)\n\|[-| :]+\|\n((?:\|.*\|\n)+)", text, re.M):
        cells = [cell.strip() for line in body.splitlines() for cell in line.strip("|").split("|")]
        typed = [cell for cell in cells if re.fullmatch(r"[-+]?\d[\d,]*\.\d+( .*)?", cell)]
        assert not (typed and _MEASURED.search(head)), f"{head}\n{typed}: fill the table from rows"


@pytest.mark.parametrize("name", figures.tables())
def test_a_table_and_its_picture_are_those_of_the_rows(name: str):
    """`python -m scripts.figures && python -m scripts.pictures` writes them."""
    assert (figures.DOCS / "tables" / f"{name}.csv").read_text("utf-8") == figures.as_csv(figures.tables()[name])
    assert digest(name) in (figures.DOCS / "pictures" / f"{name}.svg").read_text("utf-8")


def test_readme_has_figures():
    assert len(figures.names_on((figures.ROOT / "README.md").read_text("utf-8"))) >= 8


@pytest.mark.parametrize(
    "name, least",
    [("EfficientNetV2-S.DEFAULT", 20), ("EfficientNetV2-S.RECOMPUTE", 56), ("conv-BN-ReLU W4A4.StochBackward2bit", 19)],
)
def test_the_last_rows_keep_as_few_bytes_as_promised(name: str, least: int):
    assert float(FOUND[f"bench.{name}.less"]) >= least


@pytest.mark.parametrize(
    "name, most",
    [
        ("EfficientNetV2-S.RECOMPUTE", 0.010),
        ("ResNet-50.RECOMPUTE", 0.001),
        ("ViT-S.RECOMPUTE", 0.00214 + 5 * 0.00016),  # at 29828fd1, and five standard errors
    ],
)
def test_the_last_rows_add_as_little_noise_as_promised(name: str, most: float):
    assert float(FOUND[f"bench.{name}.noise"]) <= most


def test_the_last_row_of_a_quantized_net_grows_by_as_little_as_promised():
    assert float(FOUND["bench.MobileNet W4A4.DEFAULT.growth"]) <= 246


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
    lines = figures.Table(("ResNet-50",), ("DEFAULT", "RECOMPUTE"), ("kept", "peak", "step")).lines(found)
    heads, *rows = lines
    assert heads == ["model", "policy", "kept, MiB", "peak, MiB", "step"] and rows == [
        ["ResNet-50", "DEFAULT", "11.0", "", "1.50"]
    ]
