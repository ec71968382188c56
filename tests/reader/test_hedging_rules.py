from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.reader.hedging import Budget, Pace


@given(st.lists(st.booleans(), max_size=2000))
def test_budget_holds_at_any_time_and_over_any_stretch(wants: list[bool]) -> None:
    budget = Budget()
    balance = largest = 0.0  # of hedges over what n / 20 allows, and its largest rise
    lowest = 0.0
    for number, wants_hedge in enumerate(wants, start=1):
        budget.earn()
        balance -= 1 / 20
        lowest = min(lowest, balance)
        if wants_hedge and budget.allows:
            budget.spend()
            balance += 1
        assert balance <= 1 + 1e-9, number
        largest = max(largest, balance - lowest)
    assert largest <= Budget.MAX_SAVED + 1e-9


def test_budget_saves_no_more_than_its_bound() -> None:
    budget = Budget()
    for _ in range(100_000):
        budget.earn()
    num_hedges = 0
    while budget.allows:
        budget.spend()
        num_hedges += 1
    assert num_hedges == Budget.MAX_SAVED


@pytest.mark.parametrize(
    ("times_s", "deadline_s"),
    [
        ([1.0] * 15, float("inf")),  # too few
        ([1.0] * 16, 2.0),
        ([0.001] * 128, 0.5),  # the floor
        ([1.0] * 126 + [30.0] * 2, 2.0),  # a hiccup or two do not count
        ([1.0] * 125 + [30.0] * 3, 60.0),  # but three of 128 are
        ([30.0] * 128 + [1.0] * 128, 2.0),  # and what is long ago is not
    ],
)
def test_pace_deadline(times_s: list[float], deadline_s: float) -> None:
    pace = Pace()
    for time_s in times_s:
        pace.observe(time_s)
    assert pace.deadline_s == deadline_s


def test_pace_does_not_find_regular_slow_batches_overdue() -> None:
    generator = np.random.default_rng(5)
    pace, num_overdue, num_batches = Pace(), 0, 10_000
    for _ in range(num_batches):
        time_s = 20.0 if generator.random() < 0.05 else 1.0
        num_overdue += time_s > pace.deadline_s
        pace.observe(time_s)
    assert num_overdue < 0.01 * num_batches
