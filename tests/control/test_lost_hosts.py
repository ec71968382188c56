"""Hosts that are lost, as the state machine sees them: no threads, and a clock of the test's."""

from __future__ import annotations

import dataclasses

import pytest

from hetero.cluster import Role
from hetero.config import Timings
from hetero.control.directory import EndpointRecord
from hetero.control.membership import Member, Membership
from hetero.control.status import HostState, HostStatus

MEMBERS = (
    Member(host="algo-2", role=Role.TRAINER),
    Member(host="algo-3", role=Role.TRAINER),
    Member(host="algo-1", role=Role.DATA),
)
ENDPOINT = EndpointRecord(endpoint_id="algo-1/0", host="algo-1", address="127.0.0.1:1", incarnation="i")


class Clock:
    """Seconds that pass when the test says so."""

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


def view(clock: Clock, *, max_restarts: int = 0) -> Membership:
    """Return what the first trainer host knows while ranks run on both of them."""
    own = status("algo-2")
    membership = Membership(MEMBERS, own, timings=Timings(), clock=clock, max_restarts=max_restarts)
    membership.observe(status("algo-3"))
    membership.observe(status("algo-1", HostState.SERVING, endpoints=(ENDPOINT,)))
    return membership


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
    assert membership.local_news != before  # ranks are told at once
