"""The choice of options under a budget, against all choices."""

from __future__ import annotations

import itertools
import random

import pytest

from brevact.bit_widths.budgets import Option, allocate, convex_hull


def widths(sensitivity: float, cost: float, choices=range(1, 9)) -> list[Option]:
    return [Option(cost * b, sensitivity / (2**b - 1) ** 2, b) for b in choices]


@pytest.mark.parametrize("seed", range(8))
def test_allocate_is_within_a_step_of_the_best_of_all_choices(seed: int):
    draw = random.Random(seed)
    items = [widths(10 ** draw.uniform(-3, 3), draw.randint(1, 9), range(1, 6)) for _ in range(5)]
    budget = sum(item[0].cost for item in items) * draw.uniform(1, 4)
    chosen = allocate(items, budget)
    best = min(sum(o.noise for o in c) for c in itertools.product(*items) if sum(o.cost for o in c) <= budget)
    assert sum(o.cost for o in chosen) <= budget
    hulls = [convex_hull(item) for item in items]
    left = [
        option.noise - hull[hull.index(option) + 1].noise
        for option, hull in zip(chosen, hulls, strict=True)
        if option is not hull[-1]
    ]
    assert best - 1e-9 <= sum(o.noise for o in chosen) <= best + max(left, default=0.0) + 1e-9


def test_allocate_is_best_where_costs_are_equal():
    items = [widths(s, 1) for s in (1.0, 50.0, 3.0, 0.1)]
    for budget in range(4, 33):
        noise = sum(o.noise for o in allocate(items, budget))
        choices = (c for c in itertools.product(*items) if sum(o.cost for o in c) <= budget)
        assert noise == pytest.approx(min(sum(o.noise for o in c) for c in choices))


def test_convex_hull_leaves_out_what_costs_more_and_is_worse():
    options = [Option(4, 1.0, 4), Option(6, 3.0, 3), Option(1, 9.0, 1), Option(4, 2.0, 2), Option(9, 0.9, 8)]
    assert [o.bit_width for o in convex_hull(options)] == [1, 4, 8]
    assert [o.bit_width for o in convex_hull([Option(0, 9.0, 1), Option(1, 8.0, 2), Option(2, 1.0, 3)])] == [1, 3]


def test_allocate_takes_what_costs_nothing_and_all_that_fits():
    free = [Option(0, 2.0, 1), Option(0, 1.0, 8)]
    assert [o.bit_width for o in allocate([free, widths(1.0, 5)], 5)] == [8, 1]
    assert [o.bit_width for o in allocate([widths(1.0, 5), widths(0.0, 1)], 1e9)] == [8, 1]


def test_allocate_names_the_least_budget():
    with pytest.raises(ValueError, match="budget=6; accepted is at least 7"):
        allocate([widths(1.0, 5), widths(1.0, 2)], 6)
