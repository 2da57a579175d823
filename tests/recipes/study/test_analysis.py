"""Intervals of paired differences, and what tables say of them."""

import numpy as np
import pytest

from recipes.study.analysis import ACCURACY, TRAIN_LOSS, Interval, comparisons, difference_text, interval
from recipes.study.cases import REFERENCE, Case, Study
from recipes.study.run import KEY, Size
from recipes.study.tables import summary
from recipes.study.training import FIGURES

SIZE = Size("digits", 2, 64)
STUDY = Study("one", "Is it worse?", "nobody", (REFERENCE, Case("2 bits", "StochBackward2bit")))


def row_of(run, loss, accuracy):
    figures = dict.fromkeys(FIGURES, "1") | {
        "train_loss": str(loss),
        "test_accuracy": str(accuracy),
        "accuracies": "0.5 0.6",
        "saved_bytes": str(2**20),
        "plain_bytes": str(2**24),
    }
    return dict(zip(KEY, run.key, strict=True)) | figures


def rows_of(losses):
    """Rows by key: losses of full precision and of the other case, seed by seed; None for a run that is missing."""
    pairs = [
        (case.run(SIZE, seed), loss)
        for seed, pair in losses.items()
        for case, loss in zip(STUDY.cases, pair, strict=True)
    ]
    return {run.key: row_of(run, loss, 0.9 - loss / 10) for run, loss in pairs if loss is not None}


def test_interval_covers_the_mean_as_often_as_it_says():
    draws = 2_000
    samples = np.random.default_rng(0).normal(1.0, 3.0, (draws, 4))
    found = [interval(list(sample)) for sample in samples]
    share = np.mean([abs(each.mean - 1.0) <= each.half_width for each in found])
    assert abs(share - 0.95) < 5 * np.sqrt(0.95 * 0.05 / draws)


@pytest.mark.parametrize(
    ("found", "measure", "words"),
    [
        (None, TRAIN_LOSS, ""),
        (Interval(0.02, 0.01, 3), TRAIN_LOSS, "+0.020 [0.010, 0.030]"),
        (Interval(-0.02, 0.01, 3), TRAIN_LOSS, "-0.020 [-0.030, -0.010]"),
        (Interval(-0.2, 0.5, 3), ACCURACY, "-0.20 [-0.70, 0.30]"),
        (Interval(-0.2, float("nan"), 1), ACCURACY, "-0.20 (one pair)"),
        (Interval(float("nan"), float("nan"), 3), TRAIN_LOSS, "did not converge"),
    ],
)
def test_difference_text_has_the_ends_of_the_interval(found, measure, words):
    assert difference_text(found, measure) == words


def test_comparisons_take_pairs_of_one_seed_alone():
    rows = rows_of({0: (1.0, 1.25), 1: (2.0, 2.25), 2: (9.0, None), 3: (None, 0.0)})
    reference, other = comparisons(STUDY, rows, SIZE, range(4))
    assert sorted(reference.rows) == [0, 1, 2] and reference.against is None
    difference = other.differences["train_loss"]
    assert (difference.mean, difference.half_width, difference.pairs) == (0.25, 0.0, 2)


def test_summary_says_which_runs_are_missing():
    text = summary(STUDY, rows_of({0: (1.0, 1.25)}), SIZE, [0, 1])
    assert "| 2 bits | 1 | 1.250 | +0.250 (one pair) | 77.50 | -2.50 (one pair) |" in text
    assert "2 of 4 runs are missing: efficientnetv2, None, seed 1; efficientnetv2, StochBackward2bit, seed 1." in text
    assert "not run" in summary(STUDY, {}, SIZE, [0])


def test_summary_says_once_what_all_rows_share():
    rows = rows_of({0: (1.0, 1.25)})
    quiet = {key: {**row, "spikes": "0"} for key, row in rows.items()}
    spiky = summary(STUDY, rows, SIZE, [0])
    assert "Differences are from full precision." in spiky and "| spikes |" in spiky and "No run" not in spiky
    text = summary(STUDY, quiet, SIZE, [0])
    assert "spikes" not in text and "compared with" not in text
    assert "Differences are from full precision. No run has a spike." in text


def test_summary_names_what_a_row_is_compared_with_where_that_differs():
    cases = (*STUDY.cases, Case("4 bits", "StochBackward4bit"))
    study = Study("two", "Which?", "nobody", cases, (("4 bits", "2 bits"),))
    assert "| 4 bits | 2 bits | 0 |" in summary(study, {}, SIZE, [0])


def test_runs_that_did_not_converge_are_told_of():
    rows = rows_of({0: (1.0, float("nan")), 1: (1.0, 1.5), 2: (1.0, 1.5)})
    assert "| nan | did not converge |" in summary(STUDY, rows, SIZE, range(3))
