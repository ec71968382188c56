"""What a trainer host tells its ranks, and does about a request to stop that finds the hosts in different states."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from hetero.cluster import Role
from hetero.control.members.membership import Member
from hetero.control.rank.variables import LAUNCHER_VARIABLE
from hetero.control.status import Cause, HostState, RankReport
from hetero.errors import ExitCode
from hetero.launch import roles
from hetero.launch.ranks import ranks as ranks_module
from hetero.launch.ranks.ranks import AgentStarter
from hetero.launch.ranks.starter import RanksOptions
from tests.support.launch.stub_host import FailedError, StubHost

NO_SPACE = Cause(host="algo-2", summary="rank 0: no space", exit_code=ExitCode.SCRIPT_FAILED)
MEMBERS = (Member(host="algo-2", role=Role.TRAINER), Member(host="algo-3", role=Role.TRAINER))


def training(on_tick: Callable[[StubHost], None]) -> StubHost:
    """Return a host that trains. The other one waits for it."""
    host = StubHost(MEMBERS, "algo-2", HostState.TRAINING, on_tick)
    host.hear("algo-3", HostState.WAIT_PEERS)
    return host


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the rank processes."""
    fake = SimpleNamespace(status=None, killed=0, options=None)

    class Processes:
        def __init__(self, options: RanksOptions, **_: object) -> None:
            fake.options = options

        def poll(self) -> int | None:
            status: int | None = fake.status
            return status

        def kill(self) -> None:
            fake.killed += 1

    monkeypatch.setattr(ranks_module, "RankProcesses", Processes)
    return fake


@pytest.mark.fault("F12")
def test_ranks_that_wait_for_a_host_that_starts_none_are_ended(ranks: SimpleNamespace) -> None:
    def on_tick(host: StubHost) -> None:
        host.known.store(RankReport(rank=0))
        if host.num_ticks == 2:
            host.hear("algo-3", HostState.DONE, stop_requested=True)

    host = training(on_tick)
    roles._run_ranks(host)  # type: ignore[arg-type]
    assert host.num_ticks == 2
    assert ranks.killed == 1


@pytest.mark.fault("F12")
def test_ranks_that_have_begun_are_not_ended_because_others_are_done(ranks: SimpleNamespace) -> None:
    def on_tick(host: StubHost) -> None:
        if host.num_ticks == 1:
            host.known.store(RankReport(rank=0))
            host.hear("algo-3", HostState.DONE, stop_requested=True, ranks=(RankReport(rank=1, finished=True),))
        if host.num_ticks == 4:
            ranks.status = 0

    host = training(on_tick)
    roles._run_ranks(host)  # type: ignore[arg-type]
    assert host.num_ticks == 4


@pytest.mark.fault("F27")
@pytest.mark.parametrize("is_last_report_heard", [True, False])
def test_failure_at_the_stop_is_told_once_the_ranks_of_other_hosts_have_saved(
    ranks: SimpleNamespace, is_last_report_heard: bool
) -> None:
    def on_tick(host: StubHost) -> None:
        if host.num_ticks == 1:
            host.known.store(RankReport(rank=0, finished=True, failure=NO_SPACE))
            ranks.status = 0
        if host.num_ticks == 3:
            last = RankReport(rank=1, finished=is_last_report_heard)
            host.hear("algo-3", HostState.DONE, stop_requested=True, ranks=(last,))

    host = training(on_tick)
    host.hear("algo-3", HostState.TRAINING, stop_requested=True, ranks=(RankReport(rank=1),))
    with pytest.raises(FailedError, match="HET-30 algo-2: rank 0: no space"):
        roles._run_ranks(host)  # type: ignore[arg-type]
    assert host.num_ticks == 3


def test_ranks_are_given_their_launchers_address_in_brackets_if_it_is_ipv6(ranks: SimpleNamespace) -> None:
    ranks.status = 0
    host = training(lambda _: None)
    host.address = "::1"
    roles._run_ranks(host)  # type: ignore[arg-type]
    assert ranks.options.environment[LAUNCHER_VARIABLE] == "[::1]:1"
    assert ranks.options.meeting_points[0][0] == "::1"  # as torch takes it


@pytest.mark.fault("F27")
@pytest.mark.parametrize("asked", ["algo-2", "algo-3"])
def test_failure_at_the_stop_is_told_before_ranks_of_another_host_overrun_the_grace(
    ranks: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    now_s = 0.0

    def on_tick(host: StubHost) -> None:
        nonlocal now_s
        now_s += 8.0
        if host.num_ticks == 1:
            host.known.store(RankReport(rank=0, finished=True, failure=NO_SPACE))
            host.publish(stop_requested=asked == "algo-2")
            host.hear("algo-3", HostState.TRAINING, stop_requested=asked == "algo-3", ranks=(RankReport(rank=1),))
        if host.num_ticks == 2:
            ranks.status = 0
        if now_s - 8.0 > host.timings.stop_grace_s:  # as the host that was asked does, whichever it is
            raise FailedError("HET-41: the ranks did not end")

    monkeypatch.setattr(roles, "time", SimpleNamespace(monotonic=lambda: now_s))
    host = training(on_tick)
    with pytest.raises(FailedError, match="HET-30 algo-2: rank 0: no space"):
        roles._run_ranks(host)  # type: ignore[arg-type]
    # Asked at 8 s and found late at 56 s. The grace is 50 s.
    assert host.num_ticks == 7


@pytest.mark.parametrize(
    ("framework", "is_first", "ports"),
    [
        ("torch", True, ["own"]),
        ("torch", False, [7100]),
        ("tensorflow", True, ["own", 7100]),
        ("tensorflow", False, [7100, "own"]),
    ],
)
def test_ranks_are_told_where_they_meet_on_free_ports_of_these_hosts(
    ranks: SimpleNamespace, framework: str, is_first: bool, ports: list[object]
) -> None:
    ranks.status = 0
    name, other = ("algo-2", "algo-3") if is_first else ("algo-3", "algo-2")
    published = []

    def on_tick(host: StubHost) -> None:
        host.hear(other, HostState.DONE, rendezvous_port=7100)

    class Telling(StubHost):
        def publish(self, **changes: object) -> None:
            published.append(changes.get("rendezvous_port"))
            super().publish(**changes)

    host = Telling(MEMBERS, name, HostState.INIT, on_tick)
    host.placement.framework, host.placement.num_ranks = framework, 2
    host.starter = AgentStarter(framework)
    assert roles._train_generation(host)  # type: ignore[arg-type]
    own_port = published[0]
    assert bool(own_port) is ("own" in ports)
    expected = [("127.0.0.1", own_port if port == "own" else port) for port in ports]
    assert (ranks.options.framework, ranks.options.meeting_points) == (framework, expected)
