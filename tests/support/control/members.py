"""What one of four hosts of a job knows of the others, and what they tell it: no threads, and a clock of the test's."""

from __future__ import annotations

import dataclasses

from hetero.cluster import Role
from hetero.config import Timings
from hetero.control.members.directory import EndpointRecord
from hetero.control.members.membership import Member, Membership
from hetero.control.status import Cause, HostState, HostStatus
from hetero.errors import ExitCode
from tests.support.control.clocks import Clock

MEMBERS = (
    Member(host="algo-3", role=Role.TRAINER),
    Member(host="algo-4", role=Role.TRAINER),
    Member(host="algo-1", role=Role.DATA),
    Member(host="algo-2", role=Role.DATA),
)


def status(host: str, state: HostState = HostState.INIT, **changes: object) -> HostStatus:
    """Return a heartbeat of ``host``."""
    plain = HostStatus(host=host, incarnation=f"{host}-first", version="1", script_digest="d", state=state)
    return dataclasses.replace(plain, **changes)


def endpoint(host: str) -> EndpointRecord:
    """Return an endpoint of ``host``."""
    return EndpointRecord(endpoint_id=f"{host}/0", host=host, address="127.0.0.1:1", incarnation="i", num_slots=1)


def cause(host: str, summary: str = "rank 0 failed", **changes: object) -> Cause:
    """Return a failure seen by ``host``."""
    return dataclasses.replace(Cause(host=host, summary=summary, exit_code=ExitCode.SCRIPT_FAILED), **changes)


def view(host: str, clock: Clock) -> Membership:
    """Return what ``host`` knows at the start."""
    return Membership(MEMBERS, status(host), timings=Timings(), clock=clock)
