from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from brevact import autograd
from brevact.autograd.expressions import Derived
from brevact.autograd.saved import Decoder

FOLDER = Path(autograd.__file__).parent
#: Of the protocol; a format's decoder may have more attributes, for readers of that format.
ATTRIBUTES = {name for name in vars(Decoder) if not name.startswith("_")}


@functools.cache
def _nodes() -> list[tuple[str, ast.AST]]:
    """The parts of each module's source, with the path of the module."""
    files = sorted(FOLDER.rglob("*.py"))
    return [(str(file.relative_to(FOLDER)), node) for file in files for node in ast.walk(ast.parse(file.read_text()))]


def _classes() -> list[tuple[str, ast.ClassDef]]:
    return [(file, node) for file, node in _nodes() if isinstance(node, ast.ClassDef)]


def test_what_decodes_derives_from_the_base_class():
    names, before = {"Decoder"}, 0
    while len(names) > before:
        before = len(names)
        names |= {node.name for _, node in _classes() if any(ast.unparse(base) in names for base in node.bases)}
    decoders = [(file, node.name) for file, node in _classes() if _decodes(node)]
    assert len(decoders) > 15
    assert [(file, name) for file, name in decoders if name not in names] == []


def _decodes(node: ast.ClassDef) -> bool:
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "decode"]
    return any([arg.arg for arg in method.args.args] == ["self", "tensors"] for method in methods)


def test_nobody_asks_whether_a_decoder_has_an_attribute():
    calls = [
        (file, ast.unparse(node))
        for file, node in _nodes()
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and len(node.args) > 1
        if isinstance(node.args[1], ast.Constant) and node.args[1].value in ATTRIBUTES
    ]
    assert calls == []


def test_the_base_class_describes_a_decoder_without_a_loss():
    decoder = Decoder()
    assert decoder.quality.is_exact and decoder.is_read_again(())
    assert not (decoder.lasts or decoder.allows_double_backward or decoder.statistics or decoder.decodes_through)


def test_fields_of_derived_tensors_take_no_default_from_the_base_class():
    with pytest.raises(TypeError, match="quality"):
        Derived(None, (), (), None, None)
