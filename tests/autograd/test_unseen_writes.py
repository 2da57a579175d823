"""Memory that is overwritten and counts no new version: by kernels, NumPy, and operators of other libraries."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import brevitas.nn as qnn
import numpy as np
import pytest
import torch
from brevitas.quant import Uint8ActPerTensorFloat
from torch import Tensor, distributed, nn
from torch.nn import functional as F

import brevact
from brevact import LosslessBackward, Policy, StochBackward2bit, StochBackward8bit
from brevact.autograd import region
from brevact.autograd.deriving import known_values
from brevact.autograd.interop import library_functions
from brevact.autograd.region import rows
from tests.autograd.measuring import settings
from tests.libraries import run_interpreted

_library = torch.library.Library("brevact_writes", "FRAGMENT")
for _name in ("declared(Tensor(a!) x, Tensor other) -> ()", "undeclared(Tensor x, Tensor other) -> ()"):
    _library.define(_name)
    _library.impl(_name.partition("(")[0], lambda x, other: double(x.detach().numpy()), "CompositeExplicitAutograd")
_library.define("reading(Tensor x) -> Tensor")
_library.impl("reading", lambda x: x.detach().clone(), "CompositeExplicitAutograd")


def double(memory: Any) -> None:
    memory *= -2


def at(address: int, x: Tensor) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * x.numel()).from_address(address))


def alias(x: Tensor) -> Tensor:
    y = torch.empty(0)
    y.data = x
    return y


def gather_double(x: Tensor) -> None:
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    distributed.all_gather_into_tensor(x.detach(), -2 * x.detach())


#: Arrays and tensors in the memory of a detached tensor.
MEMORY: dict[str, Callable[[Tensor], Any]] = {
    "data_ptr": lambda x: at(x.data_ptr(), x),
    "untyped_storage": lambda x: at(x.untyped_storage().data_ptr(), x),
    "storage": lambda x: at(x.storage().data_ptr(), x),
    "numpy": lambda x: x.numpy(),
    "asarray": np.asarray,
    "NumPy's from_dlpack": np.from_dlpack,
    "torch's from_dlpack": torch.from_dlpack,
    "data": lambda x: x.data,
    "setting data": alias,
}
WRITES: dict[str, Callable[[Tensor], object]] = {
    **{name: (lambda x, of=of: double(of(x.detach()))) for name, of in MEMORY.items()},
    "operator that declares it": lambda x: torch.ops.brevact_writes.declared(x, x.new_zeros(1)),
    "collective": gather_double,
    "operator that does not": lambda x: torch.ops.brevact_writes.undeclared(x, x.new_zeros(1)),
}


class Doubled(torch.autograd.Function):
    """The product of a tensor and -2, in place; it does not call `mark_dirty`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, write: Callable[[Tensor], object]) -> Tensor:
        write(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -2 * grad, None


class Square(torch.autograd.Function):
    """A Function whose backward overwrites the tensor that it has saved."""

    writes = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        result = 2 * x * grad
        if Square.writes:
            double(at(x.data_ptr(), x))
        return result


def weights() -> list[Tensor]:
    return [torch.randn(64, 64, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(2)]


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_functions_that_write_in_place_have_exact_gradients(write):
    """The record that a layer's output can be recomputed ends when a Function overwrites it."""
    found = []
    try:
        for leaf in (None, LosslessBackward.let(recompute=1024)):
            first, second = weights()
            with brevact.backward_quant(leaf):
                out = F.linear(F.silu(Doubled.apply(F.linear(torch.eye(64), first), write)), second)
            found.append(torch.autograd.grad(out.sum(), (first, second)))
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("take", MEMORY.values(), ids=MEMORY)
def test_nothing_is_known_of_memory_that_somebody_holds(take):
    """Neither is one copy packed for a layer that reads a tensor, and another that reads it once it was overwritten."""
    x, (first, second) = torch.ones(64, 64), weights()  # codes are exact
    with brevact.backward_quant(StochBackward2bit):
        memory = take(x)
        out = F.linear(x, first).sum()
        double(memory)
        out = out + F.linear(x, second).sum()
    assert torch.equal(torch.autograd.grad(out, second)[0], torch.full((64, 64), -2.0 * 64))


@pytest.mark.parametrize("leaf", [LosslessBackward, StochBackward8bit], ids=["codes", "packed"])
def test_functions_may_overwrite_what_they_have_saved(leaf, monkeypatch):
    """Nobody else reads the decoded tensor: not the layer behind, whose input is computed from the same one."""
    layer = qnn.QuantReLU(act_quant=Uint8ActPerTensorFloat) if leaf is LosslessBackward else nn.LayerNorm(64)
    x, weight, found = torch.randn(64, 64, requires_grad=True), weights()[0], []
    for writes in (False, True):
        monkeypatch.setattr(Square, "writes", writes)
        torch.manual_seed(0)
        with brevact.backward_quant(Policy({Square: leaf, "*": leaf})):
            y = layer(x * 1.0)
            out = F.linear(torch.cat((y, y)), weight).sum() + Square.apply(y).sum()
        found.append(torch.autograd.grad(out, (weight, x))[0])
    assert torch.equal(*found)


def test_addresses_that_torch_and_this_package_take_end_nothing():
    norm, quantizer, eight = nn.LayerNorm(64), brevact.quantizer(StochBackward2bit), settings(bit_width=8)
    of_torch = eval("lambda x: x.data_ptr()", {"__name__": "torch.nn.modules.rnn"})
    with region(eight):
        y = norm(torch.randn(64, 64))
        for call in (of_torch, quantizer.quantize, lambda x: torch.ops.brevact_writes.declared(x.new_zeros(1), x)):
            call(y)
            assert known_values.find(y, eight) is not None
        y.data_ptr()
        assert known_values.find(y, eight) is None


def test_operators_of_libraries_that_were_read_write_what_they_declare(monkeypatch):
    norm, eight = nn.LayerNorm(64), settings(bit_width=8)
    monkeypatch.setitem(library_functions.READ, "brevact_writes", ("torch", (2, 0), (99, 0)))
    for namespace, stays in (("", False), ("brevact_writes", True)):
        monkeypatch.setattr(library_functions, "DECLARING", {namespace})
        rows._row_of_operator.cache_clear()
        with region(eight):
            y = norm(torch.randn(64, 64))
            torch.ops.brevact_writes.reading(y)
            assert (known_values.find(y, eight) is not None) == stays


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is there on Linux alone")
@pytest.mark.exhaustive
def test_kernels_of_liger_have_the_gradients_of_plain_models():
    pytest.importorskip("liger_kernel", reason="not installed: liger-kernel (pip install '.[test]')")
    run_interpreted("tests.autograd.interpreted_liger", "check_rotation", "check_loss", "check_model")
