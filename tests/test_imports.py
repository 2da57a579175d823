"""No circles among the modules of the package, and no imports upwards.

Edges are all imports by name but those of annotations; packages around an imported module, which Python runs first,
are none: ``brevact`` itself imports all that is below it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import brevact

PACKAGE = Path(brevact.__file__).parent
#: Parts of the package, a row a layer: a module imports from its own layer and from those above it in this list.
LAYERS = (
    ("private_names", "geometry", "heap", "user_lines", "version"),
    ("cpu_kernels", "triton_kernels"),
    ("quantizers",),
    ("arguments", "autograd", "compiler", "cuda_graphs", "qat", "tables"),
    ("injectors", "quant"),
    ("nn",),
    ("policy",),
    ("reports",),
    ("bit_widths",),
    ("distributed",),
    ("api", "trainers"),
    ("__main__", "command_line"),
)


def _layer_of(name: str) -> int:
    part = name.split(".")[1]
    return next(place for place, layer in enumerate(LAYERS) if part in layer)


def _imports(tree: ast.AST, modules: set[str]) -> Iterator[str]:
    """Names of the package's modules that a module imports; of names in a module, that module."""
    guards = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    of_types = {inner for node in guards for part in node.body for inner in ast.walk(part)}
    for node in ast.walk(tree):
        if node in of_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from (name for name in (inner if inner in modules else node.module,) if name in modules)


def _graph() -> dict[str, set[str]]:
    found = {path.relative_to(PACKAGE.parent).with_suffix(""): path for path in PACKAGE.rglob("*.py")}
    paths = {".".join(place.parts).removesuffix(".__init__"): path for place, path in found.items()}
    return {
        name: {other for other in _imports(ast.parse(path.read_text("utf-8")), set(paths)) if other != name}
        for name, path in paths.items()
    }


def test_imports_point_down_and_make_no_circle():
    graph = _graph()
    below = {name: others - {"brevact"} for name, others in graph.items() if name != "brevact"}
    assert [(name, other) for name in below for other in below[name] if _layer_of(other) > _layer_of(name)] == []
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError("imports make a circle: " + " <- ".join(error.args[1])) from None


def test_nothing_in_the_package_is_made_for_tests():
    for path in PACKAGE.rglob("*.py"):
        assert "unittest" not in path.read_text("utf-8") and "MagicMock" not in path.read_text("utf-8"), path
