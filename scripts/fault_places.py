"""Where a change goes: a piece of Python inside a function that is named, whatever the names in it are.

A place is a file, the function or class in it (``Dropout.backward``, empty for the module), and a piece of code there,
an expression or a statement. Code is compared as its syntax tree, so that layout and comments do not matter. Variables,
attributes and functions may have other names than in the piece: of places of the same shape, the one with most of its
names is meant, and what replaces it is written in the names that are there. A function that has another name, or a file
that has moved, is found by the piece.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NAMES = {
    ast.Name: "id",
    ast.Attribute: "attr",
    ast.arg: "arg",
    ast.keyword: "arg",
    ast.FunctionDef: "name",
    ast.ClassDef: "name",
    ast.alias: "name",
}
_DEFINITIONS = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)


class Place(NamedTuple):
    """A node that a piece of code matches, in a file, and the names that stand for those of the piece."""

    path: Path
    node: ast.expr | ast.stmt
    names: dict[str, str]

    def kept(self) -> int:
        """How many of the piece's names are here as well."""
        return sum(old == new for old, new in self.names.items())


def scopes(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Yield the module, under the empty name, and its functions and classes by their qualified names."""
    yield "", tree
    open_nodes: list[tuple[str, ast.AST]] = [("", tree)]
    while open_nodes:
        outer, node = open_nodes.pop()
        for child in ast.iter_child_nodes(node):
            name = outer
            if isinstance(child, _DEFINITIONS):
                name = f"{outer}.{child.name}" if outer else child.name
                yield name, child
            open_nodes.append((name, child))


def parsed(code: str) -> ast.AST:
    """Return the tree of one expression or one statement."""
    (statement,) = ast.parse(textwrap.dedent(code)).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def matches(piece: ast.AST, node: ast.AST, names: dict[str, str]) -> bool:
    """Whether a node has the shape of a piece; names of the piece are then in ``names``, with those of the node.

    Args:
        piece: what is looked for.
        node: a node of a file.
        names: what names of the piece stand for so far: different ones for different names.
    """
    if type(piece) is not type(node):
        return False
    own = _NAMES.get(type(piece))
    for field, wanted in ast.iter_fields(piece):
        found = getattr(node, field, None)
        if field in ("ctx", "type_comment", "kind"):
            continue
        if field == own and isinstance(wanted, str):
            if not isinstance(found, str) or not _bind(wanted, found, names):
                return False
        elif isinstance(wanted, list):
            if len(wanted) != len(found) or not all(map(_matches_in(names), wanted, found)):
                return False
        elif not _matches_in(names)(wanted, found):
            return False
    return True


def _matches_in(names: dict[str, str]):
    def compare(wanted: object, found: object) -> bool:
        if isinstance(wanted, ast.AST):
            return isinstance(found, ast.AST) and matches(wanted, found, names)
        return type(wanted) is type(found) and wanted == found

    return compare


def _bind(name: str, found: str, names: dict[str, str]) -> bool:
    if name in names:
        return names[name] == found
    if found in names.values():
        return False
    names[name] = found
    return True


def _places(piece: ast.AST, path: Path, scope: ast.AST) -> Iterator[Place]:
    for node in ast.walk(scope):
        names: dict[str, str] = {}
        if isinstance(node, ast.expr | ast.stmt) and matches(piece, node, names):
            yield Place(path, node, names)


def find(folder: Path, file: str, scope: str, code: str) -> Place:
    """Return the one place of a piece of code: as written, or with as many of its names as anywhere.

    Args:
        folder: the package.
        file: where the function is, below the folder; if there is no such file, all of them are searched.
        scope: qualified name of the function or class, empty for the module; if there is none, the piece is looked for
            wherever it may be in the file.
        code: an expression or a statement.

    Raises:
        LookupError: the piece occurs nowhere, or more than one place is as near to it.
    """
    piece = parsed(code)
    paths = [folder / file] if (folder / file).exists() else sorted(folder.rglob("*.py"))
    trees = [(path, ast.parse(path.read_text("utf-8"))) for path in paths]
    named = [(path, node) for path, tree in trees for name, node in scopes(tree) if name == scope]
    for inside in (named, trees):
        places = [place for path, node in inside for place in _places(piece, path, node)]
        if places:
            most = max(place.kept() for place in places)
            places = [place for place in places if place.kept() == most]
            break
    if len(places) != 1:
        raise LookupError(f"{file}: {scope or 'the module'}: {code!r} occurs {len(places)} times")
    return places[0]


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def generic_visit(self, node: ast.AST) -> ast.AST:
        field = _NAMES.get(type(node))
        if field is not None and isinstance(name := getattr(node, field), str):
            setattr(node, field, self._names.get(name, name))
        return super().generic_visit(node)


def replaced(place: Place, new: str) -> str:
    """Return the text of a file with another piece of code in a place, in the names of the file.

    Args:
        place: of :func:`find`.
        new: an expression or a statement, in the names of the piece that was looked for.
    """
    text = place.path.read_text("utf-8")
    piece = parsed(new)
    code = ast.unparse(_Renamed(place.names).visit(piece))
    lines = text.encode().splitlines(keepends=True)
    node = place.node
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    code = f"({code})" if isinstance(piece, ast.expr) else code.replace("\n", "\n" + " " * node.col_offset)
    if lines[first][node.col_offset :].startswith(b"elif"):
        code = f"el{code}"
    return b"".join([*lines[:first], before, code.encode(), after, *lines[last + 1 :]]).decode()
