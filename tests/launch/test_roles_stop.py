"""What a trainer host does about a request to stop that finds the hosts in different states."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero.cluster import Role
from hetero.config import Timings
from hetero.control.membership import Member, Membership
from hetero.control.status import Cause, HostState, HostStatus, RankReport
from hetero.errors import ExitCode
from hetero.launch import roles

MEMBERS = (Member(host="algo-2", role=Role.TRAINER), Member(host="algo-3", role=Role.TRAINER))


class FailedError(Exception):
    """Stands for the end of the job."""


class Host:
    """As much of a host as `roles` looks at; every tick, something happens."""

    name = "algo-2"
    trainer_hosts = ("algo-2", "algo-3")
    is_first_trainer = False
    address = "127.0.0.1"
    generation = 0
    run_dir = Path()
    relay = None
    child_environment: dict[str, str] = {}  # noqa: RUF012
    placement = SimpleNamespace(num_ranks=1)
    options = SimpleNamespace(script="script.py", script_args=(), audit=False)
    timings = Timings()

    def __init__(self, on_tick: Callable[[int], None]) -> None:
        own = HostStatus(host=self.name, incarnation="1", version="1", script_digest="d", state=HostState.TRAINING)
        self.members = Membership(MEMBERS, own, timings=Timings(), clock=time.monotonic)
        self.hub = SimpleNamespace(membership=self._membership, port=1)
        self.hear(HostState.WAIT_PEERS)
        self._on_tick = on_tick
        self.num_ticks = 0

    @contextlib.contextmanager
    def _membership(self) -> Iterator[Membership]:
        yield self.members

    def hear(self, state: HostState, **changes: Any) -> None:
        """Hear of the other trainer host."""
        before = self.members._peers["algo-3"].status
        revision = 1 if before is None else before.revision + 1
        status = HostStatus(
            host="algo-3", incarnation="1", version="1", script_digest="d", state=state, revision=revision, **changes
        )
        self.members.observe(status)

    def address_of(self, _host: str) -> str:
        return self.address

    def tick(self, waiting_for: Callable[[Membership], str]) -> None:
        waiting_for(self.members)
        self.num_ticks += 1
        assert self.num_ticks < 10, "waits for ever"
        self._on_tick(self.num_ticks)

    def fail(self, cause: Cause) -> None:
        raise FailedError(cause.first_line)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the rank processes."""
    fake = SimpleNamespace(status=None, failure=None, killed=0)

    class Processes:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def poll(self) -> int | None:
            status: int | None = fake.status
            return status

        def failure_at_stop(self) -> Cause | None:
            failure: Cause | None = fake.failure
            return failure

        def kill(self) -> None:
            fake.killed += 1

    monkeypatch.setattr(roles, "RankProcesses", Processes)
    return fake


@pytest.mark.fault("F12")
def test_ranks_that_wait_for_a_host_that_starts_none_are_ended(ranks: SimpleNamespace) -> None:
    def on_tick(number: int) -> None:
        if number == 2:
            host.hear(HostState.DONE, stop_requested=True)

    host = Host(on_tick)
    roles._run_ranks(host)  # type: ignore[arg-type]
    assert host.num_ticks == 2
    assert ranks.killed == 1


@pytest.mark.fault("F12")
def test_ranks_that_have_begun_are_not_ended_because_others_are_done(ranks: SimpleNamespace) -> None:
    def on_tick(number: int) -> None:
        if number == 1:
            host.members.store(RankReport(rank=0))
            host.hear(HostState.DONE, stop_requested=True, ranks=(RankReport(rank=1, finished=True),))
        if number == 4:
            ranks.status = 0

    host = Host(on_tick)
    roles._run_ranks(host)  # type: ignore[arg-type]
    assert host.num_ticks == 4


@pytest.mark.fault("F27")
def test_failure_at_the_stop_is_told_once_the_ranks_of_other_hosts_have_saved(ranks: SimpleNamespace) -> None:
    def on_tick(number: int) -> None:
        if number == 1:
            host.members.store(RankReport(rank=0, finished=True))
            ranks.status = 0
        if number == 3:
            host.hear(HostState.DONE, stop_requested=True, ranks=(RankReport(rank=1, finished=True),))

    host = Host(on_tick)
    host.hear(HostState.TRAINING, stop_requested=True, ranks=(RankReport(rank=1),))
    ranks.failure = Cause(host="algo-2", summary="rank 0: no space", exit_code=ExitCode.SCRIPT_FAILED)
    with pytest.raises(FailedError, match="HET-30 algo-2: rank 0: no space"):
        roles._run_ranks(host)  # type: ignore[arg-type]
    assert host.num_ticks == 3
