"""A host whose life a test writes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hetero.cluster import Role
from hetero.config import Timings
from hetero.control.members.membership import Member, Membership
from hetero.control.status import Cause, HostState, HostStatus
from hetero.errors import ExitCode
from hetero.launch.data_services import Servers
from hetero.launch.ranks.ranks import AgentStarter


class FailedError(Exception):
    """The end of the job."""


class StubHost:
    """The part of a host that `hetero.launch.roles` uses. Something happens at every tick.

    Args:
        members: The job's hosts.
        name: Which of them this is.
        state: Its state.
        on_tick: Called at every tick, after `said` has grown.
    """

    address = "127.0.0.1"
    generation = 0
    is_first_trainer = False
    pool = None
    starter: Any = AgentStarter("torch")
    relay = None
    run_dir = Path()
    timings = Timings()
    has_addresses = True
    """Whether the names of hosts are resolved."""

    def __init__(
        self, members: tuple[Member, ...], name: str, state: HostState, on_tick: Callable[[StubHost], None]
    ) -> None:
        self.name = name
        self.trainer_hosts = tuple(member.host for member in members if member.role is Role.TRAINER)
        self.known = Membership(members, _status(name, state), timings=self.timings, clock=time.monotonic)
        self.hub = SimpleNamespace(membership=self._membership, rank_port=1)
        self.placement = SimpleNamespace(
            num_ranks=1,
            num_gpus=0,
            framework="torch",
            data_service="",
            remote=False,
            servers=Servers(number=0),
        )
        self.options = SimpleNamespace(
            profile=False,
            data_service="grpc",
            script="script.py",
            module=False,
            script_args=(),
            audit=False,
            job_restarts=0,
        )
        self.child_environment: dict[str, str] = {}
        self.interrupted_s: float | None = None
        self.said: list[str] = []
        """What it waited for, by tick. Empty for nothing."""
        self._revision = 0
        self._on_tick = on_tick

    @contextlib.contextmanager
    def _membership(self) -> Iterator[Membership]:
        yield self.known

    @property
    def num_ticks(self) -> int:
        return len(self.said)

    @property
    def was_stopped(self) -> bool:
        return self.interrupted_s is not None or self.known.stop_requested

    def hear(self, host: str, state: HostState, **changes: Any) -> None:
        """Have another host heard in a state."""
        self._revision += 1
        self.known.observe(_status(host, state, revision=self._revision, **changes))

    @property
    def plan(self) -> StubHost:
        """This host, which has the fields of a plan too."""
        return self

    @property
    def addresses(self) -> SimpleNamespace:
        return SimpleNamespace(
            known=lambda _host: self.address if self.has_addresses else None, of=lambda _host: self.address
        )

    def publish(self, **changes: object) -> None:
        self.known.update(**changes)

    def tick(self, waiting_for: str | Callable[[Membership], str] = "") -> None:
        self.said.append(waiting_for if isinstance(waiting_for, str) else waiting_for(self.known))
        assert self.num_ticks < 10, "waits for ever"
        self._on_tick(self)

    def fail_because(self, summary: str, exit_code: ExitCode) -> None:
        self.fail(Cause(host=self.name, summary=summary, exit_code=exit_code))

    def fail(self, cause: Cause) -> None:
        raise FailedError(cause.first_line)

    def farewell(self) -> None: ...

    def report(self) -> None: ...


def _status(host: str, state: HostState, **changes: Any) -> HostStatus:
    return HostStatus(host=host, incarnation="1", version="1", script_digest="d", state=state, **changes)
