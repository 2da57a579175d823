"""Private names of other libraries: looked up in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from brevact.private_names import lookup

PACKAGE = Path(lookup.__file__).parents[1]
LIBRARIES = ("torch", "brevitas", "numba", "llvmlite", "triton")
#: Modules whose names without an underscore are documented.
DOCUMENTED = {
    *("torch", "torch.autograd", "torch.autograd.forward_ad", "torch.autograd.graph", "torch.nn", "torch.nn.attention"),
    *("torch.nn.functional", "torch.nn.modules.module", "torch.nn.parameter", "torch.overrides", "torch.utils.hooks"),
    *("torch.optim.optimizer", "torch.utils.data", "torch.utils.checkpoint", "torch.distributed", "torch.library"),
    *(
        "brevitas.config",
        "brevitas.inject",
        "brevitas.inject.enum",
        "brevitas.nn",
        "brevitas.quant",
        "brevitas.quant_tensor",
    ),
    *("numba", "numba.extending", "llvmlite.ir", "llvmlite.binding", "triton", "triton.language"),
}
#: Attributes of public classes, read where they are needed.
ATTRIBUTES = set(
    "_version _base _is_view _post_accumulate_grad_hooks _cdata _fix_weakref _forward_cls _current_level _parameters "
    "_buffers _forward_hooks _forward_pre_hooks _forward_hooks_with_kwargs _forward_pre_hooks_with_kwargs "
    "_forward_hooks_always_called _backward_hooks _backward_pre_hooks _qualname".split()
)


SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if PACKAGE / "private_names" not in path.parents]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _own_names(trees: Iterable[ast.Module]) -> set[str]:
    """Names that the package itself defines, sets or declares: attributes of its own objects."""
    names = {"_asdict", "_replace", "_fields", "_getframe"}  # documented: of named tuples, and of sys
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)  # of __slots__
    return names


def _touched(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """Private names of a library that a module uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                name = f"{module}.{alias.name}".strip(".")
                documented = name in DOCUMENTED or (module in DOCUMENTED and not _is_private(alias.name))
                if name.partition(".")[0] in LIBRARIES and not documented:
                    yield name
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            written = ast.unparse(node)
            of_library = written.partition(".")[0] in ("torch", "F", "nn", "aten", "numba", "brevitas", "qnn", "triton")
            if written == f"bv.{node.attr}":  # `import brevact.private_names.of_brevitas as bv`
                continue
            if _is_private(node.attr) and node.attr not in ATTRIBUTES and (of_library or node.attr not in own):
                yield written
            elif node.attr in ("__func__", "__wrapped__") and of_library:
                yield written
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            for name in node.args[1:2]:
                if isinstance(name, ast.Constant) and _is_private(name.value) and name.value not in own:
                    yield ast.unparse(node)


def test_private_names_are_touched_in_one_place():
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    own = _own_names(trees.values())
    found = {str(path.relative_to(PACKAGE)): sorted(set(_touched(tree, own))) for path, tree in trees.items()}
    assert not {path: names for path, names in found.items() if names}, "look them up in brevact/private_names"


@pytest.mark.parametrize(
    "code",
    [
        *("import torch._dynamo", "from torch._ops import OpOverload", "from torch.utils import _pytree"),
        *("torch._C._is_tracing()", "torch.ops.aten._softmax(x, 0, False)", "x._weak_ref()", "getattr(x, '_cow')"),
        *("from brevitas.core.quant import IntQuant", "from numba.core import types", "F._verify_batch_size(x)"),
        "torch.autograd.Function.apply.__func__",
    ],
)
def test_the_search_for_private_names_finds(code: str):
    assert list(_touched(ast.parse(code), {"_own"}))


@pytest.mark.parametrize("path", ["torch.no_such_name", "torch.nn.no_such_module.name"])
def test_a_missing_name_is_an_error_with_the_fix(path: str):
    with pytest.raises(ImportError, match=f"needs {path}, which torch .* pip install"):
        lookup.find(path)
