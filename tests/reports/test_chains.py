"""`chains_of`: which layers' tensors hang together."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import brevact
from brevact.reports.memory_table import Chain, chains_of


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.BatchNorm2d(8), nn.SiLU()
        self.conv, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.relu, self.drop, self.last = nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x))
        return self.last(self.drop(self.relu(x + self.second(self.conv(x)))))


def chains(policy=brevact.DEFAULT) -> tuple[Chain, ...]:
    model = brevact.quantize_backward(Residual(), policy)
    return chains_of(brevact.memory_report(model, torch.randn(4, 8, 16, 16)))


def test_chains_of_finds_sources_and_all_that_derive_from_them():
    first, second = chains()
    nbytes = brevact.quantizer(brevact.StochBackward4bit).quantize(torch.randn(4, 8, 16, 16)).nbytes
    assert (first.source, first.readers) == ("first", ("act", "conv", "last"))
    assert (second.source, second.readers) == ("second", ("last",))
    assert first.layers == ("first", "act", "conv", "last")
    assert {(each.saved_bytes, each.tensor_bytes) for each in (first, second)} == {(nbytes, 4 * 4 * 8 * 16 * 16)}


def test_chains_of_what_does_not_derive_are_layers():
    found = chains(brevact.StochBackward2bit.let(derive_min_bits=0))
    assert [each.layers for each in found] == [("first",), ("act",), ("conv",), ("second",), ("last",)]


def test_chains_of_full_precision_are_none():
    assert chains({"*": None}) == ()


def test_chains_of_what_is_quantized_on_backward_are_those_of_what_is_packed():
    later = chains(brevact.StochBackward4bit.let(save_mode=brevact.SaveMode.QUANTIZE_ON_BACKWARD))
    assert {each.source for each in later} >= {"first", "second"}


def test_chains_of_counts_who_reads_the_same_tensor():
    class Projections(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.query(x) + self.key(x)

    model = brevact.quantize_backward(Projections(), brevact.StochBackward4bit)
    (chain,) = chains_of(brevact.memory_report(model, torch.randn(64, 64)))
    assert (chain.source, chain.readers, chain.bit_widths) == ("query", ("key",), (4,))
