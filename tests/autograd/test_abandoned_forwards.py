"""Forwards that an interrupt ends: regions, hooks and modes end with them."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import brevact
from brevact import StochBackward2bit, StochBackward8bit
from brevact.autograd import current_region, region
from brevact.private_names.of_torch import top_hooks
from tests.autograd.leaves import every_leaf
from tests.autograd.measuring import settings, watch_saved


@every_leaf
def test_a_region_ends_when_a_forward_is_interrupted(leaf):
    class Interrupted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyboardInterrupt

    model = brevact.quantize_backward(nn.Sequential(nn.Linear(64, 64), Interrupted()), leaf)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(4, 64))
    other = brevact.quantize_backward(nn.Linear(64, 64), leaf)
    with watch_saved() as saved:
        other.eval()(torch.randn(64, 64, requires_grad=True) * 1)
    assert current_region() is None
    assert all(t.dtype is not torch.uint8 for t in saved.tensors)


class Interrupted(nn.Module):
    """A layer during which the user presses Ctrl-C, once."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = True

    def forward(self, x: Tensor) -> Tensor:
        if self.waits:
            self.waits = False
            raise KeyboardInterrupt
        return x


def interrupt(model: nn.Module) -> None:
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(64, 64))


def quantized_layers() -> nn.ModuleList:
    models = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), Interrupted()), nn.Sequential(nn.Linear(64, 64))])
    return brevact.quantize_backward(models, StochBackward2bit, min_numel=0)


def test_nothing_is_packed_in_what_an_interrupt_leaves_behind():
    interrupt(quantized_layers()[0])
    plain = nn.Sequential(nn.Linear(64, 64), nn.Softmax(-1), nn.LayerNorm(64))
    with watch_saved() as saved:
        plain(torch.randn(64, 64))
    assert saved.tensors and all(t.dtype is not torch.uint8 for t in saved.tensors)
    quantized_layers()[1](torch.randn(64, 64))  # clears it away
    assert current_region() is None


def test_hooks_around_the_forward_after_an_interrupt_stay():
    models, seen = quantized_layers(), []
    interrupt(models[0])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.dtype) or t, lambda t: t):
        models[1](torch.randn(64, 64))
        assert torch.uint8 in seen
        seen.clear()
        nn.Linear(64, 64)(torch.randn(64, 64))
        assert seen == [torch.float32]
    assert top_hooks(True) is None


def test_modes_around_the_forward_after_an_interrupt_stay():
    models = quantized_layers()
    interrupt(models[0])
    with torch.device("meta"):
        models[1](torch.randn(64, 64, device="cpu"))
        assert torch.empty(1).device.type == "meta"
    assert torch.empty(1).device.type == "cpu" and torch._C._len_torch_function_stack() == 0
    interrupted, other = quantized_layers()
    interrupt(interrupted)
    with CountingMode() as counter:
        other(torch.randn(64, 64))
        before = counter.calls
        torch.relu(torch.randn(4))
    assert counter.calls == before + 2
    assert torch._C._len_torch_function_stack() == 0


class CountingMode(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def hooks_around():
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        yield


@pytest.mark.parametrize(
    "around",
    [hooks_around, torch.autograd.graph.save_on_cpu, CountingMode, lambda: brevact.backward_quant(StochBackward8bit)],
)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_contexts_around_an_interrupted_forward_end(around, count, checkpointed):
    """Leaving them pops the innermost hooks or mode, which are those of the interrupted region."""
    interrupted, other = quantized_layers()
    x = torch.randn(64, 64, requires_grad=True)
    with pytest.raises(KeyboardInterrupt), contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(around())
        checkpoint(interrupted, x, use_reentrant=False) if checkpointed else interrupted(x)
    other(x).sum().backward()
    assert current_region() is None and top_hooks(True) is None and torch._C._len_torch_function_stack() == 0
    with watch_saved() as saved:
        other(torch.randn(64, 64))
    assert torch.uint8 in {t.dtype for t in saved.tensors}


@pytest.mark.parametrize("around", [contextlib.nullcontext, lambda: brevact.backward_quant(StochBackward8bit)])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("place", [0, 1], ids=["first", "later"])
def test_an_interrupted_recomputation_leaves_nothing_behind(use_reentrant, place, around):
    layer, other = Interrupted(), quantized_layers()[1]
    layer.waits = False
    layers = [nn.Linear(64, 64), nn.Linear(64, 64)]
    layers.insert(place, layer)
    interrupted = brevact.quantize_backward(nn.Sequential(*layers), StochBackward2bit, min_numel=0)
    x = torch.randn(64, 64, requires_grad=True)
    with around():
        loss = checkpoint(interrupted, x * 1, use_reentrant=use_reentrant).sum()
        layer.waits = True
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
        other(x).sum().backward()
    assert current_region() is None and top_hooks(True) is None and torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("in_block", [False, True])
def test_a_backward_pass_after_an_interrupted_forward(in_block):
    layer, other = quantized_layers()[1], quantized_layers()[0]
    x = torch.randn(64, 64)
    with brevact.backward_quant(layer) if in_block else contextlib.nullcontext():
        loss = layer(x).sum()
        try:
            other(x)
        except KeyboardInterrupt:
            loss.backward()
    assert all(p.grad is not None for p in layer.parameters())
    layer(x)  # clears the interrupted forward away
    assert current_region() is None and top_hooks(True) is None and torch._C._len_torch_function_stack() == 0


def test_a_with_block_ends_the_regions_that_an_interrupt_left_inside():
    interrupted, _ = quantized_layers()
    with pytest.raises(KeyboardInterrupt), brevact.backward_quant(StochBackward8bit):
        interrupted(torch.randn(64, 64))
    assert current_region() is None and torch._C._len_torch_function_stack() == 0
    with watch_saved() as saved:
        interrupted(torch.randn(64, 64))
    assert current_region() is None
    assert sum(t.dtype is torch.uint8 for t in saved.tensors) == 1


def test_an_interrupted_layer_leaves_the_region_as_it_was():
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8, requires_grad=True)
    stored: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if not stored:
            stored.append(tensor)
            raise KeyboardInterrupt
        stored.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), region(settings()):
        with pytest.raises(KeyboardInterrupt):
            layer(x)
        F.conv2d(x, layer.weight.detach()).exp()  # a Function, and an op that is left to the hooks
    assert all(tensor.dtype is torch.uint8 or tensor.shape == layer.weight.shape for tensor in stored)
