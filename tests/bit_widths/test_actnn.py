"""ActNN's levels: the bytes of each, and their place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from brevact import actnn_level
from brevact.reports.memory import memory_of


def net(activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), activation()
    return nn.Sequential(nn.Conv2d(3, 32, 3), *block, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 49, 10))


BATCH = torch.randn(16, 3, 16, 16, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 10


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def stored(model: nn.Module) -> brevact.MemoryReport:
    return memory_of(model, lambda copied: loss_of(copied, BATCH))


@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU])
def test_each_level_stores_less_than_the_one_before(activation: type[nn.Module]):
    sizes = []
    for name in ("L0", "L1", "L2", "L3"):
        model = net(activation)
        actnn_level(name).quantize(model, BATCH, loss_of)
        sizes.append(stored(model).saved_bytes)
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    assert sizes[0] == stored(net(activation)).plain_bytes


def test_level_1_packs_convolutions_alone():
    model = net()
    actnn_level("L1").quantize(model, BATCH, loss_of)
    packed = {row.layer for row in stored(model).ops if row.how == "packed"}
    assert packed == {"0", "1"}


@pytest.mark.parametrize("name", ["L3", "L4", "L5"])
def test_levels_with_mixed_precision_store_what_2_bits_do(name: str):
    model = net(nn.SiLU)
    adaptive = actnn_level(name).quantize(model, BATCH, loss_of, every=2, samples=32)
    assert stored(model).saved_bytes == adaptive.saved_bytes <= adaptive.budget_bytes
    uniform = brevact.quantize_backward(net(nn.SiLU), actnn_level("L3").policy)
    assert adaptive.budget_bytes == stored(uniform).saved_bytes
    for _ in range(2):
        with actnn_level(name).saving(), adaptive.batch(range(16)):
            loss = loss_of(model, BATCH)
        loss.backward()
        adaptive.step(BATCH)
    assert (adaptive.state_dict()["samples"][:16] > 0).all()


@pytest.mark.parametrize("name", ["L2", "L4"])
def test_saving_changes_where_tensors_wait_and_not_the_gradients(name: str):
    level, model, grads = actnn_level(name), net(), []
    level.quantize(model, BATCH, loss_of)
    for context in (actnn_level("L0").saving, level.saving):
        model.zero_grad()
        torch.manual_seed(3)
        with context():
            loss = loss_of(model, BATCH)
        loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *grads))


@pytest.mark.gpu
def test_what_waits_on_the_host_is_pinned():
    model, batch = net().cuda(), tuple(x.cuda() for x in BATCH)
    adaptive = actnn_level("L4").quantize(model, batch, loss_of, samples=16)
    before = torch.cuda.memory_allocated()
    with actnn_level("L4").saving(), adaptive.batch(range(16)):
        loss = loss_of(model, batch)
    assert torch.cuda.memory_allocated() - before < adaptive.saved_bytes / 2
    loss.backward()
