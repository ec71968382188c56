"""Restarts of the trainer group, as the state machine decides them: no threads, and a clock of the test's."""

from __future__ import annotations

import dataclasses

import pytest

from hetero.cluster import Role
from hetero.config import Timings
from hetero.control.causes import is_restartable
from hetero.control.members.membership import Member, Membership
from hetero.control.status import Cause, HostState, RankReport
from hetero.errors import ExitCode
from hetero.metrics.logged import LoggedMetric
from tests.support.control.clocks import Clock
from tests.support.control.members import status

MEMBERS = (
    Member(host="algo-2", role=Role.TRAINER),
    Member(host="algo-3", role=Role.TRAINER),
    Member(host="algo-1", role=Role.DATA),
)


def killed(host: str, **changes: object) -> Cause:
    """Return the end of a rank of ``host``."""
    plain = Cause(
        host=host,
        summary="rank 1 killed by SIGKILL",
        exit_code=ExitCode.SCRIPT_FAILED,
        by_signal=True,
        of_rank=True,
    )
    return dataclasses.replace(plain, **changes)


def view(host: str, clock: Clock, *, max_restarts: int = 2) -> Membership:
    """Return what ``host`` knows while ranks run everywhere."""
    state = HostState.SERVING if host == "algo-1" else HostState.TRAINING
    membership = Membership(MEMBERS, status(host, state), timings=Timings(), clock=clock, max_restarts=max_restarts)
    for member in MEMBERS:
        if member.host != host:
            others = HostState.SERVING if member.role is Role.DATA else HostState.TRAINING
            membership.observe(status(member.host, others))
    return membership


def settle(membership: Membership, clock: Clock) -> None:
    """Let the arbiter decide."""
    clock.now_s += Membership.CONSEQUENCE_SETTLE_S
    membership.tick()


def test_killed_rank_begins_a_generation_and_keeps_the_job(clock: Clock) -> None:
    arbiter = view("algo-2", clock)
    arbiter.update(rendezvous_port=4711)
    arbiter.store(RankReport(rank=0, counters={"retries": 3}))
    arbiter.observe(status("algo-3", HostState.TRAINING, failure=killed("algo-3"), revision=1))
    settle(arbiter, clock)
    own = arbiter.own
    assert own.decided is None
    assert (own.generation, own.state, own.ranks, own.rendezvous_port) == (1, HostState.INIT, (), 0)
    assert own.restarted_for == killed("algo-3")
    assert arbiter.past_ranks.counters == {"retries": 3}


def test_values_that_ranks_logged_before_a_restart_stay(clock: Clock) -> None:
    first, second = (LoggedMetric(name="loss", value=0.5, at_s=at_s) for at_s in (1.0, 9.0))
    arbiter = view("algo-2", clock)
    arbiter.store(RankReport(rank=0, metrics=(first,)))
    arbiter.store(RankReport(rank=0))  # nothing new
    assert arbiter.own.ranks[0].metrics == (first,)
    arbiter.observe(status("algo-3", HostState.TRAINING, failure=killed("algo-3"), revision=1))
    settle(arbiter, clock)
    arbiter.store(RankReport(rank=0, generation=1))
    assert arbiter.own.ranks[0].metrics == (first,)
    arbiter.store(RankReport(rank=0, generation=1, metrics=(second,)))
    assert arbiter.own.ranks[0].metrics == (first, second)


def test_other_hosts_follow_the_arbiter_and_forget_what_ranks_said(clock: Clock) -> None:
    other, data = view("algo-3", clock), view("algo-1", clock)
    other.fail(killed("algo-3"), generation=0)
    decision = status("algo-2", HostState.INIT, generation=1, restarted_for=killed("algo-3"), revision=5)
    for membership in (other, data):
        membership.observe(decision)
        assert membership.own.generation == 1
        assert membership.own.restarted_for == killed("algo-3")
        assert membership.own.failure is None
    assert other.own.state is HostState.INIT
    assert data.own.state is HostState.SERVING  # data hosts go on serving


def test_late_words_of_an_earlier_generation_are_ignored(clock: Clock) -> None:
    arbiter = view("algo-2", clock)
    arbiter.fail(killed("algo-2"), generation=0)
    settle(arbiter, clock)
    assert arbiter.own.generation == 1
    arbiter.fail(killed("algo-2", summary="rank 0: connection closed by peer", is_consequence=True), generation=0)
    arbiter.store(RankReport(rank=0, steps_started={"train": 7}))
    late = status("algo-3", HostState.TRAINING, failure=killed("algo-3", summary="rank 1: broken"), revision=2)
    arbiter.observe(late)
    settle(arbiter, clock)
    assert (arbiter.own.generation, arbiter.own.ranks, arbiter.own.decided) == (1, (), None)


def test_peer_of_an_earlier_generation_is_not_there_yet(clock: Clock) -> None:
    arbiter = view("algo-2", clock)
    arbiter.fail(killed("algo-2"), generation=0)
    settle(arbiter, clock)
    arbiter.update(state=HostState.WAIT_PEERS)
    assert [host for host, _ in arbiter.missing(Role.TRAINER, at_least=HostState.WAIT_PEERS)] == ["algo-3"]
    arbiter.observe(status("algo-3", HostState.WAIT_PEERS, generation=1, revision=9))
    assert arbiter.missing(Role.TRAINER, at_least=HostState.WAIT_PEERS) == []


def test_host_that_is_done_with_an_earlier_generation_is_not_done(clock: Clock) -> None:
    arbiter = view("algo-2", clock)
    arbiter.observe(status("algo-3", HostState.DONE, revision=3))
    arbiter.fail(killed("algo-2"), generation=0)
    settle(arbiter, clock)
    arbiter.update(state=HostState.DONE)
    assert not arbiter.trainers_done


def test_job_ends_with_the_root_cause_when_no_restart_is_left(clock: Clock) -> None:
    arbiter = view("algo-2", clock, max_restarts=1)
    for generation in (0, 1):
        assert arbiter.own.decided is None
        arbiter.observe(status("algo-3", HostState.TRAINING, generation=generation, revision=10 * generation))
        arbiter.fail(killed("algo-2"), generation=generation)
        settle(arbiter, clock)
    assert arbiter.own.decided == killed("algo-2")


def test_without_the_option_a_killed_rank_ends_the_job(clock: Clock) -> None:
    arbiter = view("algo-2", clock, max_restarts=0)
    arbiter.fail(killed("algo-2"), generation=0)
    settle(arbiter, clock)
    assert arbiter.own.decided == killed("algo-2")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (ExitCode.SCRIPT_FAILED, True),
        (ExitCode.DATA_PLANE_LOST, True),
        (ExitCode.DATASET_FAILED, True),
        (ExitCode.CORRUPTION, True),
        (ExitCode.INTERNAL, True),
        (ExitCode.USAGE, False),
        (ExitCode.CLUSTER, False),
        (ExitCode.DISAGREEMENT, False),
        (ExitCode.AUTHENTICATION, False),
        (ExitCode.PORT, False),
        (ExitCode.RESOURCES, False),
        (ExitCode.ORPHANED, False),
        (ExitCode.SHUTDOWN_OVERRAN, False),
    ],
)
def test_cause_is_restartable_only_where_another_attempt_may_go_better(code: ExitCode, expected: bool) -> None:
    assert is_restartable(killed("algo-2", exit_code=code)) is expected
    assert not is_restartable(killed("algo-2", exit_code=code, of_rank=False))  # a launcher's or an endpoint's


def test_stop_request_leaves_no_restart(clock: Clock) -> None:
    arbiter = view("algo-2", clock)
    arbiter.observe(status("algo-3", HostState.TRAINING, stop_requested=True, revision=1))
    arbiter.fail(killed("algo-2"), generation=0)
    settle(arbiter, clock)
    assert arbiter.own.decided == killed("algo-2")


def test_lost_trainer_host_ends_the_job_although_a_rank_was_killed_too(clock: Clock) -> None:
    arbiter = view("algo-2", clock)
    clock.now_s += Timings().lease_s + 1
    arbiter.tick()  # algo-3 fell silent
    arbiter.fail(killed("algo-2"), generation=0)
    settle(arbiter, clock)
    assert arbiter.own.decided is not None
    assert arbiter.own.generation == 0


def test_host_lost_during_a_restart_ends_the_job(clock: Clock) -> None:
    arbiter = view("algo-2", clock)
    arbiter.observe(status("algo-3", HostState.DONE, revision=3))
    arbiter.fail(killed("algo-2"), generation=0)
    settle(arbiter, clock)
    assert arbiter.own.generation == 1
    clock.now_s += Timings().lease_s + 1
    arbiter.tick()
    settle(arbiter, clock)
    assert arbiter.own.decided is not None
    assert arbiter.own.decided.exit_code is ExitCode.ORPHANED


def test_disagreement_beside_a_killed_rank_ends_the_job(clock: Clock) -> None:
    arbiter = view("algo-2", clock)
    arbiter.fail(killed("algo-2"), generation=0)
    arbiter.fail(Cause(host="algo-1", summary="algo-1 has another script", exit_code=ExitCode.DISAGREEMENT))
    settle(arbiter, clock)
    assert arbiter.own.decided is not None
    assert arbiter.own.decided.exit_code is ExitCode.DISAGREEMENT
