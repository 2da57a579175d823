"""What a change has to pass: `.ci/run` in an environment of its own, and the same commands in the workflow."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"


def _targets(text: str) -> list[str]:
    """Targets of the calls of make in a script or a workflow."""
    return re.findall(r"^[\s-]*(?:run: )?make (?:VENV=\S+ )?([\w-]+)$", text, re.MULTILINE)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what `.ci/run` reads, in a folder that has an environment already."""
    (tmp_path / ".ci").mkdir()
    for name in (".ci/run", "Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy2(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "mine").touch()
    (tmp_path / ".ci" / "venv").mkdir()
    (tmp_path / ".ci" / "venv" / "of-the-run-before").touch()
    return tmp_path


def test_the_run_sets_up_its_own_environment_and_leaves_venv_alone(checkout: Path):
    dry_run = {**os.environ, "MAKEFLAGS": "n"}  # make prints what it would do
    done = subprocess.run([".ci/run"], cwd=checkout, env=dry_run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (checkout / ".venv").iterdir()] == ["mine"]
    assert not (checkout / ".ci" / "venv").exists()
    assert "-m venv .ci/venv" in done.stdout
    for command in ("ruff check .", "ruff format --check .", "mypy", "pytest -q -n 2 --dist worksteal -m exhaustive"):
        assert f".ci/venv/bin/python -m {command}\n" in done.stdout
    assert not re.search(r"(?<!\S)\.venv/", done.stdout)


def test_the_workflow_runs_the_commands_of_the_run_and_the_versions():
    of_run = _targets((ROOT / ".ci" / "run").read_text("utf-8"))
    assert of_run == ["lint", "test-all"]
    workflow = WORKFLOW.read_text("utf-8")
    assert _targets(workflow) == [*of_run, "test-versions"]
    assert workflow.count("- run: ") == len(of_run) + 1  # and nothing else
