"""The faults that the suite is to find can be put in, also where names change, and the tests that find them exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from scripts.fault_places import find, replaced, scopes
from scripts.faults import FAULTS, ROOT

PACKAGE = ROOT / "brevact"
#: A file with places that are alike.
FILE = """
class Ramp:
    def forward(self, x, low):
        if x > low:  # a remark
            return x - low
        elif x > self.high:
            return self.high
        return 0

    def backward(self, x, low):
        return (x -
                low) * self.slope
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A package of one file."""
    (tmp_path / "ramp.py").write_text(FILE, "utf-8")
    return tmp_path


def _changed(folder: Path, scope: str, old: str, new: str, file: str = "ramp.py") -> str:
    return replaced(find(folder, file, scope, old), new)


def test_pieces_are_found_in_the_function_whatever_their_layout(folder: Path):
    assert _changed(folder, "Ramp.backward", "x - low", "x + low") == FILE.replace(
        "x -\n                low", "(x + low)"
    )
    assert "return (x + low)\n" in _changed(folder, "Ramp.forward", "x - low", "x + low")
    assert "elif False:" in _changed(
        folder, "Ramp.forward", "if x > self.high:\n    return self.high", "if False: pass"
    )


def test_pieces_follow_new_names(folder: Path):
    path = folder / "ramp.py"
    path.write_text(FILE.replace("low", "floor").replace("slope", "steepness").replace("x", "given"), "utf-8")
    new = _changed(folder, "Ramp.backward", "(x - low) * self.slope", "(low - x) * self.slope * scale")
    assert "return ((floor - given) * self.steepness * scale)" in new
    path.write_text(FILE.replace("Ramp", "Hinge").replace("backward", "gradient"), "utf-8")
    assert "return (0)" in _changed(folder, "Ramp.backward", "(x - low) * self.slope", "0")
    path.rename(folder / "hinge.py")
    assert "return (0)" in _changed(folder, "Ramp.backward", "(x - low) * self.slope", "0")


def test_pieces_that_are_ambiguous_or_gone_are_refused(folder: Path):
    with pytest.raises(LookupError, match=r"ramp.py: Ramp.forward: 'self.low' occurs 2 times"):
        find(folder, "ramp.py", "Ramp.forward", "self.low")
    with pytest.raises(LookupError, match=r"ramp.py: the module: 'x \*\* 2' occurs 0 times"):
        find(folder, "ramp.py", "", "x ** 2")


def test_faults_are_of_this_tree():
    for fault in FAULTS:
        place = find(PACKAGE, fault.file, fault.scope, fault.old)
        assert place.path == PACKAGE / fault.file and place.kept() == len(place.names), fault.name
        tree = ast.parse(place.path.read_text("utf-8"))
        assert fault.scope in dict(scopes(tree)), fault.name
        assert ast.dump(ast.parse(replaced(place, fault.new))) != ast.dump(tree), fault.name
        assert all((ROOT / "tests" / test).exists() for test in fault.tests), fault.name
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_faults_are_found_where_a_name_changes(tmp_path: Path):
    """A name of each piece, by turns, has another one in all of its file."""
    for turn, fault in enumerate(FAULTS):
        place = find(PACKAGE, fault.file, fault.scope, fault.old)
        names = sorted(place.names) or [fault.scope.rpartition(".")[2]]
        name = names[turn % len(names)]
        whole = re.compile(rf"\b{name}\b")
        path = tmp_path / fault.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(whole.sub(f"{name}_too", place.path.read_text("utf-8")), "utf-8")
        found = find(tmp_path, fault.file, whole.sub(f"{name}_too", fault.scope), fault.old)
        assert found.node.lineno == place.node.lineno, fault.name
        assert ast.unparse(found.node) == whole.sub(f"{name}_too", ast.unparse(place.node)), fault.name
