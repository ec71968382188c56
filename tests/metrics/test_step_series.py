"""The history of a loader's steps."""

from __future__ import annotations

import json

import pytest

from hetero.documents.records import decode, encode
from hetero.errors import ConfigError
from hetero.metrics.history import MAX_POINTS
from hetero.metrics.step_series import StepLog, StepSeries
from hetero.metrics.steps import StepTimer, encode_summaries


@pytest.mark.parametrize("number", [0, 1, 119, 120, 121, 10_007])
def test_history_of_any_number_of_steps_is_bounded_and_keeps_the_sums(number: int) -> None:
    log = StepLog()
    for step in range(number):
        log.add_step(float(step + 1), 0.75, 0.25)
    series = log.series()
    assert len(series.begin_s) <= MAX_POINTS
    assert sum(series.num_steps) == number
    assert list(series.begin_s[1:]) == list(series.end_s[:-1])
    assert {*series.compute_s, *series.data_wait_s} <= {0.75, 0.25}
    assert decode(StepSeries, json.loads(json.dumps(encode(series)))) == series


def test_history_with_columns_of_different_lengths_is_rejected() -> None:
    with pytest.raises(ConfigError, match="expected 1 in each"):
        StepSeries(begin_s=(0.0,), end_s=(1.0,), num_steps=(1,), compute_s=(1.0, 2.0), data_wait_s=(1.0,))


def timer_of(name: str, steps_s: list[tuple[float, float]], *, run_s: float | None = None) -> StepTimer:
    """Return a timer after steps of the given data waits and computes."""
    now = 100.0

    def clock() -> float:
        return now

    run_clock = None if run_s is None else lambda: now - 100.0 + run_s
    timer = StepTimer(name, warmup_steps=1, clock=clock, run_clock=run_clock)
    for wait_s, compute_s in steps_s:
        timer.begin_wait()
        now += wait_s
        timer.end_wait(4)
        now += compute_s
    timer.begin_wait()
    timer.end_wait(4)
    return timer


STEPS_S = [(2.0, 0.5), (0.25, 1.0)]


@pytest.mark.parametrize(("run_s", "begins_s"), [(7.0, (9.0, 9.75)), (None, (0.0, 0.75))])
def test_history_of_a_timer_has_every_step_with_its_time_in_the_run(
    run_s: float | None, begins_s: tuple[float, ...]
) -> None:
    history = timer_of("photos", STEPS_S, run_s=run_s).summary().history
    assert history.begin_s == begins_s
    assert history.compute_s == (0.5, 1.0)
    assert history.data_wait_s == (0.25, 0.0)
    assert history.num_steps == (1, 1)


def test_reported_summaries_have_the_history_of_the_longest_loader_alone() -> None:
    timers = [timer_of("validation", STEPS_S[:1]), timer_of("train", STEPS_S)]
    encoded = [json.loads(part) for part in encode_summaries([timer.summary() for timer in timers])]
    assert [len(each["history"]["begin_s"]) for each in encoded] == [0, 2]
    assert encode_summaries([]) == ()
