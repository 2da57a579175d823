"""Errors of gradients over training steps: what is measured of errors that are known."""

import math

import pytest
import torch

from benchmarks.errors_along_training import Errors, main, measure, rows_of
from benchmarks.trained_models import TASKS, Learner, settings_of
from recipes.policy_names import named_policy


def _learner(seed=0):
    task = TASKS["EfficientNetV2 nano"]
    return Learner(task, settings_of(task, None, seed=seed, batch_size=16))


def test_coherence_tells_errors_that_add_up_from_those_that_do_not():
    torch.manual_seed(0)
    steps, numel = 64, 1000
    same, independent = Errors(torch.zeros(numel)), Errors(torch.zeros(numel))
    constant, gradient = torch.randn(numel), torch.randn(numel)
    for _ in range(steps):
        same.add(constant, gradient)
        independent.add(torch.randn(numel), gradient)
    assert same.coherence == pytest.approx(steps)
    assert same.relative == pytest.approx(float(constant.square().sum() / gradient.square().sum()))
    # A mean of chi-squared values over `numel` elements: 5 standard errors.
    assert abs(independent.coherence - 1) < 5 * math.sqrt(2 / numel)


def test_full_precision_has_no_errors_and_codes_have_some():
    errors, largest = measure(_learner(), named_policy("None"), 2)
    assert largest == 0 and all(each.squares == 0 for each in errors.values())
    errors, largest = measure(_learner(), named_policy("StochBackward2bit"), 2)
    assert 0 < largest < math.inf
    first, *others = rows_of(errors)
    assert first["weight"] == "all" and len(others) == len(errors)
    assert float(first["error"]) <= largest * 1.0005  # of four digits


def test_main_refuses_no_steps(capsys):
    with pytest.raises(SystemExit):
        main(["--steps", "0"])
    assert "--steps 0 is not possible: use at least 1" in capsys.readouterr().err
