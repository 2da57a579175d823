"""`python -m recipes.detection`."""

import pytest
import torch

from recipes.data.shapes import SHAPES, make_pictures
from recipes.detection import DetectionSettings, DetectionTask, main, mean_average_precision
from recipes.files import read_rows
from recipes.torchvision_ops import batched_nms, box_overlap
from tests.recipes.running import PNG, POLICY, refused

#: Command line of the smallest runs.
TINY = "--image 64 --features 32 --train-size 4 --test-size 2 --epochs 1 --seeds 0".split()


@pytest.fixture
def torchvision():
    return pytest.importorskip("torchvision", reason="torchvision is not installed: pip install --no-deps torchvision")


def test_main_trains_pairs_and_draws(torchvision, tmp_path, capsys):
    assert main([*TINY, "--variants", "plain", POLICY, "--out-dir", str(tmp_path)]) == 0
    losses = {row["variant"]: row["loss"] for row in read_rows(tmp_path / "epochs.csv")}
    assert losses["plain"] == losses[POLICY]  # of one step, which nothing has come before
    assert (tmp_path / "detection-plain.png").read_bytes().startswith(PNG)
    assert "AP50 - plain" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--image 100", "the detector halves pictures five times; use a multiple of 32, such as 96 or 128"),
        ("--image 32", "use a multiple of 32, such as 64 or 96"),
        (
            "--batch-size 300",
            "--batch-size 300 is not possible with 256 pictures; use 256 at most, or --train-size 300",
        ),
        ("--features 48", "--features 48 is not possible: use a multiple of 32, such as 64"),
    ],
)
def test_main_says_what_fits_and_exits_with_2(torchvision, tmp_path, capsys, arguments, message):
    refused(main, [*arguments.split(), "--out-dir", str(tmp_path / "runs")], message, capsys)


def test_targets_found_score_one_and_boxes_found_twice_or_elsewhere_lower_it():
    boxes = torch.tensor([[0.0, 0, 10, 10], [20, 20, 40, 40]])
    targets = [{"boxes": boxes, "labels": torch.tensor([0, 1])}]

    def score(boxes, labels, scores):
        found = {"boxes": torch.tensor(boxes), "labels": torch.tensor(labels), "scores": torch.tensor(scores)}
        return mean_average_precision([found], targets, 2)

    assert score(boxes.tolist(), [0, 1], [0.3, 0.9]) == 1
    assert score(boxes.tolist(), [1, 0], [0.3, 0.9]) == 0  # other classes
    assert score([[0.0, 0, 10, 10]], [0], [0.9]) == 0.5  # one of two classes
    assert score([[0.0, 0, 10, 4.9]], [0], [0.9]) == 0  # overlap below a half
    wrong_first = [[60.0, 60, 70, 70], [0, 0, 10, 10], [20, 20, 40, 40]]
    assert score(wrong_first, [0, 0, 1], [0.9, 0.8, 0.7]) == pytest.approx((0.5 + 1) / 2)
    twice = [[0.0, 0, 10, 10], [0, 0, 10, 9], [20, 20, 40, 40]]
    assert score(twice, [0, 0, 1], [0.9, 0.8, 0.7]) == 1  # the second comes after all recall


def test_pictures_have_shapes_within_their_boxes():
    pictures = make_pictures(32, 96, seed=3)
    assert pictures.images.shape == (32, 3, 96, 96)
    for target in pictures.targets:
        assert 1 <= len(target["boxes"]) == len(target["labels"]) <= 4
        assert target["boxes"].min() >= 0 and target["boxes"].max() <= 96
        overlap = box_overlap(target["boxes"], target["boxes"]) - torch.eye(len(target["boxes"]))
        assert overlap.max() <= 0.2
    assert torch.cat([target["labels"] for target in pictures.targets]).unique().tolist() == list(range(len(SHAPES)))
    assert torch.equal(make_pictures(32, 96, seed=3).images, pictures.images)


def test_batches_depend_on_seed_and_epoch_alone(torchvision):
    settings = DetectionSettings(image=64, features=32, train_size=4, batch_size=2)
    one, again, other = (DetectionTask(settings, seed, torch.device("cpu")) for seed in (0, 0, 1))
    list(again.batches(1))
    first, second, third = (torch.stack(next(iter(task.batches(2)))[0]) for task in (one, again, other))
    assert torch.equal(first, second) and not torch.equal(first, third)


def test_batched_nms_keeps_the_best_of_each_class():
    torch.manual_seed(0)
    boxes = 20 * torch.rand(60, 2).repeat(1, 2) + torch.tensor([0.0, 0, 10, 10])
    scores, classes = torch.rand(60), torch.randint(0, 3, (60,))
    kept = batched_nms(boxes, scores, classes, 0.5)
    assert scores[kept].tolist() == sorted(scores[kept].tolist(), reverse=True)
    near = (box_overlap(boxes, boxes[kept]) > 0.5) & (classes[:, None] == classes[kept])
    better = scores[kept] >= scores[:, None]
    assert (near & better).any(1).all()  # each box is near to a better one that stays, or is one
    assert near[kept].sum() == len(kept)  # none that stay are near to each other
