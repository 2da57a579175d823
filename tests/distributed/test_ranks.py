"""Two processes: equal averages of both ranks' decoded gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import brevact
from brevact.distributed.hook import pack
from tests.distributed.ranks import given
from tests.ranks import WORLD, load_ranks, run_ranks

QUANTIZER = brevact.quantizer(brevact.StochBackward4bit)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("tests.distributed.ranks", folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict[str, object]]:
    return load_ranks(folder)


def mean_of_decoded(place: int, factor: float = 1.0) -> torch.Tensor:
    """The average of what the ranks send in the first step, in which a parameter's number is its place."""
    return sum(decoded(rank, place, factor) for rank in range(WORLD)) / WORLD


def decoded(rank: int, place: int, factor: float = 1.0) -> torch.Tensor:
    return pack(QUANTIZER, factor * given(rank)[place], (0, 0, place), rank).dequantize()


@pytest.mark.parametrize(
    "name", ["drawn", "mixed", "same gradients", "accumulated", "unused", "joined", "whole", "resumed"]
)
def test_ranks_get_the_same_bits(name, ranks):
    assert all(map(torch.equal, ranks[0][name], ranks[1][name]))


def test_averages_are_those_of_what_each_rank_sent(ranks):
    first, bias, second = ranks[0]["drawn"]
    assert torch.equal(first, mean_of_decoded(0)) and torch.equal(second, mean_of_decoded(2))
    assert torch.equal(bias, (given(0)[1] + given(1)[1]) / 2)


def test_gradients_accumulate_before_they_are_sent(ranks):
    first, bias, _ = ranks[0]["accumulated"]
    assert torch.equal(first, mean_of_decoded(0, -1.0))
    assert torch.equal(bias, (-given(0)[1] - given(1)[1]) / 2)


def test_each_rank_has_noise_of_its_own(ranks):
    """Equal gradients with equal seeds round apart in some elements: their average lies between two levels."""
    average = ranks[0]["same gradients"][0]
    levels = len(torch.cat([row.unique() for row in average.view(12, 512)]))  # a row is a bucket of 4 levels
    assert levels > 12 * 4


def test_parameters_that_one_rank_or_none_uses(ranks):
    first, _, second = ranks[0]["unused"]
    assert torch.equal(first, decoded(1, 0) / 2) and not second.any()


def test_hooks_of_several_ranks_go_on_from_checkpoints(ranks):
    assert all(map(torch.equal, ranks[0]["whole"], ranks[0]["resumed"]))


def test_ranks_that_pack_otherwise_are_told(ranks):
    """Before messages of different lengths, at which backends crash or hang, and at each step."""
    for rank in ranks:
        for setting, message in rank["disagreeing"].items():
            assert "ranks [1] are packed in different ways" in message, setting


def test_a_rank_that_is_gone_raises_what_the_backend_raises(folder):
    message = (folder / "left_alone").read_text("utf-8")
    assert message.startswith(("RuntimeError", "DistBackendError")) and "gloo" in message
