"""Parts of the memory of a step: which bytes are in which, on this system and on others."""

from __future__ import annotations

import cProfile
import dataclasses
import gc
import sys
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import brevact
from brevact import NearestBackward4bit, heap
from brevact.reports.in_place import in_place
from brevact.reports.peak import PeakMemory
from brevact.reports.peak_probe import peak_memory_of
from brevact.reports.step import peak_of, step_of

CPU = torch.device("cpu")


def square(model, x):
    return model(x).square().sum()


def parts_of(model, x, *, packs: bool = True, loss=square) -> PeakMemory:
    with in_place(model):
        return peak_memory_of(step_of(model, x, loss, packs=packs))


def linear(policy=NearestBackward4bit):
    torch.manual_seed(0)
    return brevact.quantize_backward(nn.Sequential(nn.Linear(2048, 1024, bias=False)), policy)


@pytest.mark.parametrize("packs", [False, True])
def test_each_tensor_of_a_linear_layer_is_in_its_part(packs):
    """When its weight's gradient is computed there are that, the output's gradient, and the input, decoded."""
    x = torch.randn(256, 2048)
    kept = brevact.quantizer(NearestBackward4bit).quantize(x).nbytes
    parts = parts_of(linear(), x, packs=packs)
    assert parts.weight_gradients == 2048 * 1024 * 4
    assert parts.activation_gradients == 256 * 1024 * 4 + 4  # and that of the loss
    assert parts.decoded == packs * x.nbytes
    assert parts.packed == packs * kept  # plain saves the input as it is, which was there before the step
    assert parts.unpacked == 0
    assert parts.other == 4  # the loss


def test_what_is_saved_when_backward_starts_is_what_the_memory_report_says():
    """The widest layer is the last one, so that most is allocated while nothing has been freed."""
    torch.manual_seed(0)
    layers = nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 4096, bias=False)
    model = brevact.quantize_backward(nn.Sequential(*layers), NearestBackward4bit)
    x = torch.randn(512, 256)
    report = brevact.memory_report(model, x, square)
    assert report.packed_parts.packed + report.packed_parts.unpacked == report.saved_bytes
    assert report.packed_parts.packed == sum(row.saved_bytes for row in report.ops if row.how in ("packed", "mask"))
    assert report.plain_parts.packed == report.plain_parts.decoded == 0
    assert report.plain_parts.unpacked == report.plain_bytes - x.nbytes


def conv_net():
    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.SiLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8)), torch.randn(8, 3, 32, 32)


def transformer():
    return nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True), torch.randn(4, 32, 64)


def checkpoints():
    model, x = conv_net()
    model.forward = partial(checkpoint_sequential, model, 2, use_reentrant=False)
    return nn.Sequential(model), x


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Runs a test without the garbage collector, which frees tensors whenever it likes."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("make", [conv_net, transformer, checkpoints])
@pytest.mark.parametrize(
    "policy", [brevact.DEFAULT, brevact.RECOMPUTE, brevact.LosslessBackward], ids=["DEFAULT", "RECOMPUTE", "lossless"]
)
def test_the_parts_sum_to_the_peak_without_a_probe(make, policy):
    torch.manual_seed(0)
    model, x = make()
    brevact.quantize_backward(model, policy)
    for packs in (False, True):
        parts = parts_of(model, x, packs=packs)
        with in_place(model):
            assert parts.tensors == peak_of(step_of(model, x, square, packs=packs), CPU)
        assert min(dataclasses.astuple(parts)[:5]) >= 0


def test_without_gradients_of_the_model_there_is_no_part():
    report = brevact.memory_report(nn.Linear(8, 8).requires_grad_(False), torch.randn(4, 8), square)
    assert report.plain_parts is None is report.packed_parts


def test_a_forward_pass_alone_has_no_parts():
    assert brevact.memory_report(linear(), torch.randn(4, 2048)).packed_parts is None


def test_inputs_that_want_gradients_are_leaves():
    x = torch.randn(64, 1024)
    layer = nn.Linear(1024, 8).requires_grad_(False)
    parts = parts_of(layer, x, packs=False, loss=lambda model, x: square(model, x.detach().requires_grad_()))
    assert parts.weight_gradients == x.nbytes


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if sys.getprofile() is not None and sys.getprofile() is not _profiler:
            raise ArithmeticError("in a measured backward pass")
        return grad


def _profiler(frame, event, value):
    return None


def test_a_backward_pass_that_fails_leaves_nothing_behind():
    threads = threading.active_count()
    sys.setprofile(_profiler)
    try:
        with pytest.raises(ArithmeticError):
            parts_of(nn.Linear(8, 8), torch.randn(4, 8), loss=lambda model, x: Fails.apply(model(x)).sum())
        assert sys.getprofile() is _profiler
    finally:
        sys.setprofile(None)
    assert threading.active_count() == threads


def test_a_profiler_of_python_goes_on():
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        before = sys.getprofile()
        parts_of(nn.Linear(8, 8), torch.randn(4, 8))
        assert sys.getprofile() is before
        heap.is_left_alone({})
    finally:
        profiler.disable()
    assert heap.is_left_alone.__code__ in [entry.code for entry in profiler.getstats()]


def test_reports_print_the_parts():
    x = torch.randn(64, 2048), torch.randint(1024, (64,))

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    for report in (brevact.step_report(linear(), x, loss, rounds=2), brevact.memory_report(linear(), x, loss)):
        assert report.packed_parts.tensors == report.packed_peak
        assert report.plain_parts.tensors == report.plain_peak
        assert "gradients of activations" in str(report)
