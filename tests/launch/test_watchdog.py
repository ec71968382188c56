"""A main loop that is stuck, with a clock that the test sets."""

from __future__ import annotations

import logging

import pytest

from hetero.launch.watchdog import Watchdog
from tests.support.control.clocks import Clock


class Bench:
    """A watchdog whose checks the test makes itself, one a second."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.statuses: list[int] = []
        self.watchdog = Watchdog(15.0, status=lambda: 32, exit_process=self.statuses.append, clock=self.clock)

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.clock.now_s += 1.0
            self.watchdog.check()


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.fault("F6")
def test_loop_that_stands_still_is_shown_once_then_ended(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    bench.wait(14)
    assert caplog.text == ""
    bench.wait(4)
    assert caplog.text.count("has stood still for 16 s") == 1
    assert "in wait" in caplog.text  # where this thread is: the stack
    bench.wait(26)
    assert bench.statuses == []
    bench.wait(3)
    assert bench.statuses[0] == 32


def test_loop_that_moves_is_left_alone(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(10):
        bench.wait(14)
        bench.watchdog.tick()
    assert caplog.text == ""
    assert bench.statuses == []


def test_time_in_which_all_of_the_process_was_suspended_does_not_count(bench: Bench) -> None:
    bench.clock.now_s += 3600.0
    bench.wait(10)
    assert bench.statuses == []


def test_end_that_takes_too_long_is_made_short(bench: Bench) -> None:
    bench.watchdog.expect_end(20.0, 30)
    bench.wait(19)
    assert bench.statuses == []
    bench.wait(3)
    assert bench.statuses[0] == 30
