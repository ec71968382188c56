"""What the first trainer host decides, every trainer host does."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import pytest

from hetero.cluster import Role
from hetero.config import Timings
from hetero.control.members.directory import EndpointRecord
from hetero.control.members.membership import Member, Membership
from hetero.control.status import HostStatus, RankReport, StepTimes
from hetero.launch.auto_endpoints.memory import limit_of_this_host
from hetero.launch.auto_endpoints.trainer_endpoints import TrainerEndpoints
from hetero.metrics.hosts import HostReading, HostSampler

HOSTS = ("algo-2", "algo-3")
REMOTE = EndpointRecord(endpoint_id="algo-1/0", host="algo-1", address="127.0.0.1:1", incarnation="i", num_slots=4)


class StubPool:
    """A pool whose endpoints are used at once."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    @property
    def num_used(self) -> int:
        return self.sizes[-1] if self.sizes else 0

    @property
    def num_running(self) -> int:
        return self.num_used

    @property
    def used_pids(self) -> tuple[int, ...]:
        return tuple(range(1, 1 + self.num_used))

    def resize(self, number: int) -> None:
        self.sizes.append(number)


class Host:
    """A trainer host and what it knows about the others."""

    def __init__(self, name: str, *, max_endpoints: int = 8) -> None:
        members = [Member(host="algo-1", role=Role.DATA), *(Member(host=host, role=Role.TRAINER) for host in HOSTS)]
        self.membership = Membership(members, status(name), timings=Timings(), clock=lambda: 0.0)
        self.pool = StubPool()
        self.published: list[int] = []
        self.free_bytes = 100
        self.trainer_endpoints = TrainerEndpoints(
            self.pool,  # type: ignore[arg-type]
            host=name,
            trainer_hosts=HOSTS,
            num_ranks=1,
            max_endpoints=max_endpoints,
            slots_per_endpoint=1,
            publish=self.published.append,
            memory_limit=functools.partial(
                limit_of_this_host,
                free_and_total_bytes=lambda: (self.free_bytes, 100),
                private_bytes=lambda pid: 10,
            ),
        )
        self.num_steps = 0
        self.membership.observe(status("algo-1", endpoints=(REMOTE,)))

    def step(self, *, wait_s: float, generation: int = 0, loader: str = "train") -> None:
        """Report one more step and let the host act."""
        self.num_steps += 1
        times = StepTimes(loader=loader, first=self.num_steps - 1, compute_s=(0.1,), wait_s=(wait_s,))
        self.membership.store(RankReport(rank=0, step_times=times, generation=generation))
        self.act()

    def act(self) -> None:
        self.trainer_endpoints.read(self.membership)()


def status(host: str, **changes: Any) -> HostStatus:
    # A data host uses 40 bytes for one endpoint, so 70 % of 100 free bytes hold one.
    sampler = HostSampler(host, read=lambda: HostReading(cpu_total_s=0.0, memory_bytes=40))
    sampler.sample()
    usage = sampler.usage().to_json()
    return HostStatus(host=host, incarnation="i", version="1", script_digest="d", usage_json=usage, **changes)


def test_first_host_adds_endpoints_and_publishes_their_number(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    host = Host("algo-2")
    while not host.published and host.num_steps < 100:
        host.step(wait_s=0.1)
    assert (host.published, host.pool.sizes) == ([1], [1])
    (text,) = host.trainer_endpoints.decisions
    # The wait calls for more, but the memory holds one.
    assert "from 0 to 1, because a step of 200 ms waits 100 ms for data. No more are added: " in text
    assert f"trainer endpoints: {text}" in caplog.messages


def test_other_host_follows_within_its_own_limit() -> None:
    host = Host("algo-3", max_endpoints=2)
    for _ in range(60):
        host.step(wait_s=0.1)
    assert host.pool.sizes == [], "it decides nothing itself"
    for revision, number in enumerate((1, 4, 4, 0)):
        host.membership.observe(status("algo-2", trainer_endpoints=number, revision=revision))
        host.act()
    assert host.pool.sizes == [1, 2, 0]


def test_steps_of_another_loader_begin_a_new_search() -> None:
    host = Host("algo-2")
    while not host.published and host.num_steps < 100:
        host.step(wait_s=0.1, loader="validation")
    host.num_steps = 0
    host.step(wait_s=0.0)
    assert (host.published, host.pool.sizes) == ([1, 0], [1, 0])
    assert host.trainer_endpoints.decisions[-1].endswith(
        "from 1 to 0, because loader train now takes more time than validation"
    )
    while len(host.trainer_endpoints.decisions) < 3 and host.num_steps < 200:
        host.step(wait_s=0.0)
    assert "stays at 0" in host.trainer_endpoints.decisions[-1]


def test_job_that_stops_decides_nothing() -> None:
    host = Host("algo-2")
    for _ in range(29):
        host.step(wait_s=0.1)
    host.membership.observe(status("algo-3", stop_requested=True, revision=1))
    for _ in range(60):
        host.step(wait_s=0.1)
    assert (host.published, host.trainer_endpoints.decisions) == ([], [])


def test_host_without_memory_adds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    host = Host("algo-2")
    host.free_bytes = 24
    while not host.trainer_endpoints.decisions and host.num_steps < 100:
        host.step(wait_s=0.1)
    (text,) = host.trainer_endpoints.decisions
    assert ": stays at 0, because a step of 200 ms waits 100 ms for data. No more are added: " in text
    assert (host.published, host.pool.sizes) == ([], [])
    assert caplog.messages == [f"trainer endpoints: {text}"]


def test_host_stops_when_the_next_endpoints_do_not_fit() -> None:
    host = Host("algo-2")
    while host.pool.sizes != [1] and host.num_steps < 200:
        host.step(wait_s=0.1)
    host.free_bytes = 20  # one more of 10 bytes
    while len(host.trainer_endpoints.decisions) < 2 and host.num_steps < 200:
        host.step(wait_s=0.05)
    assert host.pool.sizes == [1, 2]
    assert "from 1 to 2, because" in host.trainer_endpoints.decisions[-1]
    assert "an endpoint uses 0 kB" in host.trainer_endpoints.decisions[-1]


def test_other_host_adds_what_its_own_memory_holds(caplog: pytest.LogCaptureFixture) -> None:
    host = Host("algo-3")
    host.membership.observe(status("algo-2", trainer_endpoints=1, revision=1))
    host.act()
    host.free_bytes = 20
    for _ in range(3):
        host.membership.observe(status("algo-2", trainer_endpoints=4, revision=2))
        host.act()
    assert host.pool.sizes == [1, 2]
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith("trainer endpoints: algo-2 wants 4, but ")


def test_restart_of_the_ranks_begins_a_new_window() -> None:
    host = Host("algo-2")
    for _ in range(29):
        host.step(wait_s=0.1)
    host.membership.own = dataclasses.replace(host.membership.own, generation=1, ranks=())
    host.num_steps = 0
    for _ in range(15):
        host.step(wait_s=0.1, generation=1)
    assert host.published == []
    while not host.published and host.num_steps < 100:
        host.step(wait_s=0.1, generation=1)
    assert host.published == [1]
