"""The interface as a type checker sees it: a user's file passes ``mypy --strict``, and mistakes in calls are found."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import nn

import brevact
from tests import user_code

ROOT = Path(brevact.__file__).parents[1]
MISTAKES = """
import torch
from torch import nn

import brevact
import brevact.nn as bnn
from brevact import StochBackward2bit

model = nn.Sequential()
brevact.quantize_backward(StochBackward2bit, model)  # type-var
brevact.quantize_backward(model, "StochBackward2bit")
brevact.quantize_backward(model, {"*": "StochBackward2bit"})  # dict-item
brevact.quantize_backward(model, 2)  # arg-type
brevact.restore_backward(StochBackward2bit)  # type-var
brevact.memory_report(torch.zeros(3), model)  # arg-type
brevact.memory_report(model, 3)  # arg-type
brevact.quantizer("StochBackward2bit")  # arg-type
brevact.quantizer(StochBackward2bit).quantise(torch.zeros(3))  # attr-defined
brevact.backward_quant(3)  # arg-type
brevact.memory_report(model, torch.zeros(3)).saved  # attr-defined
brevact.MixSchedule(model, 3)  # arg-type
brevact.Policy("*")  # arg-type
bnn.ReLU(act_quant="StochBackward2bit")  # arg-type
brevact.quantize_backward(model, StochBackward2bit).foo()  # operator
"""


@pytest.fixture(scope="module")
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int, str]]:
    """File, line and code of mypy's findings, in one run for both files; pytest's cache keeps torch's types."""
    mistakes = tmp_path_factory.mktemp("typing") / "mistakes.py"
    mistakes.write_text(MISTAKES)
    has_cache = request.config.pluginmanager.has_plugin("cacheprovider")
    cache = request.config.cache.mkdir("mypy") if has_cache else tmp_path_factory.mktemp("mypy")
    options = ["--strict", "--follow-imports=silent", "--config-file=", "--no-error-summary", f"--cache-dir={cache}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "tests/user_code.py", str(mistakes)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode in (0, 1) and not done.stderr, done.stderr
    found = re.findall(r"^(.*?):(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    return list(dict.fromkeys((Path(file).name, int(line), code) for file, line, code in found))


@pytest.mark.exhaustive
def test_a_users_file_passes_strict_checks(checked):
    assert [error for error in checked if error[0] == "user_code.py"] == []


@pytest.mark.exhaustive
def test_mistakes_in_calls_are_found(checked):
    lines = enumerate(MISTAKES.splitlines(), 1)
    expected = [("mistakes.py", number, line.partition("# ")[2]) for number, line in lines if "# " in line]
    assert [error for error in checked if error[0] == "mistakes.py"] == expected


def test_the_users_file_runs(tmp_path):
    assert len(user_code.layers()) == 5
    names = {
        "0": nn.Linear(8, 8),
        "1": nn.Linear(8, 8),
        "2": nn.BatchNorm2d(8),
        "3": nn.LayerNorm(8),
        "head": nn.Linear(8, 8),
    }
    model = nn.Sequential(OrderedDict(names))
    assert user_code.policies(model) is model
    net, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU()), torch.randn(64, 64)
    assert user_code.regions(net, x).requires_grad
    assert user_code.tensors(x).shape == x.shape
    assert user_code.settings() == (4096, torch.bfloat16)
    brevact.quantize_backward(net, brevact.StochBackward2bit4bitMix)
    assert user_code.memory(net, x, tmp_path) > 0
    assert user_code.schedule(net, 4) == 0.1
