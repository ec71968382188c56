"""The state machine of a job's hosts, without threads and with a clock of the test's."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from hetero.cluster import Role
from hetero.config import Timings
from hetero.control.members.membership import Membership
from hetero.control.status import HostState, RankReport, StopPoint
from hetero.control.stop_points import stop_point
from hetero.errors import ExitCode
from tests.support.control.clocks import Clock
from tests.support.control.members import MEMBERS, cause, endpoint, status, view


def test_arbiter_lowest_trainer_lives_is_that_host(clock: Clock) -> None:
    membership = view("algo-4", clock)
    assert membership.arbiter == "algo-4"  # the only one it knows to live
    membership.observe(status("algo-3"))
    assert membership.arbiter == "algo-3"


def test_arbiter_first_trainer_silent_for_a_lease_moves_on(clock: Clock) -> None:
    membership = view("algo-4", clock)
    membership.observe(status("algo-3"))
    clock.now_s += Timings().lease_s + 1
    assert membership.arbiter == "algo-4"


def test_status_that_was_overtaken_does_not_bring_back_an_older_state(clock: Clock) -> None:
    membership = view("algo-1", clock)
    membership.observe(status("algo-3", HostState.DONE, revision=8))
    membership.observe(status("algo-3", HostState.TRAINING, revision=7))
    assert [host for host, _ in membership.missing(Role.TRAINER, at_least=HostState.DONE)] == ["algo-4"]


def test_restarted_data_host_with_another_script_is_named(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.observe(status("algo-1", HostState.SERVING))
    membership.observe(status("algo-1", incarnation="algo-1-second", script_digest="other"))
    assert membership.own.failure is not None
    assert membership.own.failure.exit_code is ExitCode.DISAGREEMENT


@pytest.mark.fault("F32")
@pytest.mark.parametrize("host", ["algo-3", "algo-2"])
def test_replacement_with_another_script_of_a_data_host_that_served_is_done_without(
    clock: Clock, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    membership = view(host, clock)
    membership.observe(status("algo-1", HostState.SERVING, endpoints=(endpoint("algo-1"),)))
    again = status("algo-1", HostState.SERVING, endpoints=(endpoint("algo-1"),), incarnation="2nd", script_digest="new")
    for revision in range(3):
        membership.observe(dataclasses.replace(again, revision=revision, failure=cause("algo-1"), generation=1))
        clock.now_s += Membership.SETTLE_S
        membership.tick()
    assert membership.own.failure is None
    assert (membership.own.decided, membership.own.generation) == (None, 0)
    assert membership.endpoints() == ()
    words = dict(membership.missing(Role.DATA, at_least=HostState.DONE))
    assert "algo-1 has a training script with digest new" in words["algo-1"]
    assert len(caplog.records) == 1
    membership.observe(dataclasses.replace(again, incarnation="3rd", script_digest="d"))
    assert membership.endpoints() == (endpoint("algo-1"),)


@pytest.mark.fault("F32")
def test_data_host_with_another_script_that_serves_when_it_is_first_heard_is_named(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.observe(
        status("algo-1", HostState.SERVING, endpoints=(endpoint("algo-1"),), script_digest="other"),
    )
    assert membership.own.failure is not None


def test_data_host_leaves_it_to_the_trainers_to_judge_another_data_host(clock: Clock) -> None:
    membership = view("algo-2", clock)
    membership.observe(status("algo-1", script_digest="other"))
    assert membership.own.failure is None
    assert membership.do_without("algo-1", "refuses this host's token")
    assert not membership.do_without("algo-3", "refuses this host's token")
    membership.observe(status("algo-3", script_digest="other"))
    assert membership.own.failure is not None


def test_trainer_silent_for_a_lease_fails_the_job_naming_it(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.observe(status("algo-4", HostState.TRAINING))
    clock.now_s += Timings().lease_s + 0.5
    membership.tick()
    clock.now_s += Membership.SETTLE_S
    membership.tick()
    assert membership.own.decided is not None
    assert "algo-4 fell silent" in membership.own.decided.summary


def test_trainer_done_then_silent_is_no_failure(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.observe(status("algo-4", HostState.DONE))
    clock.now_s += 10 * Timings().lease_s
    membership.tick()
    assert membership.own.failure is None


@pytest.mark.fault("F17")
def test_data_host_silent_for_a_lease_is_dropped_and_comes_back(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    membership = view("algo-3", clock)
    serving = status("algo-1", HostState.SERVING, endpoints=(endpoint("algo-1"),))
    membership.observe(serving)
    assert [record.host for record in membership.endpoints()] == ["algo-1"]
    with caplog.at_level(logging.INFO, logger="hetero.control.members.membership"):
        clock.now_s += Timings().lease_s + 1
        for _ in range(3):
            membership.tick()
        assert membership.endpoints() == ()
        assert membership.own.failure is None
        membership.observe(serving)
        clock.now_s += Membership.CHECK_S
        membership.tick()
    assert [record.host for record in membership.endpoints()] == ["algo-1"]
    assert caplog.messages == [
        "data host algo-1 fell silent for 16 s (heard, serving)",
        "data host algo-1 is heard again",
    ]


@pytest.mark.fault("F18")
def test_data_host_says_which_trainer_host_it_does_not_hear(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    membership = view("algo-1", clock)
    membership.observe(status("algo-3", HostState.TRAINING))
    membership.observe(status("algo-4", HostState.DONE))
    with caplog.at_level(logging.INFO, logger="hetero.control.members.membership"):
        clock.now_s += Timings().lease_s + 1
        membership.tick()  # algo-4 is done, and has left
        assert membership.own.failure is None  # it serves on: only the trainer hosts may end the job
        membership.observe(status("algo-3", HostState.TRAINING, revision=1))
        clock.now_s += Membership.CHECK_S
        membership.tick()
    assert caplog.messages == [
        "trainer host algo-3 fell silent for 16 s (heard, training)",
        "trainer host algo-3 is heard again",
    ]


def test_data_host_without_trainers_leaves_as_an_orphan(clock: Clock) -> None:
    membership = view("algo-1", clock)
    membership.observe(status("algo-3", HostState.TRAINING))
    clock.now_s += Timings().orphan_s + 1
    membership.tick()
    assert membership.own.decided is not None
    assert membership.own.decided.exit_code is ExitCode.ORPHANED


@pytest.mark.fault("F32")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"script_digest": "other"}, "algo-1 has a training script with digest other, algo-3 has d;"),
        ({"version": "2"}, "algo-1 has hetero 2, algo-3 has 1;"),
    ],
    ids=["script", "version"],
)
def test_different_script_on_a_host_is_named_with_both_digests(
    clock: Clock, changes: dict[str, str], words: str
) -> None:
    membership = view("algo-3", clock)
    membership.observe(status("algo-1", **changes))
    assert membership.own.failure is not None
    assert membership.own.failure.exit_code is ExitCode.DISAGREEMENT
    assert words in membership.own.failure.summary


def test_trainer_launcher_restarted_fails_the_job(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.observe(status("algo-4", HostState.TRAINING))
    membership.observe(status("algo-4", HostState.INIT, incarnation="algo-4-second"))
    assert membership.own.failure is not None
    assert "restarted" in membership.own.failure.summary


def test_stop_is_decided_when_every_rank_has_voted_at_the_largest_step(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.store(RankReport(rank=0, steps_started={"train": 10}, loader="train"))
    membership.observe(
        status(
            "algo-4",
            HostState.TRAINING,
            stop_requested=True,
            ranks=(RankReport(rank=1, steps_started={"train": 11}, loader="train", stop_vote=True),),
        )
    )
    membership.tick()
    assert membership.stop_requested
    assert membership.own.stop_at is None  # rank 0 has not paused yet
    membership.store(RankReport(rank=0, steps_started={"train": 10}, loader="train", stop_vote=True))
    membership.tick()
    assert membership.own.stop_at == StopPoint(loader="train", steps=11)


def test_stop_request_of_a_data_host_does_not_stop_the_ranks(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.observe(status("algo-1", HostState.SERVING, stop_requested=True))
    membership.tick()
    assert not membership.stop_requested
    assert membership.own.stop_at is None


def test_stop_does_not_wait_for_a_rank_that_has_finished(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.store(RankReport(rank=0, steps_started={"train": 10}, loader="train", stop_vote=True))
    membership.store(RankReport(rank=1, steps_started={"train": 90}, loader="train", finished=True))
    membership.update(stop_requested=True)
    membership.tick()
    assert membership.own.stop_at == StopPoint(loader="train", steps=10)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([], StopPoint(loader="", steps=0)),
        ([({}, ""), ({}, "")], StopPoint(loader="", steps=0)),
        ([({"train": 5}, "train"), ({}, "")], StopPoint(loader="train", steps=5)),  # rank 1 is about to begin
        # Rank 0 validates alone, rank 1 waits for it in a collective.
        ([({"train": 100, "valid": 7}, "valid"), ({"train": 100}, "train")], StopPoint(loader="train", steps=100)),
        # All validate: rank 0 has begun.
        (
            [({"train": 100, "valid": 11}, "valid"), ({"train": 100, "valid": 10}, "train")],
            StopPoint(loader="valid", steps=11),
        ),
        # All are in the middle of it.
        (
            [({"train": 50, "valid": 12}, "valid"), ({"train": 50, "valid": 11}, "valid")],
            StopPoint(loader="valid", steps=12),
        ),
    ],
)  # fmt: skip
def test_stop_point_is_of_a_loader_that_all_ranks_use(
    ranks: list[tuple[dict[str, int], str]], expected: StopPoint
) -> None:
    reports = [RankReport(rank=rank, steps_started=steps, loader=at) for rank, (steps, at) in enumerate(ranks)]
    assert stop_point(reports) == expected


def test_final_delivered_waits_for_the_living_only(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.observe(status("algo-4", HostState.TRAINING))
    membership.observe(status("algo-1", HostState.SERVING))
    assert not membership.final_delivered
    membership.update(state=HostState.DONE)
    membership.delivered("algo-4", membership.own)
    assert not membership.final_delivered
    clock.now_s += Timings().lease_s + 1  # algo-1 is gone by now
    assert membership.final_delivered


@pytest.mark.parametrize("has_left", [False, True], ids=["it hears of it", "it has left"])
def test_final_delivered_waits_for_a_trainer_host_that_is_done_and_waits_for_this_one(
    clock: Clock, has_left: bool
) -> None:
    membership = view("algo-4", clock)
    for host in ("algo-3", "algo-1", "algo-2"):
        membership.observe(status(host, HostState.DONE))
    membership.update(state=HostState.DONE)
    assert membership.trainers_done
    news = membership.local_news
    assert not membership.final_delivered  # algo-3 has not heard that this host is done, too
    if has_left:
        membership.unreachable("algo-3", "refused")
    else:
        membership.delivered("algo-3", membership.own)
    assert membership.final_delivered
    assert membership.local_news != news  # who waits for it looks again


@pytest.mark.parametrize("has_left", [False, True], ids=["it hears of it", "it has left"])
def test_final_delivered_of_a_data_host_waits_for_the_first_trainer_host_alone_of_those_that_are_done(
    clock: Clock, has_left: bool
) -> None:
    membership = view("algo-1", clock)
    for host in ("algo-3", "algo-4", "algo-2"):
        membership.observe(status(host, HostState.DONE))
    membership.update(state=HostState.DONE)
    assert not membership.final_delivered  # algo-3 writes the report, with the last figures of this host
    if has_left:
        membership.unreachable("algo-3", "refused")
    else:
        membership.delivered("algo-3", membership.own)
    assert membership.final_delivered


def test_final_delivered_of_a_data_host_does_not_wait_for_one_that_has_left_in_silence(clock: Clock) -> None:
    membership = view("algo-1", clock)
    for host in ("algo-3", "algo-4"):
        membership.observe(status(host, HostState.DONE))
    membership.observe(status("algo-2", HostState.DRAINING))
    membership.update(state=HostState.DONE)
    membership.delivered("algo-3", membership.own)
    assert not membership.final_delivered
    membership.unreachable("algo-2", "refused")  # it had been told that this host is done, and did not wait to answer
    assert membership.final_delivered


def test_missing_names_hosts_and_their_last_word(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.unreachable("algo-1", "refused")
    membership.observe(status("algo-2", HostState.SERVING))
    assert membership.missing(Role.DATA, at_least=HostState.SERVING) == [("algo-1", "refused")]
    assert [host for host, _ in membership.missing(Role.TRAINER, at_least=HostState.WAIT_PEERS)] == ["algo-4"]


def test_trainers_done_needs_all_of_them(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.update(state=HostState.DONE)
    assert not membership.trainers_done
    membership.observe(status("algo-4", HostState.DONE))
    assert membership.trainers_done


def test_heartbeat_of_a_stranger_is_ignored(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.observe(status("algo-9", HostState.SERVING, endpoints=(endpoint("algo-9"),)))
    assert membership.endpoints() == ()


@pytest.mark.fault("F6")
def test_launcher_that_answers_but_does_not_move_counts_as_silent(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.observe(status("algo-4", HostState.TRAINING, ticks=7))
    for revision in range(1, 20):  # its ranks' reports go on
        clock.now_s += 1.0
        membership.observe(status("algo-4", HostState.TRAINING, ticks=7, revision=revision))
        membership.tick()
    assert membership.own.decided is not None
    assert "algo-4 stood still for" in membership.own.decided.summary


@pytest.mark.fault("F6")
def test_data_host_that_does_not_move_gets_no_requests_until_it_does(clock: Clock) -> None:
    membership = view("algo-3", clock)
    serving = {"endpoints": (endpoint("algo-1"),), "state": HostState.SERVING}
    membership.observe(status("algo-1", ticks=1, **serving))
    clock.now_s += Timings().lease_s + 1
    membership.observe(status("algo-1", ticks=1, revision=1, **serving))
    assert membership.endpoints() == ()
    membership.observe(status("algo-1", ticks=2, revision=2, **serving))
    assert membership.endpoints() == (endpoint("algo-1"),)
    assert membership.own.failure is None


@pytest.mark.fault("F17")
def test_orphaned_data_host_that_is_heard_again_does_not_end_the_job(clock: Clock) -> None:
    membership = view("algo-3", clock)
    alone = cause("algo-1", "no trainer host was heard", exit_code=ExitCode.ORPHANED)
    membership.observe(status("algo-1", HostState.FAILED, decided=alone, endpoints=(endpoint("algo-1"),)))
    assert membership.own.decided is None
    membership.observe(status("algo-2", decided=cause("algo-4")))  # what it heard from a trainer host counts
    assert membership.own.decided == cause("algo-4")


@pytest.mark.fault("F32")
def test_different_option_on_a_host_is_named_with_both_values(clock: Clock) -> None:
    own = status("algo-3", options={"job_restarts": "2", "ranks per trainer host": "8"})
    membership = Membership(MEMBERS, own, timings=Timings(), clock=clock)
    membership.observe(status("algo-1", options={"job_restarts": "0"}))
    assert membership.own.failure is not None
    assert membership.own.failure.exit_code is ExitCode.DISAGREEMENT
    assert "algo-1 has job_restarts 0, algo-3 has 2" in membership.own.failure.summary
