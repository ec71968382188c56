"""How hosts agree on why the job failed, without threads and with a clock of the test's."""

from __future__ import annotations

import pytest

from hetero.config import Timings
from hetero.control.members.membership import Membership
from hetero.control.status import Cause, HostState
from tests.support.control.clocks import Clock
from tests.support.control.members import cause, endpoint, status, view


def settled(membership: Membership, clock: Clock, wait_s: float = Membership.SETTLE_S) -> Cause | None:
    """Return what is decided once causes were collected for so long."""
    clock.now_s += wait_s
    membership.tick()
    return membership.own.decided


def test_cause_first_arrival_is_decided_after_settling(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.fail(cause("algo-4", "rank 1 raised ValueError"))
    membership.fail(cause("algo-3", "rank 0 raised: connection closed by peer"))
    membership.tick()
    assert membership.own.decided is None
    decided = settled(membership, clock)
    assert decided is not None
    assert decided.summary == "rank 1 raised ValueError"


def test_cause_killed_rank_outranks_an_exception_that_came_first(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.fail(cause("algo-3", "rank 0 raised: connection closed by peer"))
    membership.fail(cause("algo-4", "rank 1 killed by SIGKILL", by_signal=True))
    decided = settled(membership, clock)
    assert decided is not None
    assert "SIGKILL" in decided.summary


@pytest.mark.fault("F9")
@pytest.mark.parametrize("first", [0, 1])
def test_cause_abort_by_a_watchdog_yields_to_the_exception_that_brought_it_about(clock: Clock, first: int) -> None:
    heard = [
        cause("algo-4", "rank 1: ValueError"),
        cause("algo-3", "rank 0 SIGABRT", by_signal=True, is_consequence=True),
    ]
    membership = view("algo-3", clock)
    membership.fail(heard[first])
    settled(membership, clock)
    membership.fail(heard[1 - first])
    decided = settled(membership, clock)
    assert decided is not None
    assert decided.summary == "rank 1: ValueError"


def test_cause_abort_outranks_the_broken_connections_of_others(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.fail(cause("algo-3", "rank 0: connection closed by peer", is_consequence=True))
    membership.fail(cause("algo-4", "rank 1 SIGABRT", by_signal=True, is_consequence=True))
    decided = settled(membership, clock, Membership.CONSEQUENCE_SETTLE_S)
    assert decided is not None
    assert "SIGABRT" in decided.summary


def test_cause_consequence_yields_to_a_failure_that_comes_later(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.fail(cause("algo-3", "rank 0: connection closed by peer", is_consequence=True))
    assert settled(membership, clock) is None
    membership.fail(cause("algo-4", "rank 1: ValueError"))
    membership.tick()
    assert membership.own.decided is not None
    assert membership.own.decided.host == "algo-4"


def test_cause_consequence_alone_is_decided_after_a_longer_wait(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.fail(cause("algo-3", "rank 0: connection closed by peer", is_consequence=True))
    assert settled(membership, clock, Membership.CONSEQUENCE_SETTLE_S) is not None


@pytest.mark.fault("F11")
def test_cause_lease_that_has_just_ended_is_the_cause_of_consequences(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.observe(status("algo-4", HostState.TRAINING))
    clock.now_s += 0.2
    membership.fail(cause("algo-3", "rank 0: connection closed by peer", is_consequence=True))
    clock.now_s += Timings().lease_s - 0.2 - Membership.CHECK_S / 2
    membership.tick()  # checks the leases
    assert membership.own.decided is None
    clock.now_s += Membership.CHECK_S * 0.6
    membership.tick()
    clock.now_s += Membership.SETTLE_S
    membership.tick()
    assert membership.own.decided is not None
    assert "algo-4 fell silent" in membership.own.decided.summary


def test_failure_is_delivered_once_the_arbiter_has_it(clock: Clock) -> None:
    membership = view("algo-4", clock)
    membership.observe(status("algo-3", HostState.TRAINING))
    assert membership.failure_delivered
    before = membership.own
    membership.fail(cause("algo-4"))
    membership.delivered("algo-3", before)
    assert not membership.failure_delivered
    membership.delivered("algo-3", membership.own)
    assert membership.failure_delivered


def test_cause_other_hosts_adopt_the_arbiters_decision(clock: Clock) -> None:
    membership = view("algo-1", clock)
    decided = cause("algo-4")
    membership.observe(status("algo-3", HostState.FAILED, decided=decided))
    assert membership.own.decided == decided


def test_cause_without_any_trainer_is_decided_by_the_failing_host(clock: Clock) -> None:
    membership = view("algo-1", clock)
    membership.fail(cause("algo-1", "the script cannot be imported"))
    assert settled(membership, clock, Timings().heartbeat_s + 1) is not None


def test_data_host_failing_before_it_served_is_fatal(clock: Clock) -> None:
    membership = view("algo-3", clock)
    membership.observe(status("algo-1", failure=cause("algo-1", "the script raised at import")))
    assert settled(membership, clock) is not None


@pytest.mark.parametrize("incarnation", ["algo-1-first", "algo-1-again"])
def test_data_host_failing_after_it_served_is_not_fatal(clock: Clock, incarnation: str) -> None:
    membership = view("algo-3", clock)
    membership.observe(status("algo-1", HostState.SERVING, endpoints=(endpoint("algo-1"),)))
    membership.observe(status("algo-1", HostState.FAILED, failure=cause("algo-1"), revision=1, incarnation=incarnation))
    assert settled(membership, clock) is None
    assert membership.endpoints() == ()
