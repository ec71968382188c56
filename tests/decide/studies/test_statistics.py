"""Means with intervals, time to quality, quality after time, and Pareto fronts."""

from __future__ import annotations

import random

import pytest

from hetero.decide.studies.statistics import (
    best_value,
    f_tail,
    interval_of,
    quality_after,
    t_quantile,
    time_to_quality,
)
from hetero.decide.studies.study_file import Metric
from hetero.metrics.logged import LoggedMetric

ACCURACY = Metric(name="accuracy", target=0.8)
LOSS = Metric(name="loss", goal="min", target=0.3)


def logged(name: str, *values: float, rank: int = 0) -> list[LoggedMetric]:
    """Return one value every 10 seconds."""
    return [
        LoggedMetric(name=name, value=value, at_s=10.0 * at, unix_s=1e9, rank=rank)
        for at, value in enumerate(values, start=1)
    ]


@pytest.mark.parametrize(
    ("freedom", "coverage", "expected"),
    [
        (1, 0.95, 12.706205),
        (2, 0.95, 4.302653),
        (3, 0.90, 2.353363),
        (4, 0.95, 2.776445),
        (9, 0.99, 3.249836),
        (30, 0.95, 2.042272),
        (10_000, 0.95, 1.960201),
    ],
)
def test_quantile_of_students_distribution_is_that_of_the_tables(
    freedom: int, coverage: float, expected: float
) -> None:
    assert t_quantile(freedom, coverage) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("ratio", "first", "second", "expected"),
    [(3.2, 1, 6, 0.12384917), (9.0, 2, 5, 0.02203461), (0.0, 1, 6, 1.0), (1e6, 1, 6, 0.0)],
)
def test_tail_of_f_is_that_of_tables(ratio: float, first: int, second: int, expected: float) -> None:
    assert f_tail(ratio, first, second) == pytest.approx(expected, abs=1e-6)


def test_interval_of_three_values() -> None:
    found = interval_of([1.0, 2.0, 3.0])
    assert found is not None
    assert found.mean == 2.0
    assert (found.low, found.high) == (pytest.approx(-0.484138, rel=1e-5), pytest.approx(4.484138, rel=1e-5))


def test_interval_of_times_is_above_zero_and_nearly_the_usual_one_if_they_hardly_differ() -> None:
    far = interval_of([2.0, 9.0], is_positive=True)
    assert far is not None
    assert far.low is not None
    assert 0 < far.low < far.mean == 5.5 < far.high
    near, usual = (interval_of([9.99, 10.0, 10.01], is_positive=each) for each in (True, False))
    assert near is not None
    assert usual is not None
    assert (near.low, near.high) == (pytest.approx(usual.low, rel=1e-5), pytest.approx(usual.high, rel=1e-5))
    assert interval_of([0.0, 0.0], is_positive=True) == interval_of([0.0, 0.0])


def test_one_value_has_no_interval() -> None:
    found = interval_of([5.0])
    assert found is not None
    assert (found.mean, found.low, found.high) == (5.0, None, None)
    assert interval_of([]) is None


def test_intervals_of_95_percent_contain_the_mean_in_about_95_percent() -> None:
    generator = random.Random(1)
    intervals = [interval_of([generator.gauss(7, 2) for _ in range(4)]) for _ in range(4000)]
    covered = sum(each is not None and each.low is not None and each.low <= 7 <= each.high for each in intervals)
    assert 0.94 <= covered / 4000 <= 0.96


def test_time_to_quality_is_that_of_the_first_value_that_reaches_the_target() -> None:
    metrics = logged("accuracy", 0.5, 0.8, 0.7, 0.9) + logged("loss", 1.0, 0.2)
    assert time_to_quality(metrics, ACCURACY) == 20.0
    assert time_to_quality(metrics, LOSS) == 20.0
    assert time_to_quality(logged("accuracy", 0.5), ACCURACY) is None
    assert time_to_quality(metrics, Metric(name="accuracy")) is None


def test_values_of_the_lowest_rank_count() -> None:
    metrics = logged("accuracy", 0.9, rank=1) + logged("accuracy", 0.1, 0.2)
    assert time_to_quality(metrics, ACCURACY) is None
    assert best_value(metrics, ACCURACY) == 0.2


def test_quality_after_a_time_is_the_best_until_then() -> None:
    metrics = logged("accuracy", 0.5, 0.8, 0.7) + logged("loss", 1.0, 0.2, 0.4)
    assert quality_after(metrics, ACCURACY, 25.0) == 0.8
    assert quality_after(metrics, LOSS, 10.0) == 1.0
    assert quality_after(metrics, ACCURACY, 5.0) is None
    assert best_value(metrics, LOSS) == 0.2


def test_final_value_without_a_time_of_its_own_says_nothing_of_times() -> None:
    final = [LoggedMetric(name="f1", value=0.93, at_s=3600.0)]
    metric = Metric(name="f1", target=0.9)
    assert time_to_quality(final, metric) is None
    assert quality_after(final, metric, 4000.0) is None
    assert best_value(final, metric) == 0.93
