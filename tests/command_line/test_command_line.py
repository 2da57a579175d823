"""``python -m brevact``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from brevact.command_line import doctor
from brevact.command_line.main import main


def test_doctor_finds_the_bytes_of_plain_torch_and_exits_with_0(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "cpu: kernels of Numba, 27 cases with the bytes of plain torch" in text
    assert "times less; its forward pass is unchanged" in text and "WRONG" not in text
    assert text.endswith("brevact works here.\n")


def test_doctor_exits_with_1_where_something_is_wrong(capsys):
    with torch.no_grad():  # in which no step can be taken
        assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "WRONG  step: RuntimeError: " in text and text.endswith("Something is wrong; see above.\n")


@pytest.mark.exhaustive
def test_doctor_says_what_to_do_where_numba_does_not_import(tmp_path):
    (tmp_path / "numba.py").write_text("raise ImportError('broken')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
    environment["NUMBA_CACHE_DIR"] = str(tmp_path / "empty")
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "brevact", "doctor"],
        env=environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert found.returncode == 0, found.stderr
    assert "note   cpu: plain torch quantizes" in found.stdout and "fix: python -c 'import numba'" in found.stdout


def test_doctor_says_that_triton_needs_a_c_compiler(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert any(each.state == doctor.WRONG and "install gcc" in each.fix for each in doctor._compiler())


def test_plan_names_doctor_where_transformers_do_not_import(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('broken')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}"}
    command = [sys.executable, "-m", "brevact", "plan", "Qwen3-8B"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 2 and found.stderr.splitlines()[-1].startswith("error: MODEL Qwen3-8B")
    assert found.stderr.endswith("python -m brevact doctor finds libraries that do not import\n")
