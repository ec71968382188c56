"""What a data host says while it waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hetero.cluster import Role
from hetero.config import Timings
from hetero.control.membership import Member, Membership
from hetero.control.status import HostState, HostStatus
from hetero.launch.roles import serve

MEMBERS = (Member(host="trainer", role=Role.TRAINER), Member(host="data", role=Role.DATA))


def status(host: str, state: HostState, **changes: Any) -> HostStatus:
    """Return what ``host`` says of itself."""
    return HostStatus(host=host, incarnation="i", version="1", script_digest="d", state=state, **changes)


class Host:
    """A data host without endpoints; each of its ticks takes in the next thing that happens."""

    def __init__(self, *happens: Callable[[Host], None]) -> None:
        self.name = "data"
        self.timings = Timings()
        self.pool = None
        self.placement = SimpleNamespace(num_endpoints=0)
        self.trainers_came = False
        self.interrupted_s: float | None = None
        self.known = Membership(MEMBERS, status("data", HostState.INIT), timings=self.timings, clock=time.monotonic)
        self.hub = self
        self.said: list[str] = []
        self._happens = list(happens)

    def membership(self) -> Host:
        return self

    def __enter__(self) -> Membership:
        return self.known

    def __exit__(self, *_: object) -> None:
        pass

    def publish(self, **changes: object) -> None:
        self.known.update(**changes)

    def tick(self, waiting_for: Callable[[Membership], str] | None = None) -> None:
        self.said.append("" if waiting_for is None else waiting_for(self.known))
        self._happens.pop(0)(self)

    def farewell(self) -> None:
        pass


def trainer(state: HostState, **changes: Any) -> Callable[[Host], None]:
    """Have the trainer host heard in a state."""
    return lambda host: host.known.observe(status("trainer", state, revision=len(host.said), **changes))


def interrupt(host: Host) -> None:
    host.interrupted_s = time.monotonic()


@pytest.mark.fault("F13")
@pytest.mark.fault("F14")
def test_data_host_says_for_which_trainer_hosts_it_waits() -> None:
    host = Host(
        lambda host: host.known.unreachable("trainer", "refused"),
        trainer(HostState.INIT),
        trainer(HostState.TRAINING),
        trainer(HostState.INIT),  # a restart of the group
        trainer(HostState.DONE),
    )
    serve(host)  # type: ignore[arg-type]
    assert host.said == ["trainer (never heard of)", "trainer (refused)", "trainer (heard, init)", "", ""]


@pytest.mark.fault("F13")
def test_data_host_asked_to_stop_says_for_whose_end_it_waits() -> None:
    host = Host(trainer(HostState.TRAINING), interrupt, lambda _: None, trainer(HostState.DONE))
    serve(host)  # type: ignore[arg-type]
    assert host.said == [
        "trainer (never heard of)",
        "",
        "the job's end on trainer (heard, training)",
        "the job's end on trainer (heard, training)",
    ]


@pytest.mark.fault("F13")
def test_data_host_of_a_job_that_was_asked_to_stop_says_for_whose_end_it_waits() -> None:
    host = Host(trainer(HostState.TRAINING, stop_requested=True), lambda _: None, trainer(HostState.DONE))
    serve(host)  # type: ignore[arg-type]
    assert host.said[1:] == ["the job's end on trainer (heard, training)"] * 2
