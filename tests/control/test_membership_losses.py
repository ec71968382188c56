"""Hosts that are lost, as the state machine sees them: no threads, and a clock of the test's."""

from __future__ import annotations

import dataclasses

import pytest

from hetero.cluster import Role
from hetero.config import Timings
from hetero.control.members.directory import EndpointRecord
from hetero.control.members.membership import Member, Membership
from hetero.control.status import Cause, HostState, HostStatus
from hetero.errors import ExitCode

MEMBERS = (
    Member(host="algo-2", role=Role.TRAINER),
    Member(host="algo-3", role=Role.TRAINER),
    Member(host="algo-1", role=Role.DATA),
)
ENDPOINT = EndpointRecord(endpoint_id="algo-1/0", host="algo-1", address="127.0.0.1:1", incarnation="i")


class Clock:
    """Seconds that pass only when the test sets them."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def status(host: str, state: HostState = HostState.TRAINING, **changes: object) -> HostStatus:
    """Return a heartbeat of ``host``."""
    plain = HostStatus(host=host, incarnation=f"{host}-first", version="1", script_digest="d", state=state)
    return dataclasses.replace(plain, **changes)


def view(clock: Clock, host: str = "algo-2", *, max_restarts: int = 0) -> Membership:
    """Return what a trainer host knows while ranks run on both of them."""
    membership = Membership(MEMBERS, status(host), timings=Timings(), clock=clock, max_restarts=max_restarts)
    membership.observe(status("algo-3" if host == "algo-2" else "algo-2"))
    membership.observe(status("algo-1", HostState.SERVING, endpoints=(ENDPOINT,)))
    return membership


def broken(host: str, **changes: object) -> Cause:
    """Return what a rank says that has lost its connection to the one on the other host."""
    summary = "rank 0: the training script raised DistBackendError: Connection closed by trainer host algo-3 <4711>"
    plain = Cause(host=host, summary=summary, exit_code=ExitCode.SCRIPT_FAILED, is_consequence=True, of_rank=True)
    return dataclasses.replace(plain, **changes)


@pytest.mark.parametrize(
    ("changes", "is_there"),
    [
        ({"state": HostState.SERVING}, True),  # its only endpoint has ended, and will be started again
        ({"state": HostState.DRAINING, "endpoints": (ENDPOINT,)}, False),
        ({"state": HostState.FAILED}, False),
        ({"state": HostState.INIT, "incarnation": "second"}, False),  # the launcher ended, and all it had
        ({"state": HostState.INIT, "incarnation": "second", "endpoints": (ENDPOINT,)}, True),
    ],
)
def test_host_is_in_service_while_its_launcher_lives_and_takes_no_leave(
    clock: Clock, changes: dict[str, object], is_there: bool
) -> None:
    membership = view(clock)
    membership.observe(dataclasses.replace(status("algo-1", revision=1), **changes))
    assert ("algo-1" in membership.hosts_in_service()) is is_there


def test_host_that_is_silent_for_a_lease_is_in_service_no_more(clock: Clock) -> None:
    membership = view(clock)
    assert membership.hosts_in_service() == ("algo-2", "algo-3", "algo-1")
    before = membership.local_news
    clock.now_s += Timings().lease_s + 1
    assert membership.hosts_in_service() == ("algo-2",)
    assert membership.local_news != before  # ranks learn it at once


@pytest.mark.parametrize(
    ("state", "is_at_work"), [(HostState.SERVING, True), (HostState.DRAINING, True), (HostState.DONE, False)]
)
def test_host_is_at_work_until_it_has_ended_or_is_silent(clock: Clock, state: HostState, is_at_work: bool) -> None:
    membership = view(clock)
    membership.observe(status("algo-1", state, revision=5))
    assert membership.at_work(Role.DATA) == ["algo-1"] * is_at_work
    clock.now_s += Timings().suspect_s + 1
    assert membership.at_work(Role.DATA) == []
    membership.observe(status("algo-1", state, revision=6))
    assert membership.at_work(Role.DATA) == ["algo-1"] * is_at_work


@pytest.mark.fault("F11")
@pytest.mark.parametrize("max_restarts", [0, 2])
def test_broken_connection_to_a_silent_host_is_no_cause_before_the_lease_ends_nor_after(
    clock: Clock, max_restarts: int
) -> None:
    membership = view(clock, max_restarts=max_restarts)
    membership.fail(broken("algo-2"), generation=0)
    for _ in range(int(Timings().lease_s)):
        clock.now_s += 1.0
        membership.tick()
        assert (membership.own.decided, membership.own.generation) == (None, 0)
    clock.now_s += 0.5
    membership.tick()
    assert membership.own.generation == 0
    assert membership.own.decided is not None
    assert membership.own.decided.exit_code is ExitCode.ORPHANED
    assert "trainer host algo-3 fell silent for 16 s" in membership.own.decided.summary


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_broken_connection_is_judged_as_soon_as_the_silent_host_is_heard_again(clock: Clock, max_restarts: int) -> None:
    membership = view(clock, max_restarts=max_restarts)
    membership.fail(broken("algo-2"), generation=0)
    clock.now_s += Timings().lease_s - 1.0
    membership.tick()
    assert (membership.own.decided, membership.own.generation) == (None, 0)
    membership.observe(status("algo-3", revision=1))
    membership.tick()
    own = membership.own
    assert (own.restarted_for if max_restarts else own.decided) == broken("algo-2")
    assert own.generation == (1 if max_restarts else 0)


@pytest.mark.parametrize(
    ("state", "changes"),
    [
        (HostState.DONE, {}),  # it has said its last word
        (HostState.TRAINING, {"is_consequence": False}),  # a failure that is not a consequence needs no other reason
    ],
)
def test_silent_host_is_not_waited_for_if_it_cannot_be_the_cause(
    clock: Clock, state: HostState, changes: dict[str, object]
) -> None:
    membership = view(clock)
    membership.observe(status("algo-3", state, revision=1))
    cause = broken("algo-2", **changes)
    membership.fail(cause, generation=0)
    clock.now_s += Membership.CONSEQUENCE_SETTLE_S
    membership.tick()
    assert membership.own.decided == cause


@pytest.mark.fault("F11")
def test_loss_of_the_host_that_decides_is_named_by_the_next_one(clock: Clock) -> None:
    membership = view(clock, "algo-3")
    membership.fail(broken("algo-3"), generation=0)
    clock.now_s += 0.5
    membership.observe(status("algo-2", revision=1))  # sent before its end
    begin_s = clock.now_s
    while membership.own.decided is None:
        clock.now_s += 0.25
        membership.tick()
        assert clock.now_s < begin_s + Timings().lease_s + Membership.SETTLE_S
    assert "trainer host algo-2 fell silent" in membership.own.decided.summary
