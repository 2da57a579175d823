"""``python -m brevact``."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from brevact.command_line import doctor
from brevact.command_line.main import main

SHAPE = ["--shape", "64,64"]
MODEL = "tests.command_line.models:net"
IDS = "tests.command_line.models:embedded"


@pytest.fixture(autouse=True)
def quiet_again():
    """Restores the level that `--verbose` sets for a process."""
    yield
    logging.getLogger("brevact").setLevel(logging.NOTSET)


def test_doctor_finds_the_bytes_of_plain_torch_and_exits_with_0(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "cpu: kernels of Numba, 39 cases with the bytes of plain torch" in text
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


def test_report_measures_a_model_of_an_import_path(tmp_path, capsys):
    plot, table = tmp_path / "memory.png", tmp_path / "memory.csv"
    files = ["--plot", str(plot), "--csv", str(table)]
    assert main(["report", MODEL, *SHAPE, "--policy", "StochBackward2bit", "--explain", *files]) == 0
    text = capsys.readouterr().out
    assert "0      Linear" in text and "gelu" in text
    assert plot.read_bytes().startswith(b"\x89PNG") and table.read_text().startswith("layer,kind,plain_bytes")
    assert main(["--verbose", "report", MODEL, *SHAPE, "--policy", "2x", "--dtype", "bfloat16"]) == 0
    assert "2x is fitted to random batches here" in capsys.readouterr().out


def test_report_takes_the_dtype_of_the_model(capsys):
    assert main(["report", f"{MODEL}_in_halves", *SHAPE]) == 0
    of_halves = capsys.readouterr().out
    assert main(["report", MODEL, *SHAPE, "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == of_halves


@pytest.mark.parametrize("content", ["[]", '{"architectures": "GPT2Model"}', '{"architectures": [3]}'])
def test_report_refuses_a_folder_with_another_config(tmp_path, capsys, content):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(content)
    assert main(["report", str(tmp_path), *SHAPE]) == 2
    assert "config.json is not that of a Hugging Face model" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_report_measures_a_folder_of_hugging_face(tmp_path, capsys):
    from tests.trainers.running import gpt2

    config = gpt2().config.to_dict() | {"architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["report", str(tmp_path), "--shape", "4,64"]) == 0
    assert "transformer.h.0.attn" in capsys.readouterr().out
    for name in ("GPT9", "is_torch_available"):  # a name of transformers, and no model
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
        assert main(["report", str(tmp_path), "--shape", "4,64"]) == 2
        assert f"transformers has no model {name}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([MODEL, "--shape", "4,x"], "--shape 4,x: accepted are integers"),
        ([MODEL, "--shape", "0,4"], "--shape 0,4: accepted are integers of at least 1"),
        (
            [IDS, *SHAPE, "--dtype", "int64", "--ids", "500"],
            "--shape 64,64: Sequential does not run on such a batch: ind",
        ),
        ([IDS, *SHAPE, "--dtype", "int64", "--ids", "0"], "--ids 0: accepted is an integer of at least 1"),
        ([MODEL, *SHAPE, "--dtype", "complex64"], "--shape 64,64: Sequential does not run on such a batch"),
        ([":net", *SHAPE], "MODEL :net is no folder, and not of the form"),
        (["nothing", *SHAPE], "MODEL nothing is no folder, and not of the form package.module:callable"),
        (["no_such_module:net", *SHAPE], "No module named 'no_such_module'"),
        ([f"{MODEL}work", *SHAPE], "has no attribute 'network'"),
        (["builtins:list", *SHAPE], "makes a list; accepted is a callable that makes a torch module"),
        ([MODEL, *SHAPE, "--policy", "defualt"], "nearest: DEFAULT"),
        ([MODEL, *SHAPE, "--dtype", "float33"], "--dtype float33: accepted is a dtype"),
        ([MODEL, *SHAPE, "--device", "cuda:99"], "--device cuda:99 cannot be used here"),
        ([MODEL, "--shape", "4,65"], "--shape 4,65: Sequential does not run on such a batch: mat1 and mat2"),
        ([MODEL, *SHAPE, "--plot", "no/such/folder.png"], "No such file or directory"),
    ],
)
def test_report_refuses_with_status_2(words, message, capsys):
    assert main(["report", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("module", ["torchvision", "torchvision.models", "a_module_on_torchvision"])
def test_report_says_what_to_do_where_torchvision_does_not_import(module, tmp_path, monkeypatch, capsys):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator nms does not exist\\nat all')")
    (tmp_path / "a_module_on_torchvision.py").write_text("import torchvision")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["report", f"{module}:resnet18", *SHAPE]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "RuntimeError: operator nms does not exist (" in lines[0]
    assert lines[0].endswith(f"line 1); torchvision does not work here: {doctor.TORCHVISION}")


@pytest.mark.parametrize("code", ["1 / 0", "def net(): return 1 / 0"])
def test_report_names_the_line_where_a_model_fails(code, tmp_path, monkeypatch, capsys):
    (tmp_path / "a_module_that_fails.py").write_text(f"\n{code}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_module_that_fails", raising=False)
    assert main(["report", "a_module_that_fails:net", *SHAPE]) == 2
    text = capsys.readouterr().err
    assert "MODEL a_module_that_fails:net cannot be made: ZeroDivisionError: division by zero" in text
    assert "a_module_that_fails.py, line 2)" in text and len(text.splitlines()) == 1


def test_doctor_says_that_triton_needs_a_c_compiler(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert any(each.state == doctor.WRONG and "install gcc" in each.fix for each in doctor._compiler())
