"""The way of a call changes no gradient and no byte: hooks and reports around a region, save modes, forms of a call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from types import MethodDescriptorType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import brevact
from brevact import BackwardSettings, DitherBackward4bit, NearestBackward4bit, SaveMode, StochBackward2bit
from brevact.autograd import region
from brevact.autograd.saving import storage_report
from tests.autograd import ops
from tests.autograd.database_laws import are_same
from tests.autograd.measuring import watch_saved
from tests.crosses import taking_turns

QUANTIZERS = {each.__name__: each for each in (StochBackward2bit, NearestBackward4bit, DitherBackward4bit)}


class Way(NamedTuple):
    """Contexts around a region and inside of it, its save mode, and whether a checkpoint runs it."""

    around: Callable[[], AbstractContextManager] = nullcontext
    inside: Callable[[], AbstractContextManager] = nullcontext
    save_mode: SaveMode = SaveMode.SAVE_QUANTIZED
    in_checkpoint: bool = False


class ByNames(TorchFunctionMode):
    """Calls torch's functions with all arguments by their names; methods but for the tensor that has them."""

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        places = isinstance(func, MethodDescriptorType)
        for names in names_of(func):
            if places < len(args) <= len(names):
                named = dict(zip(names[places:], args[places:], strict=False))
                with suppress(TypeError):  # the names of another overload
                    return func(*args[:places], **named, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@functools.cache
def names_of(func: Callable) -> list[list[str]]:
    """The names of the arguments of a function, of each of its overloads; none of operators."""
    name = getattr(func, "__name__", "__").rstrip("_")
    if name.startswith("_"):
        return []
    try:
        return [list(inspect.signature(func).parameters)]
    except ValueError:
        schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
        return [["input" if each.name == "self" else each.name for each in schema.arguments] for schema in schemas]


class OtherForm(TorchFunctionMode):
    """Calls a method of tensors where torch has one of a function's name, and a function in place of a method."""

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        name = getattr(func, "__name__", "__")
        home = torch if isinstance(func, MethodDescriptorType) else Tensor
        other = None if name.startswith("__") else getattr(home, name, None)
        if callable(other) and args and isinstance(args[0], Tensor):
            with suppress(TypeError):  # torch.unsqueeze has no form of a size alone
                return other(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


WAYS = {
    "identity hooks": Way(lambda: saved_tensors_hooks(lambda x: x, lambda x: x)),
    "save_on_cpu": Way(save_on_cpu),
    "a report": Way(storage_report.recording),
    "autocast that is off": Way(lambda: torch.autocast("cpu", enabled=False)),
    "a checkpoint": Way(in_checkpoint=True),
    "keywords": Way(inside=ByNames),
    "the other form": Way(inside=OtherForm),
    "quantize on backward": Way(save_mode=SaveMode.QUANTIZE_ON_BACKWARD),
}


PLAIN = Way()
#: In a checkpoint the quotient at their end is stored by itself: tensors derive only where they live until backward.
DERIVING = ("dice loss", "tversky loss")
#: Ways in which autograd stores the same bytes; hooks around the region may store others.
SAME_BYTES = ("a report", "autocast that is off", "keywords", "the other form")


def gradients(
    call: Callable[[Tensor], Tensor], x: Tensor, settings: BackwardSettings, way: Way = PLAIN
) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    parameters = list(call.parameters()) if isinstance(call, nn.Module) else []

    def run(x: Tensor) -> Tensor:
        with way.around(), region(replace(settings, save_mode=way.save_mode)), way.inside():
            return call(x * 1)

    torch.manual_seed(1)
    out = checkpoint(run, leaf, use_reentrant=False) if way.in_checkpoint else run(leaf)
    torch.manual_seed(2)
    return list(torch.autograd.grad(out, [leaf, *parameters], torch.randn(out.shape), allow_unused=True))


def check(make: Callable[[], Callable], shape: tuple[int, ...], quantizer: str, way: str) -> None:
    torch.manual_seed(0)
    call, x = make(), torch.randn(shape)
    state = {k: v.clone() for k, v in call.state_dict().items()} if isinstance(call, nn.Module) else {}
    settings = BackwardSettings(brevact.quantizer(QUANTIZERS[quantizer]), min_numel=0)

    def run(way: Way) -> list[Tensor]:
        if state:
            call.load_state_dict(state)
        return gradients(call, x, settings, way)

    assert all(are_same(a, b) for a, b in zip(run(WAYS[way]), run(PLAIN), strict=True))
    if way in SAME_BYTES:
        nbytes = []
        for each in (WAYS[way], PLAIN):
            with watch_saved() as saved:
                run(each)
            nbytes.append(saved.nbytes)
        assert nbytes[0] == nbytes[1]


ROWS = {op.name: op for op in ops.ALL}


@pytest.mark.parametrize(("op", "quantizer", "way"), taking_turns(list(ROWS), list(QUANTIZERS), list(WAYS)))
def test_the_way_changes_no_gradient_of_an_op(op, quantizer, way):
    if way == "a checkpoint" and op in DERIVING:
        way = "keywords"
    check(ROWS[op].make, ROWS[op].shape, quantizer, way)


def _block(activation: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), activation()),
        *(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), activation()),
    )


class Residual(nn.Module):
    """Two norms read one tensor, which is added to a later result."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.BatchNorm2d(16)
        self.conv = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return F.relu(x + self.conv(F.silu(self.first(x)))) * self.second(x).sigmoid()


NETS: dict[str, Callable[[], nn.Module]] = {
    "conv, bn, relu": lambda: _block(nn.ReLU),
    "conv, bn, silu": lambda: _block(nn.SiLU),
    "conv, bn, hardswish in place": lambda: _block(lambda: nn.Hardswish(inplace=True)),
    "residual, bn twice on one tensor": lambda: Residual(),
    "without batch norm": lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.SiLU(), nn.Conv2d(16, 16, 3), nn.GELU()),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("net", NETS)
def test_the_way_changes_no_gradient_of_a_net(net, quantizer, way):
    check(NETS[net], (4, 3, 16, 16), quantizer, way)


SPELLINGS: dict[str, tuple[Callable, Callable]] = {
    "names of NumPy's": (lambda x, y: torch.div(x, y), lambda x, y: torch.div(x1=x, x2=y)),
    "a later operand alone": (lambda x, y: torch.div(x, y), lambda x, y: x.div(other=y)),
    "to, of a device": (lambda x, y: x.to(torch.float64), lambda x, y: x.to(device="cpu", dtype=torch.float64)),
    "dot": (lambda x, y: torch.dot(x[0], y[0]), lambda x, y: torch.dot(x[0], tensor=y[0])),
    "a deprecated overload": (lambda x, y: y.addmm(x, x, beta=0.5), lambda x, y: y.addmm(0.5, mat1=x, mat2=x)),
    "instance norm": (
        lambda x, y: torch.instance_norm(x[None], None, y[0], None, None, True, 0.1, 1e-5, False),
        lambda x, y: torch.instance_norm(
            *(x[None], None),
            bias=y[0],
            running_mean=None,
            running_var=None,
            use_input_stats=True,
            momentum=0.1,
            eps=1e-5,
            cudnn_enabled=False,
        ),
    ),
}


@pytest.mark.filterwarnings("ignore:This overload of addmm is deprecated")
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_a_call_change_no_gradient(name, quantizer):
    other = nn.Parameter(torch.rand(48, 48) + 1)
    x, settings = torch.randn(48, 48), BackwardSettings(brevact.quantizer(QUANTIZERS[quantizer]), min_numel=0)
    plain, spelled = (gradients(lambda x, call=call: call(x, other * 1), x, settings) for call in SPELLINGS[name])
    assert all(are_same(a, b) for a, b in zip(spelled, plain, strict=True))


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_keywords_change_no_gradient_of_a_batch_norm(quantizer):
    norm = nn.BatchNorm2d(16)

    class Spelled(nn.Module):
        def __init__(self, with_keywords: bool) -> None:
            super().__init__()
            self.norm, self.with_keywords = norm, with_keywords

        def forward(self, x: Tensor) -> Tensor:
            weight, bias = self.norm.weight, self.norm.bias
            if self.with_keywords:
                return F.batch_norm(
                    input=x, running_mean=None, running_var=None, bias=bias, weight=weight, training=True
                )
            return F.batch_norm(x, None, None, weight, bias, True, 0.1, 1e-5)

    x, settings = torch.randn(4, 16, 9, 9), BackwardSettings(brevact.quantizer(QUANTIZERS[quantizer]), min_numel=0)
    found, expected = (gradients(Spelled(each), x, settings) for each in (True, False))
    assert all(are_same(a, b) for a, b in zip(found, expected, strict=True))


def test_an_input_that_is_not_the_first_argument_may_be_named():
    x, other = torch.randn(40, 40, requires_grad=True), torch.randn(40, 40)
    with brevact.backward_quant(StochBackward2bit):
        chosen = torch.where(condition=x > 0, input=x, other=other)
        derived = torch.polygamma(n=1, input=x.abs() + 1)
    assert torch.equal(chosen, torch.where(x > 0, x, other))
    assert torch.equal(derived, torch.polygamma(1, x.abs() + 1))
