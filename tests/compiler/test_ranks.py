"""Two processes train compiled models: gradients of plain compiled ones, packed tensors, and reports."""

from __future__ import annotations

import pytest
import torch

from tests.compiler.ranks import BATCH, WAYS, net, trained
from tests.ranks import load_ranks, run_ranks


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_as_one(way, tmp_path):
    (tmp_path / "way").write_text(way, "utf-8")
    run_ranks("tests.compiler.ranks", tmp_path)
    ranks = load_ranks(tmp_path)
    alone = trained(net(None), BATCH)
    plain, lossless, packed = (ranks[0][name] for name in ("plain", "lossless", "packed"))
    for name in ("gradients", "weights", "after"):
        assert all(map(torch.equal, lossless[name], plain[name]))
        assert all(map(torch.equal, packed[name], ranks[1]["packed"][name]))
    for name in ("gradients", "weights"):
        torch.testing.assert_close(plain[name], alone[name])
    losses = [torch.stack(rank["plain"]["losses"]) for rank in ranks]
    torch.testing.assert_close(sum(losses) / 2, torch.stack(alone["losses"]))
    for rank in ranks:
        torch.testing.assert_close(rank["packed"]["losses"][0], rank["plain"]["losses"][0])
        assert rank["packed"]["kept"] < rank["plain"]["kept"] / 3
        for name in ("lossless", "packed"):
            assert rank[name].get("reported", rank[name]["kept"]) == rank[name]["kept"]
