from __future__ import annotations

import pytest

from hetero.control.status import RankReport, StepTimes
from hetero.launch.auto_endpoints.windows import JoinedSteps, StepTime


def report(rank: int, first: int, *waits_s: float, loader: str = "train") -> RankReport:
    """Return a report of steps whose compute takes one second less the wait, as with ranks that take steps together."""
    times = StepTimes(loader=loader, first=first, compute_s=tuple(1 - wait_s for wait_s in waits_s), wait_s=waits_s)
    return RankReport(rank=rank, step_times=times)


def waits(steps: list[StepTime]) -> list[float]:
    return [step.wait_s for step in steps]


def test_steps_are_returned_once() -> None:
    joined = JoinedSteps(1)
    assert waits(joined.take([report(0, 0, 0.1, 0.2)])) == [0.1, 0.2]
    assert joined.take([report(0, 0, 0.1, 0.2)]) == []
    assert waits(joined.take([report(0, 1, 0.2, 0.3)])) == [0.3]


def test_step_is_known_when_all_ranks_have_reported_it_and_the_longest_wait_counts() -> None:
    joined = JoinedSteps(2)
    assert joined.take([report(0, 0, 0.1)]) == []
    (step,) = joined.take([report(0, 0, 0.1, 0.0), report(1, 0, 0.4)])
    assert (step.wait_s, step.compute_s) == (0.4, pytest.approx(0.6))
    assert waits(joined.take([report(0, 0, 0.1, 0.0), report(1, 0, 0.4, 0.2)])) == [0.2]


def test_steps_that_a_report_no_longer_has_are_left_out() -> None:
    joined = JoinedSteps(2)
    joined.take([report(0, 0, 0.1), report(1, 0, 0.1)])
    assert waits(joined.take([report(0, 5, 0.5, 0.6), report(1, 6, 0.0)])) == [0.6]
    assert joined.take([report(0, 9, 0.5), report(1, 6, 0.0)]) == []


def test_another_loader_begins_anew() -> None:
    joined = JoinedSteps(1)
    joined.take([report(0, 0, 0.1, 0.1, 0.1, loader="validation")])
    assert waits(joined.take([report(0, 0, 0.2)])) == [0.2]


def test_restarted_ranks_begin_anew() -> None:
    joined = JoinedSteps(1)
    joined.take([report(0, 0, 0.1, 0.1)])
    joined.restart()
    assert joined.take([RankReport(rank=0)]) == []
    assert waits(joined.take([report(0, 0, 0.3)])) == [0.3]
