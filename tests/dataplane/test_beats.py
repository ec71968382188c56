"""When an endpoint counts as stuck, with a clock of the test's."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from hetero.dataplane.pool.liveness import DUMP_S, Beats, Verdict, is_suspended


@pytest.fixture
def beats() -> Beats:
    """Beats that began at 100 s."""
    beats = Beats(bound_s=15.0, build_bound_s=600.0)
    beats.beat(100.0)
    return beats


def test_process_that_has_not_begun_is_not_watched() -> None:
    beats = Beats(bound_s=15.0, build_bound_s=600.0)
    assert beats.verdict(1e6, suspended=False) is Verdict.NOTHING
    assert not beats.is_late(1e6)


def test_beats_within_the_bound_are_well(beats: Beats) -> None:
    for now_s in range(101, 200, 14):
        assert beats.verdict(now_s, suspended=False) is Verdict.NOTHING
        beats.beat(now_s)


def test_stuck_process_is_dumped_then_killed(beats: Beats) -> None:
    assert beats.verdict(115.0, suspended=False) is Verdict.NOTHING
    assert beats.verdict(115.1, suspended=False) is Verdict.DUMP
    assert beats.verdict(115.2, suspended=False) is Verdict.NOTHING
    assert beats.verdict(115.1 + DUMP_S, suspended=False) is Verdict.KILL
    assert beats.stuck_for_s == pytest.approx(15.1)


def test_process_that_builds_has_the_longer_bound(beats: Beats) -> None:
    beats.build(110.0, has_ended=False)
    assert beats.verdict(700.0, suspended=False) is Verdict.NOTHING
    assert beats.verdict(710.1, suspended=False) is Verdict.DUMP


def test_process_that_has_built_has_the_shorter_bound_again(beats: Beats) -> None:
    beats.build(110.0, has_ended=False)
    beats.build(300.0, has_ended=True)
    assert beats.verdict(315.1, suspended=False) is Verdict.DUMP


def test_suspended_process_is_said_once_and_left(beats: Beats) -> None:
    assert beats.verdict(110.0, suspended=True) is Verdict.NOTHING
    assert beats.verdict(116.0, suspended=True) is Verdict.SUSPENDED
    assert beats.verdict(1000.0, suspended=True) is Verdict.NOTHING


def test_continued_process_has_the_whole_bound_again(beats: Beats) -> None:
    beats.verdict(1000.0, suspended=True)
    assert beats.verdict(1001.0, suspended=False) is Verdict.NOTHING
    assert beats.verdict(1016.5, suspended=False) is Verdict.DUMP


def test_suspension_is_read_from_the_kernel() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not is_suspended(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert is_suspended(process.pid)
        process.kill()
    assert not is_suspended(process.pid)
