"""Private names of other libraries: looked up in one place, and missed without harm."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from brevact.private_names import lookup, of_torch

PACKAGE = Path(lookup.__file__).parents[1]
LIBRARIES = ("torch", "brevitas", "numba", "llvmlite", "triton")
#: Modules whose names without an underscore are documented.
DOCUMENTED = {
    *("torch", "torch.autograd", "torch.autograd.forward_ad", "torch.autograd.graph", "torch.nn", "torch.nn.attention"),
    *("torch.nn.functional", "torch.nn.modules.module", "torch.nn.parameter", "torch.overrides", "torch.utils.hooks"),
    *("torch.utils.data", "torch.utils.checkpoint", "torch.distributed", "torch.library"),
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
ATTRIBUTES = {path.rpartition(".")[2] for path in of_torch.ATTRIBUTES}


def _sources() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if PACKAGE / "private_names" not in path.parents:
            yield path, ast.parse(path.read_text())


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def _own_names() -> set[str]:
    """Names that the package itself defines, sets or declares: attributes of its own objects."""
    names = {"_replace", "_fields", "_getframe"}  # documented: of named tuples, and of sys
    for _, tree in _sources():
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
    """What a module takes from the insides of a library."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                name = f"{module}.{alias.name}".strip(".")
                documented = name in DOCUMENTED or (module in DOCUMENTED and not _is_private(alias.name))
                if name.partition(".")[0] in LIBRARIES and not documented:
                    yield name
        elif isinstance(node, ast.Attribute):
            written = ast.unparse(node)
            of_library = written.partition(".")[0] in ("torch", "F", "nn", "aten", "numba", "brevitas", "qnn", "triton")
            if _is_private(node.attr) and node.attr not in ATTRIBUTES and (of_library or node.attr not in own):
                yield written
            elif node.attr in ("__func__", "__wrapped__") and of_library:
                yield written
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            for name in node.args[1:2]:
                if isinstance(name, ast.Constant) and _is_private(name.value) and name.value not in own:
                    yield ast.unparse(node)


def test_private_names_are_touched_in_one_place():
    own = _own_names()
    found = {str(path.relative_to(PACKAGE)): sorted(set(_touched(tree, own))) for path, tree in _sources()}
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


def _sought() -> dict[str, str]:
    """Every name that is looked up, and what needs it."""
    names: dict[str, str] = {}

    def note(path: str, use: str, **kwargs: object) -> object:
        names[path] = use
        return lookup.find(path, use, **kwargs)

    for path in sorted(Path(lookup.__file__).parent.glob("of_*.py")):
        code = path.read_text().replace("import find", "import find as _")
        scope = ModuleType(path.stem).__dict__
        exec(compile(code, str(path), "exec"), scope | {"find": note})
    return names


def test_every_name_is_there_in_the_versions_that_run():
    assert not lookup.missing
    for path in _sought().keys() - {"torch.autograd.Function.apply.__func__.__code__"}:  # gone from torch 2.14 on
        lookup.read(path)


WITHOUT = """
import importlib.util, json, os, sys, warnings
import torch, torch._dynamo.variables.torch, torch.nn.functional as F
import brevitas.nn, brevitas.quant, brevitas.quant.solver.act, triton

package, compiles, removals = json.loads(sys.argv[1])

def ops():
    linear, conv, norm = torch.nn.Linear(64, 64), torch.nn.Conv2d(4, 8, 3), torch.nn.BatchNorm2d(4)
    rows, maps = torch.randn(128, 64), torch.randn(4, 4, 32, 32)
    heads, weight = torch.randn(2, 4, 32, 64), torch.nn.Parameter(torch.randn(64))
    qat = brevitas.nn.QuantReLU(act_quant=brevitas.quant.Uint8ActPerTensorFloat)
    yield "linear", lambda x: linear(x), rows
    yield "convolution", lambda x: conv(x), maps
    yield "batch norm", lambda x: norm(x), maps
    yield "instance norm", lambda x: F.instance_norm(x), maps
    yield "layer norm", lambda x: F.layer_norm(x, (64,)), rows
    yield "group norm", lambda x: F.group_norm(x, 2), maps
    yield "RMS norm", lambda x: F.rms_norm(x, (64,), weight), rows
    yield "GELU", F.gelu, rows
    yield "PReLU", lambda x: F.prelu(x, weight[:4]), maps
    yield "softmax", lambda x: x.softmax(-1) ** 2, rows
    yield "attention", lambda x: F.scaled_dot_product_attention(x, x, x), heads
    yield "attention with dropout", lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), heads
    yield "autocast", lambda x: torch.autocast("cpu", torch.bfloat16)(linear)(x), rows
    yield "padding", lambda x: F.pad(x, (1, 1)).sin(), rows
    yield "a forward quantizer", lambda x: qat(x), rows

def outcome(call):
    try:
        call()
        return "works"
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def train(brevact, op, x, quantizer):
    x = x.clone().requires_grad_()
    with brevact.backward_quant(quantizer):
        out = op(x)
    out.float().square().sum().backward()
    assert x.grad.isfinite().all() and x.grad.any()

def check(removed):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("brevact.private_names.lookup", package + "/private_names/lookup.py")
    lookup = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lookup)
    read = lookup.read

    def read_without(path):
        if path in removed:
            raise AttributeError(path)
        return read(path)

    lookup.read = read_without
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import brevact, brevact.nn, brevact.triton_kernels
        from brevact.quantizers import UniformQuantizer
        found = {}
        for name, op, x in ops():
            found[name] = outcome(lambda: train(brevact, op, x, brevact.StochBackward4bit))
        norm, maps, rows = torch.nn.BatchNorm2d(4), torch.randn(4, 4, 32, 32), torch.randn(128, 64)
        found["levels"] = outcome(lambda: train(brevact, norm, maps, brevact.L4Backward))
        found["Weibull"] = outcome(lambda: train(brevact, torch.sin, rows, brevact.WeibullBackward4bit))
        found["no region"] = outcome(lambda: UniformQuantizer(bit_width=2).quantize(rows, seed=0).dequantize())
        layer = lambda: brevitas.nn.QuantLinear(64, 64, bias=False, input_quant=brevact.StochBackward2bit)
        found["layer"] = outcome(lambda: layer()(rows).sum().backward())
        found["backward"] = outcome(lambda: brevact.backward_quant(brevitas.quant.Int8ActPerTensorFloat))
        if compiles and all(path.startswith("torch.") for path in removed):  # the net is torch's
            net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
            brevact.quantize_backward(net, brevact.StochBackward2bit)
            compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
            found["compiling"] = outcome(lambda: compiled(rows).sum().backward())
    return found, [str(warning.message) for warning in caught]

for removed in removals:
    receive, send = os.pipe()
    if not os.fork():
        try:
            found = check(removed)
        except BaseException as error:
            found = {"import": f"{type(error).__name__}: {error}"}, []
        with os.fdopen(send, "w") as file:
            json.dump(found, file)
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as file:
        print(file.read(), flush=True)
    os.wait()
os._exit(0)  # the end of an interpreter that has imported torch takes a second
"""


def _outcomes(*removals: list[str], compiles: bool = False) -> list[tuple[dict[str, str], list[str]]]:
    """What works in a process where names are missing, and what it warned of: of each list of missing names."""
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT, json.dumps((str(PACKAGE), compiles, removals))],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        timeout=2400,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def _assert_clear(removed: list[str], found: dict[str, str], warned: list[str]) -> None:
    for name, outcome in found.items():
        assert outcome == "works" or any(
            f"needs {path}, which {path.partition('.')[0]} " in outcome and "pip install" in outcome for path in removed
        ), (removed, name, outcome)
    assert set(found.values()) == {"works"} or any("Install a version" in warning for warning in warned), removed


#: Names that are missing together; these lists, and each name by itself, are in the exhaustive tier.
TOGETHER = [
    ["torch._C._autograd._push_saved_tensors_default_hooks", "brevitas.core.quant.IntQuant"],
    ["torch.Tensor._version", "brevitas.proxy.quant_proxy.QuantProxyFromInjector"],
    [
        *("torch._C._is_tracing", "torch._dynamo.eval_frame.skip_code"),
        "torch.ops.aten._softmax_backward_data.default",
    ],
]


def test_a_missing_name_is_refused_or_replaced():
    names = list(_sought())
    whole, without_all, some = _outcomes([], names, TOGETHER[0])
    assert set(whole[0].values()) == {"works"} and not any("Install a version" in warning for warning in whole[1])
    _assert_clear(names, *without_all)
    assert without_all[0]["linear"] != "works"
    _assert_clear(TOGETHER[0], *some)


@pytest.mark.exhaustive
def test_names_that_are_missing_together_are_refused_or_replaced():
    for removed, (found, warned) in zip(TOGETHER, _outcomes(*TOGETHER), strict=True):
        _assert_clear(removed, found, warned)


@pytest.mark.exhaustive
def test_every_missing_name_is_refused_or_replaced():
    names = list(_sought())
    for name, (found, warned) in zip(names, _outcomes(*([name] for name in names), compiles=True), strict=True):
        _assert_clear([name], found, warned)
