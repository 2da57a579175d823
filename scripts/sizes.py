"""Lines, and lines of code, of each folder.

python -m scripts.sizes
"""

from __future__ import annotations

import ast
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("brevact", "tests", "recipes", "benchmarks", "scripts", "examples")
_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def lines_of(path: Path) -> tuple[int, int]:
    """Lines of a file, and those that hold code: without blank lines, comments and docstrings."""
    with tokenize.open(path) as file:
        text = file.read()
    code = {
        line
        for token in tokenize.generate_tokens(iter(text.splitlines(keepends=True)).__next__)
        if token.type not in _LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(text.splitlines()), len(code)


if __name__ == "__main__":
    for name in FOLDERS:
        inside = sorted(path.name for path in (ROOT / name).iterdir() if any(path.rglob("*.py")))
        for folder in [name, *(f"{name}/{each}" for each in inside if (ROOT / name / each).is_dir())]:
            sizes = [lines_of(path) for path in (ROOT / folder).rglob("*.py")]
            print(f"{folder:32}{sum(size[0] for size in sizes):8,}{sum(size[1] for size in sizes):8,}")
