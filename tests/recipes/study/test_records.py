"""Rows of runs in a file that several processes add to."""

import multiprocessing

import pytest

from recipes.errors import RecipeError
from recipes.study import records
from recipes.study.run import KEY, Run, Size
from recipes.study.training import COLUMNS

RUN = Run("StochBackward2bit:bucket_size=64,rounding=nearest", 0, Size("digits", 2, None))


def row_of(run, **figures):
    return dict.fromkeys(COLUMNS, "0") | dict(zip(KEY, run.key, strict=True)) | figures


def test_add_keeps_the_first_row_of_a_run(tmp_path):
    path = tmp_path / "new" / "runs.csv"
    records.add(path, row_of(RUN, train_loss="1"))
    records.add(path, row_of(RUN, train_loss="2"))
    records.add(path, row_of(RUN.with_policy("None"), train_loss="3"))
    found = records.read(path)
    assert {key[5]: row["train_loss"] for key, row in found.items()} == {RUN.policy: "1", "None": "3"}
    assert found[RUN.key]["train_size"] == "all"


def _add_some(path, first):
    for seed in range(first, first + 5):
        records.add(path, row_of(Run("None", seed)))


@pytest.mark.exhaustive
def test_add_loses_no_row_of_another_process(tmp_path):
    path = tmp_path / "runs.csv"
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_add_some, args=(path, first)) for first in (0, 5)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(records.read(path)) == 10


def test_read_refuses_a_file_of_other_columns(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(RecipeError, match=r"has the columns a, b; studies write dataset, .*; name another file"):
        records.read(path)


@pytest.mark.parametrize("kept", [0.6, 0.99])
def test_read_refuses_a_row_that_is_cut(tmp_path, kept):
    path = tmp_path / "runs.csv"
    records.add(path, row_of(RUN, time="2026-01-01 00:00"))
    whole = path.read_text()
    header = whole.index("\n") + 1
    path.write_text(whole[: header + int(kept * (len(whole) - header))].rpartition(",")[0])
    with pytest.raises(RecipeError, match="line 2 is damaged; delete it, and its run is trained again"):
        records.read(path)


def test_read_refuses_a_row_with_words_for_numbers(tmp_path):
    path = tmp_path / "runs.csv"
    records.add(path, row_of(RUN, train_loss="1.2.3"))
    with pytest.raises(RecipeError, match="line 2 is damaged"):
        records.read(path)


def test_claimed_is_of_one_at_a_time(tmp_path):
    path = tmp_path / "runs.csv"
    with records.claimed(path, RUN) as first, records.claimed(path, RUN) as second:
        with records.claimed(path, RUN.with_policy("None")) as other, records.claimed(tmp_path / "b.csv", RUN) as file:
            assert (first, second, other, file) == (True, False, True, True)
    with records.claimed(path, RUN) as again:
        assert again
