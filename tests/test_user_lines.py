"""Warnings name a line of the user's code: those of the package go through one function, which looks for it."""

from __future__ import annotations

import ast
import functools
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch import nn

import brevact
from brevact.user_lines import warn

PACKAGE = Path(brevact.__file__).parent


def test_the_package_warns_of_lines_of_users_alone() -> None:
    for path in PACKAGE.rglob("*.py"):
        called = [each.func for each in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(each, ast.Call)]
        names = {each.attr for each in called if isinstance(each, ast.Attribute)}
        assert path.name == "user_lines.py" or not names & {"warn", "warn_explicit"}, path  # user_lines.warn instead


def test_the_line_is_the_one_that_calls_packages_between() -> None:
    code = "def run(call): call()\ndef warns(): warn('note')"
    names = {"__name__": "brevitas.nn", "warn": warn}
    exec(compile(code, "layer.py", "exec"), names)

    @contextmanager
    def block():
        names["warns"]()
        yield

    class Layer(nn.Module):
        def forward(self):
            names["warns"]()

    def enter():
        with block():
            pass

    for call in (names["warns"], functools.partial(names["run"], names["warns"]), Layer(), enter):
        with pytest.warns(UserWarning, match="note") as found:
            call()
        assert {each.filename for each in found} == {__file__}


def test_without_a_line_of_users_the_outermost_is_named() -> None:
    names = {"__name__": "torch.worker", "warn": warn}
    exec(compile("def warns(): warn('note')", "worker.py", "exec"), names)
    with pytest.warns(UserWarning, match="note") as found:
        thread = threading.Thread(target=names["warns"])
        thread.start()
        thread.join()
    assert {Path(each.filename).name for each in found} == {"threading.py"}
