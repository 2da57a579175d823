"""Run a page of the documentation that is one program, cell by cell, and write each cell's output below it.

    python -m scripts.notebook docs/notebook.md --folder docs/notebook

A cell is a block of Python; a block of text right behind it is its output. Cells share their names, and run in the
folder that is named, where pictures are written.
`jupytext --to ipynb PAGE` makes a notebook of such a page.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

_CELL = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.M | re.S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="where cells run")
    options = parser.parse_args()
    text = options.page.read_text("utf-8")
    options.page.write_text(with_outputs(text, run_cells(text, options.folder)), "utf-8")


def run_cells(text: str, folder: Path, changes: Mapping[str, str] | None = None) -> list[str]:
    """Run the cells of a page in order.

    Args:
        text: of the page.
        folder: where they run; made if it is missing.
        changes: replacements of parts of the code, for a small run; each part must occur.

    Returns:
        The output of each.

    Raises:
        ValueError: a part to be changed does not occur.
    """
    codes = [found["code"] for found in _CELL.finditer(text)]
    for old, new in (changes or {}).items():
        if not any(old in code for code in codes):
            raise ValueError(f"changes={old!r} is in no cell of the page; write the page or the change anew")
        codes = [code.replace(old, new) for code in codes]
    folder.mkdir(parents=True, exist_ok=True)
    names: dict[str, object] = {"__name__": "__notebook__"}
    outputs = []
    with inside(folder):
        for number, code in enumerate(codes, 1):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, f"<cell {number}>", "exec"), names)
            outputs.append(printed.getvalue())
    return outputs


def with_outputs(text: str, outputs: list[str]) -> str:
    """The page with these outputs in place of its own."""
    left = iter(outputs)

    def cell(found: re.Match[str]) -> str:
        printed = next(left).rstrip()
        return f"```python\n{found['code']}```\n" + (f"\n```text\n{printed}\n```\n" if printed else "")

    return _CELL.sub(cell, text)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder for a while."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


if __name__ == "__main__":
    main()
