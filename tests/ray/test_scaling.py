"""Pure parts of `hetero.ray`: the number of data hosts, and the ranks that still report."""

from __future__ import annotations

import pytest

from hetero.control.status import RankReport
from hetero.errors import ConfigError
from hetero.ray.coordinator import LivingRanks
from hetero.ray.scaling import Bounds, Scaler


def scaler() -> Scaler:
    return Scaler(Bounds(min_hosts=1, max_hosts=4))


def test_scaler_adds_at_once_what_the_whole_interval_wants() -> None:
    assert scaler().target(low=3, high=5, present=1) == 3
    assert scaler().target(low=9, high=12, present=1) == 4
    assert scaler().target(low=1, high=9, present=1) == 1


def test_scaler_removes_one_host_after_several_estimates_in_a_row() -> None:
    subject = scaler()
    assert [subject.target(low=0, high=1, present=3) for _ in range(6)] == [3, 3, 3, 3, 3, 2]
    assert [subject.target(low=0, high=1, present=2) for _ in range(6)] == [2, 2, 2, 2, 2, 1]
    assert [subject.target(low=0, high=0, present=1) for _ in range(8)] == [1] * 8


def test_scaler_forgets_low_estimates_after_a_high_one() -> None:
    subject = scaler()
    assert {subject.target(low=0, high=1, present=3) for _ in range(5)} == {3}
    assert subject.target(low=2, high=3, present=3) == 3
    assert {subject.target(low=0, high=1, present=3) for _ in range(5)} == {3}


def test_scaler_keeps_hosts_above_the_bound() -> None:
    assert scaler().target(low=9, high=9, present=6) == 6  # the user has asked for them


def test_bounds_are_checked() -> None:
    with pytest.raises(ConfigError, match="min_hosts is 0"):
        Bounds(min_hosts=0, max_hosts=2)


def test_rank_that_reports_no_more_is_dropped() -> None:
    living = LivingRanks(10.0)
    first, second = RankReport(rank=0), RankReport(rank=1)
    assert living.of([first, second], 0.0) == (first, second)
    newer = RankReport(rank=0)
    assert living.of([newer, second], 8.0) == (newer, second)
    assert living.of([newer, second], 11.0) == (newer,)
    again = RankReport(rank=1)
    assert living.of([newer, again], 12.0) == (newer, again)
