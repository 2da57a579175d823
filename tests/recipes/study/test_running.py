"""Runs of studies: paired, resumable, each with one row."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from recipes.models import EfficientNetV2
from recipes.study import records
from recipes.study.definitions import STUDIES
from recipes.study.run import Run, Size
from recipes.study.running import Place, train_all, train_one
from recipes.study.training import count_spikes, train_run
from tests.recipes.running import interrupted_at_forward

#: Two steps an epoch.
TINY = {"size": Size("digits", 2, 16), "changes": (("batch_size", 8), ("test_size", 8), ("warmup_epochs", 0.5))}
FULL, TWO_BITS = (Run(policy, 0, **TINY) for policy in ("None", "StochBackward2bit"))
#: Forward passes of a run: two of the memory report; in an epoch, two in training and one in a test; the last test.
PASSES = 2 + 2 * (2 + 1) + 1
TIMES = ("seconds", "time")


def figures(row):
    return {name: value for name, value in row.items() if name not in TIMES}


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path / "runs.csv", "data", "cpu")


def test_train_run_depends_on_nothing_that_ran_before():
    torch.manual_seed(1)
    first = train_run(TWO_BITS, "data", "cpu")
    train_run(FULL, "data", "cpu")
    assert figures(train_run(TWO_BITS, "data", "cpu")) == figures(first)


def test_train_run_differs_in_what_is_stored_alone():
    policies = ("None", "LosslessBackward", "StochBackward2bit")
    plain, lossless, packed = (train_run(FULL.with_policy(policy), "data", "cpu") for policy in policies)
    assert plain["train_losses"] == lossless["train_losses"] != packed["train_losses"]
    assert plain["saved_bytes"] == plain["plain_bytes"] == packed["plain_bytes"]
    assert int(packed["saved_bytes"]) < int(plain["plain_bytes"]) / 8


def test_train_all_goes_on_after_the_last_finished_run(place):
    runs = [FULL, TWO_BITS]
    with pytest.raises(KeyboardInterrupt), interrupted_at_forward(EfficientNetV2, PASSES + 3):
        train_all(runs, place, 1)
    (kept,) = records.read(place.csv).values()
    assert kept["policy"] == "None"
    assert train_all(runs, place, 1) == []
    found = records.read(place.csv)
    assert found[FULL.key] == kept and figures(found[TWO_BITS.key]) == figures(train_run(TWO_BITS, "data", "cpu"))
    content = place.csv.read_bytes()
    with interrupted_at_forward(EfficientNetV2, 1):  # nothing runs
        assert train_all(runs, place, 1) == []
    assert place.csv.read_bytes() == content


def test_train_all_tells_of_a_run_that_fails_and_goes_on(place):
    wrong = FULL.with_policy("NoQuantizer")
    (problem,) = train_all([wrong, FULL], place, 1)
    assert "NoQuantizer is not a backward quantizer" in problem
    assert list(records.read(place.csv)) == [FULL.key]


def test_train_all_leaves_a_run_to_the_process_that_trains_it(place):
    with records.claimed(place.csv, FULL):
        (problem,) = train_all([FULL], place, 1)
    assert "another process trains it now" in problem and not place.csv.exists()


@pytest.mark.parametrize("content", [b"", b"damaged"])
def test_train_all_says_which_checkpoint_is_damaged(place, content):
    path = place.checkpoint(FULL)
    path.parent.mkdir()
    path.write_bytes(content)
    (problem,) = train_all([FULL], place, 1)
    assert f"{path} cannot be gone on from" in problem and "delete it, and the run begins anew" in problem


def test_train_one_leaves_a_run_that_another_command_has_ended(place):
    assert train_one(FULL, place) == ""
    content = place.csv.read_bytes()
    with interrupted_at_forward(EfficientNetV2, 1):  # nothing runs
        assert train_one(FULL, place) == ""
    assert place.csv.read_bytes() == content


@pytest.mark.exhaustive
def test_train_all_in_processes_gives_the_same_rows(place):
    assert train_all([FULL, TWO_BITS], place, 2) == []
    found = records.read(place.csv)
    assert {key: figures(row) for key, row in found.items()} == {
        run.key: figures(train_run(run, "data", "cpu")) for run in (FULL, TWO_BITS)
    }


def cifar100(folder, count):
    """Files of the official binary format: coarse label, fine label, pixels."""
    folder = folder / "cifar-100-binary"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name in ("train.bin", "test.bin"):
        labels = np.stack([np.zeros(count, np.uint8), np.arange(count, dtype=np.uint8)], axis=1)
        pixels = generator.integers(0, 256, (count, 3072), dtype=np.uint8)
        (folder / name).write_bytes(np.concatenate([labels, pixels], axis=1).tobytes())


def tiny_imagenet(folder, count):
    """The official folders, with an image of each class in both parts."""
    root, lines = folder / "tiny-imagenet-200", []
    for index in range(count):
        pixels = np.random.default_rng(index).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        for path in (root / f"train/n{index:02}/images/n{index:02}_0.JPEG", root / f"val/images/val_{index}.JPEG"):
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path, "JPEG")
        lines.append(f"val_{index}.JPEG\tn{index:02}\t0\t0\t62\t62\n")
    (root / "val/val_annotations.txt").write_text("".join(lines))


@pytest.mark.parametrize(("dataset", "write"), [("cifar100", cifar100), ("tiny-imagenet", tiny_imagenet)])
def test_train_run_takes_other_data_sets(tmp_path, dataset, write):
    write(tmp_path, 16)
    run = replace(FULL, policy="DEFAULT", size=replace(FULL.size, dataset=dataset))
    row = train_run(run, str(tmp_path), "cpu")
    assert (row["dataset"], row["test_images"]) == (dataset, "8")
    assert 0 < float(row["train_loss"]) < 10 and int(row["saved_bytes"]) < int(row["plain_bytes"]) / 12


def test_count_spikes_leaves_out_a_loss_of_five_points():
    assert [count_spikes([before, before - 0.05, before]) for before in (0.65, 0.3, 0.9)] == [0, 0, 0]
    assert count_spikes([0.65, 0.599, 0.65, 0.5]) == 2


def test_train_run_writes_nan_where_the_loss_is_not_finite():
    run = Run("None", 0, TINY["size"], changes=(*TINY["changes"], ("lr", 1e30)))
    row = train_run(run, "data", "cpu")
    assert row["train_loss"] == "nan" and row["train_losses"].endswith("nan")


def assert_same_in_slices(run, place):
    expected = figures(train_run(run, "data", "cpu"))
    slices = [train_all([run], replace(place, stop_at=time.time() + 0.05), 1) for _ in range(3)]
    assert [len(problems) for problems in slices] == [1, 1, 0] and "the same command goes on" in slices[0][0]
    (row,) = records.read(place.csv).values()
    assert figures(row) == expected
    assert list(place.csv.with_suffix(".checkpoints").iterdir()) == []


@pytest.mark.exhaustive
def test_train_all_in_slices_gives_the_same_row(place):
    assert_same_in_slices(FULL.with_policy("StochBackward2bit4bitMix@linear:0.8:0.2"), place)


@pytest.mark.exhaustive
@pytest.mark.parametrize("study", ["long-efficientnetv2-s", "long-resnet50"])
def test_train_all_in_slices_gives_the_same_row_of_a_long_run(place, study):
    run = STUDIES[study].case("DEFAULT").run(FULL.size, 0)
    assert_same_in_slices(replace(run, changes=tuple({**dict(run.changes), **dict(FULL.changes)}.items())), place)


def test_train_all_says_that_a_checkpoint_holds_something_else(place):
    path = place.checkpoint(FULL)
    path.parent.mkdir()
    torch.save({"trainer": {}}, path)
    (problem,) = train_all([FULL], place, 1)
    assert "delete it, and the run begins anew" in problem
