"""The Hugging Face callback in two processes, each with a part of the parameters: FSDP2."""

import pytest
import torch

from tests.ranks import load_ranks, run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("tests.trainers.sharded", folder)
    return load_ranks(folder)


@pytest.mark.exhaustive
def test_sharded_models_train_under_the_callback_as_without(ranks):
    for rank in ranks:
        plain, exact, packed = rank[None], rank["none"], rank["default"]
        assert all(map(torch.equal, exact["losses"] + exact["weights"], plain["losses"] + plain["weights"]))
        assert torch.equal(packed["losses"][0], plain["losses"][0])
        assert not all(map(torch.equal, packed["weights"], plain["weights"]))
        assert packed["logs"]["brevact/plain_mib"] > 3 * packed["logs"]["brevact/saved_mib"] > 0 == packed["left"]
    assert all(map(torch.equal, ranks[0]["default"]["weights"], ranks[1]["default"]["weights"]))


@pytest.mark.exhaustive
def test_budgets_of_several_processes_are_refused_before_the_first_step(ranks):
    for rank in ranks:
        assert "a budget is fitted in a run of one process" in rank["3x"]["error"]
