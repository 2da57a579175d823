"""No circles among the modules of the package, annotations included.

An edge is every import of a module by name: at the top, inside of a function, and under ``TYPE_CHECKING``. The packages
around an imported module, which Python runs first, are no edges: ``brevact`` itself imports all that is below it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import brevact

PACKAGE = Path(brevact.__file__).parent


def _name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.AST, modules: set[str]) -> Iterator[str]:
    """Names of the package's modules that a module imports; of names in a module, that module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from (name for name in (inner if inner in modules else node.module,) if name in modules)


def test_imports_make_no_circle():
    paths = {_name_of(path): path for path in PACKAGE.rglob("*.py")}
    graph = {
        name: {other for other in _imports(ast.parse(path.read_text("utf-8")), set(paths)) if other != name}
        for name, path in paths.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError("imports make a circle: " + " <- ".join(error.args[1])) from None
