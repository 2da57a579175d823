"""Two processes that train together: DDP, FSDP2, noise of each rank."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.integration.models import assert_near, grads
from tests.integration.ranks import BATCH, loss_of, net, noise
from tests.ranks import load_ranks, run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, object]]:
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks("tests.integration.ranks", folder)
    return load_ranks(folder)


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    """Gradients of one process on the whole batch, at full precision."""
    model = net()
    loss_of(model(BATCH)).backward()
    return grads(model)


WRAPPED = ("ddp, quantized before", "ddp, quantized after", "fsdp, quantized before", "fsdp, quantized after")
#: Weights that backward needs, the norm's inverse deviations, and its weight and bias, from which its output derives;
#: the first layer needs none for an input without gradient. Linear layers keep a view, transposed.
KEPT = [(24, 1), (64,), (64, 48), (48, 8)]


@pytest.mark.parametrize("name", WRAPPED)
def test_ranks_together_give_the_gradients_of_one_process(name, ranks, expected):
    for rank in ranks:
        assert_near(rank[name]["grads"], expected)
    assert all(map(torch.equal, ranks[0][name]["grads"], ranks[1][name]["grads"]))


@pytest.mark.parametrize("name", [*WRAPPED, "fsdp, bfloat16"])
def test_gathered_parameters_are_not_packed(name, ranks):
    for rank in ranks:
        assert rank[name]["packed"] == 6 and list(dict.fromkeys(rank[name]["kept"])) == KEPT


def test_sharded_models_train_in_bfloat16(ranks, expected):
    top = max(grad.norm() for grad in expected)
    for grad, reference in zip(ranks[0]["fsdp, bfloat16"]["grads"], expected, strict=True):
        # beside the error of 8 bits in `assert_near`: five products of factors rounded by 2^-8 each
        assert (grad - reference).norm() <= (4 * 8 / 255 / 2 + 5 * 2**-7) * top


@pytest.mark.parametrize("name", ["no_sync", "communication hook", "checkpoint"])
def test_gradients_that_are_reduced_otherwise(name, ranks, expected):
    for rank in ranks:
        assert_near(rank[name], expected)


@pytest.mark.parametrize("name", ["weights, ddp", "weights, fsdp"])
def test_ranks_keep_the_same_weights(name, ranks):
    assert all(map(torch.equal, ranks[0][name], ranks[1][name]))
    assert not any(map(torch.equal, ranks[0][name], net().parameters()))


def test_a_sharded_model_trains_after_reports_as_without(ranks):
    for rank in ranks:
        assert all(map(torch.equal, rank["weights, fsdp, measured"], rank["weights, fsdp"]))


def test_a_training_policy_follows_a_sharded_model_and_fits_none(ranks):
    for rank in ranks:
        assert all(map(torch.equal, rank["weights, fsdp, followed"], rank["weights, fsdp, of four bits"]))
        assert "a budget is fitted in a run of one process" in rank["fsdp, fitted"]


@pytest.mark.parametrize("name", ["noise", "noise in a graph"])
def test_each_rank_draws_noise_of_its_own(name, ranks):
    first, second = (rank[name] for rank in ranks)
    assert first.shape == second.shape
    # codes of 2 bits, four in a byte, that are rounded apart: most bytes differ; their ranges are those of the tensor
    assert (first != second).float().mean() > 0.5


def test_the_first_rank_draws_what_one_process_does(ranks):
    assert torch.equal(ranks[0]["noise"], noise(lambda model: model))


def test_ranks_agree_on_widths(ranks):
    """Each measures its own part; both go on with the mean."""
    first, second = (rank["adaptive"]["states"] for rank in ranks)
    for a, b in zip(first, second, strict=True):
        assert a["sensitivities"] == b["sensitivities"] and a["bit_widths"] == b["bit_widths"]
    assert first[0]["sensitivities"] != first[1]["sensitivities"] and len(set(first[1]["bit_widths"])) > 1
    assert all(map(torch.equal, *(rank["adaptive"]["grads"] for rank in ranks)))
