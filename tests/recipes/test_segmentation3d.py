"""`python -m recipes.segmentation3d`."""

import pytest
import torch

from recipes.files import read_rows
from recipes.segmentation3d import VolumeSettings, VolumeTask, main, make_volumes
from tests.recipes.running import PNG, POLICY, refused

pytest.importorskip("monai", reason="MONAI is not installed: pip install '.[domains]'")

#: Command line of the smallest runs.
TINY = "--channels 8 --patch 16 --volume 32 --train-size 2 --test-size 1 --epochs 1 --seeds 0".split()


@pytest.mark.parametrize("net", ["unet", "segresnet"])
def test_main_trains_pairs_and_draws(tmp_path, capsys, net):
    variants = ["plain", "checkpoint", POLICY, "LosslessBackward"]
    assert main([*TINY, "--net", net, "--variants", *variants, "--out-dir", str(tmp_path)]) == 0
    values = {row["variant"]: row["value"] for row in read_rows(tmp_path / "runs.csv")}
    assert values["plain"] == values["checkpoint"] == values["LosslessBackward"]
    losses = {row["variant"]: row["loss"] for row in read_rows(tmp_path / "epochs.csv")}
    assert losses["plain"] == losses[POLICY]  # of one step, which nothing has come before
    assert (tmp_path / "segmentation3d-plain.png").read_bytes().startswith(PNG)
    assert "Dice - plain" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--patch 50",
            "--patch 50 is not possible: the network halves it three times; use a multiple of 8, such as 48",
        ),
        ("--patch 4", "use a multiple of 8, such as 8 or 16"),
        (
            "--patch 80",
            "--patch 80 is not possible in volumes of 72 voxels along each edge; use 72 at most, or --volume",
        ),
        ("--batch-size 17", "--batch-size 17 is not possible with 16 volumes; use 16 at most, or --train-size 17"),
        ("--channels 12", "--channels 12 is not possible: use a multiple of 8, such as 16"),
    ],
)
def test_main_says_what_fits_and_exits_with_2(tmp_path, capsys, arguments, message):
    refused(main, [*arguments.split(), "--out-dir", str(tmp_path / "runs")], message, capsys)


def test_batches_depend_on_seed_and_epoch_alone():
    settings = VolumeSettings(channels=8, patch=16, volume=32, train_size=4, batch_size=2)
    one, again, other = (VolumeTask(settings, seed, torch.device("cpu")) for seed in (0, 0, 1))
    list(again.batches(1))
    first, second, third = (list(task.batches(2)) for task in (one, again, other))
    assert all(
        torch.equal(x, y) for mine, its in zip(first, second, strict=True) for x, y in zip(mine, its, strict=True)
    )
    assert not torch.equal(first[0][0], third[0][0])


def test_volumes_have_all_classes():
    volumes = make_volumes(VolumeSettings(volume=48), 4, seed=0)
    assert {int(value) for volume in volumes for value in volume["label"].unique()} == {0, 1, 2, 3}
