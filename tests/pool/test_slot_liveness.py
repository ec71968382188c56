"""When an endpoint counts as stuck, with a clock of the test's."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from hetero.pool.slot import DUMP_S, Action, Liveness
from hetero.system.process import is_suspended


@pytest.fixture
def liveness() -> Liveness:
    """Liveness that began at 100 s."""
    liveness = Liveness(bound_s=15.0, build_bound_s=600.0)
    liveness.beat(100.0)
    return liveness


def test_process_that_has_not_begun_is_not_watched() -> None:
    liveness = Liveness(bound_s=15.0, build_bound_s=600.0)
    assert liveness.next_action(1e6, suspended=False) is Action.NOTHING
    assert not liveness.is_late(1e6)


def test_beats_within_the_bound_are_well(liveness: Liveness) -> None:
    for now_s in range(101, 200, 14):
        assert liveness.next_action(now_s, suspended=False) is Action.NOTHING
        liveness.beat(now_s)


def test_stuck_process_is_dumped_then_killed(liveness: Liveness) -> None:
    assert liveness.next_action(115.0, suspended=False) is Action.NOTHING
    assert liveness.next_action(115.1, suspended=False) is Action.DUMP
    assert liveness.next_action(115.2, suspended=False) is Action.NOTHING
    assert liveness.next_action(115.1 + DUMP_S, suspended=False) is Action.KILL
    assert liveness.stuck_for_s == pytest.approx(15.1)


def test_process_that_builds_has_the_longer_bound(liveness: Liveness) -> None:
    liveness.build(110.0, has_ended=False)
    assert liveness.next_action(705.0, suspended=False) is Action.NOTHING
    assert liveness.next_action(710.1, suspended=False) is Action.DUMP


def test_process_that_has_built_has_the_shorter_bound_again(liveness: Liveness) -> None:
    liveness.build(110.0, has_ended=False)
    liveness.build(300.0, has_ended=True)
    assert liveness.next_action(315.1, suspended=False) is Action.DUMP


def test_suspended_process_is_said_once_and_left(liveness: Liveness) -> None:
    assert liveness.next_action(110.0, suspended=True) is Action.NOTHING
    assert liveness.next_action(116.0, suspended=True) is Action.LOG_SUSPENDED
    assert liveness.next_action(1000.0, suspended=True) is Action.NOTHING


def test_continued_process_has_the_whole_bound_again(liveness: Liveness) -> None:
    liveness.next_action(1000.0, suspended=True)
    assert liveness.next_action(1001.0, suspended=False) is Action.NOTHING
    assert liveness.next_action(1008.5, suspended=False) is Action.NOTHING
    assert liveness.next_action(1016.0, suspended=False) is Action.NOTHING
    assert liveness.next_action(1016.5, suspended=False) is Action.DUMP


@pytest.mark.fault("F5")
def test_process_of_a_host_that_was_frozen_has_the_whole_bound_again(liveness: Liveness) -> None:
    assert liveness.next_action(101.0, suspended=False) is Action.NOTHING
    for now_s in (131.0, 136.0, 141.0, 146.0):
        assert liveness.next_action(now_s, suspended=False) is Action.NOTHING
    assert liveness.next_action(146.5, suspended=False) is Action.DUMP


def test_suspension_is_read_from_the_kernel() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not is_suspended(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert is_suspended(process.pid)
        process.kill()
    assert not is_suspended(process.pid)
