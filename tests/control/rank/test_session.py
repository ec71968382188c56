"""Ranks reach their launcher: what they hear from it, and what they tell it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading

import pytest

from hetero.control import security
from hetero.control.hub import Hub
from hetero.control.members.directory import TF_DISPATCHER, EndpointRecord
from hetero.control.members.membership import Membership
from hetero.control.rank.callbacks import CallbackFailure
from hetero.control.rank.session import RankSession
from hetero.control.status import (
    MAX_LOADERS,
    HostState,
    StepTimes,
    StopPoint,
)
from hetero.errors import AuthenticationError, ExitCode, HeteroError
from hetero.metrics.steps import StepSummary, StepTimer
from tests.support.control.hubs import TOKEN, wait_for
from tests.support.freed_memory import LIVE_THREADS, MAX_FAULTS_IF_REUSED, needs_glibc, page_faults_of_threads


@pytest.fixture
def address(hubs: tuple[Hub, Hub]) -> str:
    """Where a rank reaches the trainer's launcher."""
    return f"127.0.0.1:{hubs[0].rank_port}"


RECORD = EndpointRecord(endpoint_id="data/0", host="data", address="127.0.0.1:9", incarnation="i", num_slots=3)


def test_session_sees_endpoints_and_reports(hubs: tuple[Hub, Hub], address: str) -> None:
    trainer, data = hubs
    session = RankSession(address, TOKEN, job_id="job-a", rank=0, world_size=1)
    with contextlib.closing(session):
        assert session.remote
        assert session.options.prepare_timeout_s == 2
        assert session.options.max_batch_bytes == 12_345
        changed = threading.Event()
        session.directory.subscribe(changed.set)
        data.update(state=HostState.SERVING, endpoints=(RECORD,))
        assert changed.wait(100.0)
        assert session.directory.records() == (RECORD,)
        seen = threading.Event()
        session.directory.subscribe(lambda: None if session.directory.records() else seen.set())
        data.update(endpoints=())
        assert seen.wait(100.0)
        assert session.directory.contents() == ((), frozenset({"data"}))  # it is there, and may have some again
        session.fail("boom", "trace", ExitCode.SCRIPT_FAILED)
        wait_for(data, lambda membership: membership.own.decided is not None)
    with trainer.membership() as membership:
        assert membership.own.decided is not None
        assert membership.own.decided.first_line == "HET-30 trainer: rank 0: boom"


SESSION = """
import sys
from hetero.control.rank.session import RankSession
from hetero.control.security import Token
session = RankSession(sys.argv[1], Token(sys.argv[2]), job_id="job-a", rank=0, world_size=1)
"""


@needs_glibc
@pytest.mark.parametrize("before", ["", LIVE_THREADS], ids=["a new process", "a process with threads, as Ray's"])
def test_threads_use_freed_memory_again_although_the_session_has_threads(before: str, hubs: tuple[Hub, Hub]) -> None:
    num_faults = page_faults_of_threads(before + SESSION, f"127.0.0.1:{hubs[0].rank_port}", TOKEN.reveal())
    assert num_faults < MAX_FAULTS_IF_REUSED


def test_session_tells_servers_of_tensorflow_from_endpoints(hubs: tuple[Hub, Hub]) -> None:
    trainer, data = hubs
    session = RankSession(f"127.0.0.1:{trainer.rank_port}", TOKEN, job_id="job-a", rank=0, world_size=1)
    dispatcher = dataclasses.replace(RECORD, endpoint_id="data/tf-dispatcher", kind=TF_DISPATCHER)
    with contextlib.closing(session):
        assert session.options.data_service == "tf"
        changed = threading.Event()
        session.tf_servers.subscribe(lambda: changed.set() if session.tf_servers.records() else None)
        data.update(state=HostState.SERVING, endpoints=(RECORD, dispatcher))
        assert changed.wait(100.0)
        assert session.tf_servers.records() == (dispatcher,)
        assert session.directory.records() == (RECORD,)


def test_values_that_a_rank_logs_reach_the_host_of_the_report(hubs: tuple[Hub, Hub], address: str) -> None:
    trainer, _ = hubs
    session = RankSession(address, TOKEN, job_id="job-a", rank=0, world_size=1)
    with contextlib.closing(session):
        session.metrics.add("f1", 0.5, 10)
        wait_for(trainer, lambda membership: bool(membership.own.ranks[0].metrics))
        session.metrics.add("f1", 0.75, 20)
    with trainer.membership() as membership:
        (report,) = membership.own.ranks
    assert report.finished
    assert report.metrics is not None
    assert [(value.name, value.value, value.step) for value in report.metrics] == [("f1", 0.5, 10), ("f1", 0.75, 20)]
    assert 0 <= report.metrics[0].at_s <= report.metrics[1].at_s


def test_values_of_a_report_that_the_launcher_did_not_answer_are_sent_again(
    hubs: tuple[Hub, Hub], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, _ = hubs
    session = RankSession(address, TOKEN, job_id="job-a", rank=0, world_size=1)
    lost = threading.Event()
    with contextlib.closing(session), monkeypatch.context() as patch:
        patch.setattr(session._link, "report", lambda report: lost.set() if report.metrics else False)
        session.metrics.add("f1", 0.5, 10)
        assert lost.wait(100.0)
        patch.undo()
        wait_for(trainer, lambda membership: bool(membership.own.ranks[0].metrics))


class BrokenTimer(StepTimer):
    """Its sums cannot be had."""

    def summary(self) -> StepSummary:
        raise ZeroDivisionError("on purpose")


def test_session_goes_on_where_what_was_measured_cannot_be_summed_up(
    hubs: tuple[Hub, Hub], caplog: pytest.LogCaptureFixture
) -> None:
    trainer, _ = hubs
    session = RankSession(f"127.0.0.1:{trainer.rank_port}", TOKEN, job_id="job-a", rank=0, world_size=1)
    with contextlib.closing(session):
        timer = BrokenTimer("train")
        session.register_timer(timer)
        for steps in (1, 2):  # reported by the first turn of its thread, and a later one
            session.check_stop(timer)
            wait_for(trainer, lambda membership, steps=steps: reported_steps(membership) == steps)  # type: ignore[misc]
        timer.begin_wait()
        wait_for(trainer, lambda membership: membership.own.ranks[0].waiting)
        timer.end_wait(1)
        wait_for(trainer, lambda membership: not membership.own.ranks[0].waiting)
    assert len([record for record in caplog.records if "ZeroDivisionError" in record.getMessage()]) == 1


def test_session_with_more_loaders_than_a_report_holds_reports_the_busiest(hubs: tuple[Hub, Hub], address: str) -> None:
    trainer, _ = hubs
    session = RankSession(address, TOKEN, job_id="job-a", rank=0, world_size=1)
    with contextlib.closing(session):
        train = StepTimer("train")
        session.register_timer(train)
        for _ in range(MAX_LOADERS + 10):
            validation = StepTimer("validation")
            session.register_timer(validation)
            for timer in (train, train, validation):
                session.check_stop(timer)
        trainer.update(stop_requested=True)  # a report that is refused would lose the vote, too
        wait_for(trainer, lambda membership: membership.own.stop_at is not None)
        assert len(session._timers) == MAX_LOADERS + 11
    with trainer.membership() as membership:
        (report,) = membership.own.ranks
    assert len(report.summaries_json) == len(report.steps_started) == MAX_LOADERS
    assert report.steps_started["train"] == 2 * (MAX_LOADERS + 10)
    assert report.loader in report.steps_started


def test_session_reports_the_latest_steps_of_the_loader_that_takes_the_most_time(
    hubs: tuple[Hub, Hub], address: str
) -> None:
    trainer, _ = hubs
    now_s = [0.0]
    session = RankSession(address, TOKEN, job_id="job-a", rank=0, world_size=1)
    with contextlib.closing(session):
        for name, wait_s in (("validation", 0.25), ("train", 3.5)):
            timer = StepTimer(name, clock=lambda: now_s[0])
            session.register_timer(timer)
            for _ in range(3):
                timer.begin_wait()
                now_s[0] += wait_s
                timer.end_wait(1)
                now_s[0] += 1.0
        expected = StepTimes(loader="train", first=0, compute_s=(1.0, 1.0), wait_s=(3.5, 3.5))
        wait_for(trainer, lambda membership: membership.own.ranks[0].step_times == expected)


def test_session_that_fails_reports_its_latest_steps(hubs: tuple[Hub, Hub], address: str) -> None:
    trainer, _ = hubs
    session = RankSession(address, TOKEN, job_id="job-a", rank=0, world_size=1)
    with contextlib.closing(session):
        timer = StepTimer("train")
        session.register_timer(timer)
        session._report()
        timer.begin_wait()
        timer.end_wait(8)
        session.fail("boom", "trace", ExitCode.SCRIPT_FAILED)
        with trainer.membership() as membership:
            (report,) = membership.own.ranks
    assert report.failure is not None
    assert json.loads(report.summaries_json[0])["num_samples"] == 8


def test_failure_of_a_stop_callback_is_in_the_last_report_and_fails_no_job(hubs: tuple[Hub, Hub], address: str) -> None:
    """The other ranks may still save. The rank's host fails the job when their hosts are done."""
    trainer, _ = hubs
    session = RankSession(address, TOKEN, job_id="job-a", rank=0, world_size=1)
    session.stop_failure = CallbackFailure(summary="a stop callback raised OSError", detail="trace")
    session._report()
    with trainer.membership() as membership:
        assert membership.own.ranks[0].failure is None
    assert session.close()
    with trainer.membership() as membership:
        (report,) = membership.own.ranks
        assert not membership.has_failure
    assert report.finished
    assert report.failure is not None
    assert report.failure.first_line == "HET-30 trainer: rank 0: a stop callback raised OSError"


def test_session_knows_that_its_last_report_is_lost(hubs: tuple[Hub, Hub], address: str) -> None:
    session = RankSession(address, TOKEN, job_id="job-a", rank=0, world_size=1)
    hubs[0].stop()
    assert not session.close()


def test_session_does_not_alternate_between_loaders_that_take_about_the_same_time(
    hubs: tuple[Hub, Hub], address: str
) -> None:
    now_s = [0.0]
    timers = {name: StepTimer(name, clock=lambda: now_s[0]) for name in ("images", "texts")}
    session = RankSession(address, TOKEN, job_id="job-a", rank=0, world_size=1)
    with contextlib.closing(session):
        for timer in timers.values():
            session.register_timer(timer)

        def step(name: str) -> str:
            """Complete a step of a second. Return the loader that is reported then."""
            timers[name].begin_wait()
            timers[name].end_wait(1)
            now_s[0] += 1.0
            timers[name].begin_wait()
            timers[name].end_wait(1)
            found = session._step_times(list(timers.values()))
            assert found is not None
            return found.loader

        assert [step(name) for name in ("texts", "images", "texts", "images", "images")] == ["texts"] * 5
        assert [step("images") for _ in range(9)][-1] == "images"


def reported_steps(membership: Membership) -> int:
    """Return the steps that the rank has reported."""
    return sum(report.steps_started.get("train", 0) for report in membership.own.ranks)


def test_session_follows_the_directory_after_a_listener_has_raised(
    hubs: tuple[Hub, Hub], address: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, data = hubs
    session = RankSession(address, TOKEN, job_id="job-a", rank=0, world_size=1)
    with contextlib.closing(session):
        changed = threading.Event()

        def listen() -> None:
            if not changed.is_set():
                changed.set()
                raise ZeroDivisionError("on purpose")

        session.directory.subscribe(listen)
        data.update(state=HostState.SERVING, endpoints=(RECORD,))
        assert changed.wait(100.0)
        moved = dataclasses.replace(RECORD, address="127.0.0.1:10")
        seen = threading.Event()
        session.directory.subscribe(lambda: seen.set() if session.directory.records() == (moved,) else None)
        data.update(endpoints=(moved,))
        assert seen.wait(100.0)
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.attack("A11")
@pytest.mark.fault("F31")
def test_session_of_another_job_is_refused(hubs: tuple[Hub, Hub]) -> None:
    trainer, _ = hubs
    with pytest.raises(HeteroError, match="refuses the token, or belongs to another job"):
        RankSession(f"127.0.0.1:{trainer.rank_port}", TOKEN, job_id="job-b", rank=0, world_size=1)


def test_session_stop_request_ends_both_ranks_after_the_same_step(hubs: tuple[Hub, Hub], address: str) -> None:
    trainer, _ = hubs
    sessions = [RankSession(address, TOKEN, job_id="job-a", rank=rank, world_size=2) for rank in range(2)]
    started = [4, 5]
    timers = [StepTimer("train") for _ in sessions]
    validation = StepTimer("train")  # a second loader of the same name, used by rank 0 alone
    for session, timer, count in zip(sessions, timers, started, strict=True):
        session.register_timer(timer)
        for _ in range(count):
            session.check_stop(timer)
    sessions[0].register_timer(validation)
    sessions[0].check_stop(validation)
    trainer.update(stop_requested=True)
    wait_for(trainer, lambda membership: membership.own.stop_at == StopPoint(loader="train", steps=5))
    sessions[0].check_stop(validation)  # it finishes that
    sessions[0].check_stop(timers[0])  # the step that rank 1 had begun already
    for session, timer in zip(sessions, timers, strict=True):
        with pytest.raises(SystemExit) as caught:
            session.check_stop(timer)
        assert caught.value.code == 143
        assert session.stopped
        session.close()


def test_session_refused_token_is_an_authentication_error(hubs: tuple[Hub, Hub]) -> None:
    trainer, _ = hubs
    with pytest.raises(AuthenticationError, match="rank 0: its launcher at .* refuses the token"):
        RankSession(f"127.0.0.1:{trainer.rank_port}", security.Token.generate(), job_id="job-a", rank=0, world_size=1)
