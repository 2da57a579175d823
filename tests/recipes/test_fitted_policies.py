"""Budgets as words of a command line, and what they make of a model."""

from __future__ import annotations

import argparse

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import brevact
from recipes.fitted_policies import policy_or_fit
from recipes.policy_names import NamedPolicy


class _Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 8))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.net(inputs), targets)


def _batches(count: int) -> list[dict[str, Tensor]]:
    return [{"inputs": torch.randn(256, 64), "targets": torch.randint(0, 8, (256,))} for _ in range(count)]


@pytest.mark.parametrize("words", ["fit:bytes=StochBackward4bit", "adaptive:bytes=StochBackward4bit", "adaptive:6x"])
def test_policy_or_fit_keeps_no_more_bytes_than_named(words: str) -> None:
    torch.manual_seed(0)
    model, batches = _Loss(), _batches(3)
    like = brevact.memory_report(brevact.quantize_backward(_Loss(), brevact.StochBackward4bit), batches[0])
    wanted = policy_or_fit(words)
    assert not isinstance(wanted, NamedPolicy)
    found = wanted.named(model, batches, lambda model, batch: model(**batch))
    report = brevact.memory_report(found.apply(model), batches[0])
    budget = like.plain_bytes / 6 if words.endswith("6x") else like.saved_bytes
    assert found.name == words and 0 < report.saved_bytes <= budget


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["fit", "adaptive"])
def test_policy_or_fit_keeps_the_peak_of_a_step(kind: str) -> None:
    torch.manual_seed(0)
    model, batches = _Loss(), _batches(3)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch)

    report = brevact.memory_report(brevact.quantize_backward(_Loss(), brevact.StochBackward4bit), batches[0], loss)
    wanted = policy_or_fit(f"{kind}:peak={report.packed_peak}B")
    assert not isinstance(wanted, NamedPolicy)
    found = wanted.named(model, batches, loss).apply(model)
    assert brevact.memory_report(found, batches[0], loss).packed_peak <= report.packed_peak


@pytest.mark.parametrize("words", ["adaptive:noise=0.05", "adaptive:", "fit:quickly", "fit:bytes=Nobody"])
def test_policy_or_fit_refuses_what_is_no_budget(words: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=words.partition("=")[2] or words):
        policy_or_fit(words)
