"""Accumulation, optimizers in backward, threads, other people's hooks."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from brevact import NearestBackward4bit, StochBackward8bit
from tests.integration.models import Attention, X, assert_near, codes, grads, quantized, twins

TOKENS = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("together", [False, True])
def test_gradients_of_micro_batches_add_up(together):
    plain, model = twins(source=StochBackward8bit)
    plain(X).square().sum().backward()
    losses = (
        [model(part).square().sum() for part in X.chunk(4)]
        if together
        else (model(p).square().sum() for p in X.chunk(4))
    )
    for loss in reversed(losses) if together else losses:
        loss.backward()
    assert_near(grads(model), grads(plain))


def test_forwards_before_one_backward_keep_codes_of_their_own():
    plain, model = twins(source=StochBackward8bit)
    for each in (plain, model):
        (each(X).square().sum() + each(2 * X).square().sum() + each(X).sum()).backward()
    assert_near(grads(model), grads(plain))


def test_optimizers_run_in_backward():
    """Each weight changes as soon as its gradient is there, before the layers below it have run backward."""
    model, reference = (quantized(Attention(), NearestBackward4bit) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], 0.1)

        def step(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(step)
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    for _ in range(2):
        model(TOKENS).square().mean().backward()
        optimizer.zero_grad()
        reference(TOKENS).square().mean().backward()
        optimizer.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad is None
        torch.testing.assert_close(p, q)


def test_threads_run_one_model_side_by_side():
    plain, model = twins(source=StochBackward8bit)
    plain(X).square().sum().backward()
    failures: list[BaseException] = []
    barrier = threading.Barrier(2)

    def run(part: Tensor) -> None:
        try:
            for _ in range(5):
                barrier.wait(60)
                packed, _, out = codes(model, part)
                assert len(packed) == 4
                out.square().sum().backward()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(part,)) for part in X.chunk(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    assert_near([grad / 5 for grad in grads(model)], grads(plain))


class Offloaded(nn.Module):
    """A block whose author keeps its tensors somewhere else."""

    def __init__(self, hooks: object) -> None:
        super().__init__()
        self.block, self.hooks = nn.Sequential(nn.Linear(64, 64), nn.SiLU()), hooks

    def forward(self, x: Tensor) -> Tensor:
        with self.hooks():
            return self.block(x)


@pytest.mark.parametrize("hooks", [save_on_cpu, lambda: saved_tensors_hooks(lambda x: x, lambda x: x)])
def test_lossless_hooks_around_and_inside_change_nothing(hooks):
    def net(wrap) -> nn.Module:
        torch.manual_seed(0)
        return quantized(nn.Sequential(nn.Linear(64, 64), Offloaded(wrap), nn.LayerNorm(64)), NearestBackward4bit)

    results = []
    for around, inside in (
        (contextlib.nullcontext, contextlib.nullcontext),
        (hooks, contextlib.nullcontext),
        (hooks, hooks),
    ):
        model = net(inside)
        with around():
            out = model(X)
        out.square().sum().backward()
        results.append([out, *grads(model)])
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))
