"""CONTRIBUTING.md's steps for a new op and a new format work unchanged in a copy of the tree."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
COPIED = ("brevact", "benchmarks", "docs", "scripts", "tests", "recipes", "README.md", "mkdocs.yml", "pyproject.toml")
_PLACE = re.compile(
    r"^(?:# |<!-- )(?P<file>\S+), (?:a new file|(?P<imports>with the imports)|at the end of (?P<name>\w+)"
    r"|before (?P<before>[^;]+);).*\n(?P<code>(?:.*\n)+)$"
)


def _section(title: str) -> str:
    return re.search(rf"^### {title}\n(.*?)^##", PAGE, re.M | re.S)[1]


def _put(tree: Path, block: str) -> str:
    place = _PLACE.match(block)
    assert place is not None, block
    path, code = tree / place["file"], place["code"]
    if place["imports"] is place["name"] is place["before"] is None:
        assert not path.exists()
        path.parent.mkdir(exist_ok=True)
        path.write_text(code, "utf-8")
        return place["file"]
    lines = path.read_text("utf-8").splitlines(keepends=True)
    if place["before"]:
        (line,) = (number for number, line in enumerate(lines) if line.strip() == place["before"])
        code += "\n"
    elif place["imports"]:
        body = ast.parse("".join(lines)).body
        line = max(node.end_lineno for node in body if isinstance(node, ast.Import | ast.ImportFrom))
    else:
        line = next(
            node.value.end_lineno - 1
            for node in ast.parse("".join(lines)).body
            for target in (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)])
            if isinstance(target, ast.Name) and target.id == place["name"]
        )
    path.write_text("".join([*lines[:line], code, *lines[line:]]), "utf-8")
    return place["file"]


def _write(tree: Path, title: str) -> list[str]:
    blocks = re.findall(r"^```(?:python|markdown)\n(.*?)^```", _section(title), re.M | re.S)
    return [_put(tree, block) for block in blocks]


def _follow(tree: Path, title: str) -> tuple[list[str], str]:
    """Follow a section; return the files that it changes and the output of its last command."""
    files = _write(tree, title)
    (commands,) = re.findall(r"^```sh\n(.*?)^```", _section(title), re.M | re.S)
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    said = ""
    for command in commands.replace("\\\n", " ").strip().splitlines():
        done = subprocess.run(
            ["bash", "-c", command.replace("python ", f"{sys.executable} ", 1)],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        said = done.stdout
        assert done.returncode == 0, said[-3000:] + done.stderr[-3000:]
    return files, said


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the tree, its compiled kernels among it."""
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("title", ["Add an op", "Add a format"])
def test_what_is_added_has_a_place(title: str, tree: Path):
    files = _write(tree, title)
    assert files
    for file in files:
        if file.endswith(".py"):
            ast.parse((tree / file).read_text("utf-8"))


@pytest.mark.exhaustive
def test_an_op_that_is_added_as_the_page_says_keeps_the_laws(tree: Path):
    assert "erfcx" not in "".join(path.read_text("utf-8") for path in (ROOT / "brevact").rglob("*.py"))
    files, said = _follow(tree, "Add an op")
    assert files == ["brevact/autograd/ops/smooth.py", "tests/autograd/ops.py"]
    assert int(re.search(r"(\d+) passed", said)[1]) >= 14


@pytest.mark.exhaustive
def test_a_format_that_is_added_as_the_page_says_keeps_the_laws(tree: Path):
    files, said = _follow(tree, "Add a format")
    assert {"brevact/injectors/formats.py", "brevact/api.py", "tests/quantizers/subjects.py"} <= set(files)
    assert int(re.search(r"(\d+) passed", said)[1]) >= 18
    assert "class PowerOfTwoBackward2bit(" in (tree / "brevact" / "quant.pyi").read_text("utf-8")
