"""What a data host says while it waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hetero.cluster import Role
from hetero.control.members.membership import Member
from hetero.control.status import HostState, RankReport
from hetero.launch import roles
from hetero.launch.data_services import Servers
from hetero.launch.ranks.mpi_ranks import MpiStarter
from hetero.launch.ranks.ranks import AgentStarter
from hetero.launch.roles import serve, train
from tests.support.launch.stub_host import FailedError, StubHost

MEMBERS = (Member(host="trainer", role=Role.TRAINER), Member(host="data", role=Role.DATA))
Happens = Callable[[StubHost], None]


def serving(*happens: Happens) -> StubHost:
    """Return a data host that has served to the end of the job. One thing happens at each of its ticks."""
    host = StubHost(MEMBERS, "data", HostState.INIT, lambda host: happens[host.num_ticks - 1](host))
    serve(host)  # type: ignore[arg-type]
    return host


def trainer(state: HostState, **changes: Any) -> Happens:
    """Have the trainer host heard in a state."""
    return lambda host: host.hear("trainer", state, **changes)


def interrupt(host: StubHost) -> None:
    host.interrupted_s = time.monotonic()


@pytest.mark.fault("F15")
def test_trainer_host_waits_for_the_name_of_the_first_one_before_its_ranks_start() -> None:
    def resolve(host: StubHost) -> None:
        host.has_addresses = host.num_ticks == 2

    members = (Member(host="first", role=Role.TRAINER), Member(host="second", role=Role.TRAINER))
    host = StubHost(members, "second", HostState.WAIT_PEERS, resolve)
    host.has_addresses = False
    host.hear("first", HostState.TRAINING)
    assert roles._wait_for_peers(host, time.monotonic() + 60)  # type: ignore[arg-type]
    assert host.said == ["the address of first, where ranks meet"] * 2


def test_trainer_host_of_tensorflow_waits_for_the_names_of_all() -> None:
    members = tuple(Member(host=name, role=Role.TRAINER) for name in ("first", "second", "third"))
    host = StubHost(members, "second", HostState.WAIT_PEERS, lambda host: setattr(host, "has_addresses", True))
    host.starter = AgentStarter("tensorflow")
    host.has_addresses = False
    for name in ("first", "third"):
        host.hear(name, HostState.TRAINING)
    assert roles._wait_for_peers(host, time.monotonic() + 60)  # type: ignore[arg-type]
    assert host.said == ["the address of first, second, third, where ranks meet"]


@pytest.mark.fault("F13")
@pytest.mark.fault("F14")
def test_data_host_says_for_which_trainer_hosts_it_waits() -> None:
    host = serving(
        lambda host: host.known.unreachable("trainer", "refused"),
        trainer(HostState.INIT),
        trainer(HostState.TRAINING),
        trainer(HostState.INIT),  # a restart of the group
        trainer(HostState.DONE),
    )
    assert host.said == ["trainer (sent nothing yet)", "trainer (refused)", "trainer (heard, init)", "", ""]


@pytest.mark.fault("F13")
def test_data_host_asked_to_stop_says_for_whose_end_it_waits() -> None:
    host = serving(trainer(HostState.TRAINING), interrupt, lambda _: None, trainer(HostState.DONE))
    assert host.said == [
        "trainer (sent nothing yet)",
        "",
        "the job's end on trainer (heard, training)",
        "the job's end on trainer (heard, training)",
    ]


@pytest.mark.fault("F13")
def test_data_host_of_a_job_that_was_asked_to_stop_says_for_whose_end_it_waits() -> None:
    host = serving(trainer(HostState.TRAINING, stop_requested=True), lambda _: None, trainer(HostState.DONE))
    assert host.said[1:] == ["the job's end on trainer (heard, training)"] * 2


def test_dispatcher_waits_for_the_workers_of_other_data_hosts() -> None:
    states = [HostState.SERVING] * 3 + [HostState.DRAINING, HostState.DONE]

    def happen(host: StubHost) -> None:
        host.hear("second", states[host.num_ticks - 1])
        host.hear("trainer", HostState.TRAINING if host.num_ticks < 2 else HostState.DONE)

    host = StubHost((*MEMBERS, Member(host="second", role=Role.DATA)), "data", HostState.INIT, happen)
    host.placement.servers = Servers(number=1, dispatcher_host=host.name)
    serve(host)  # type: ignore[arg-type]
    assert host.num_ticks == 5


def test_dispatcher_does_not_wait_for_the_workers_of_a_data_host_that_was_lost() -> None:
    def happen(host: StubHost) -> None:
        host.hear("second", HostState.SERVING)
        host.known._peers["second"].last_heard_s -= host.timings.lease_s + 1
        host.hear("trainer", HostState.DONE)

    host = StubHost((*MEMBERS, Member(host="second", role=Role.DATA)), "data", HostState.INIT, happen)
    host.placement.servers = Servers(number=1, dispatcher_host=host.name)
    serve(host)  # type: ignore[arg-type]
    assert host.num_ticks == 1


def processes(num_there: int, *, ended: dict[int, int] | None = None) -> Any:
    """Return two processes of mpirun. Some of them have connected."""
    ranks = dict(enumerate(range(num_there)))
    return SimpleNamespace(
        parent=SimpleNamespace(num_local=2, world_size=2, gives_ranks=True),
        ranks=ranks,
        ended=ended or {},
        is_complete=num_there == 2,
    )


def test_data_host_on_which_mpirun_made_ranks_ends_the_job() -> None:
    host = StubHost(MEMBERS, "data", HostState.INIT, lambda _: None)
    host.starter = MpiStarter(processes(2))
    with pytest.raises(FailedError, match="HET-02 data: mpirun started hetero on a data host"):
        serve(host)  # type: ignore[arg-type]


def test_trainer_host_without_torch_ends_the_job_and_says_what_starts_ranks_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    host = StubHost(MEMBERS, "trainer", HostState.INIT, lambda _: None)
    with pytest.raises(FailedError, match="HET-02 trainer: this host has no torch.*give --framework tensorflow"):
        train(host)  # type: ignore[arg-type]


def test_ranks_of_mpirun_are_not_to_be_restarted() -> None:
    host = StubHost(MEMBERS, "trainer", HostState.INIT, lambda _: None)
    host.options.job_restarts = 1
    host.starter = MpiStarter(processes(2))
    with pytest.raises(FailedError, match="HET-02 trainer: job_restarts does not work with mpirun"):
        train(host)  # type: ignore[arg-type]


def test_trainer_host_waits_for_all_processes_of_mpirun() -> None:
    found = processes(1)
    host = StubHost(MEMBERS, "trainer", HostState.INIT, lambda _: setattr(found, "is_complete", True))
    host.starter = MpiStarter(found)
    roles._wait_for_processes(host)  # type: ignore[arg-type]
    assert host.said == ["the processes of mpirun: 1 of 2 have connected"]


def test_process_of_mpirun_that_ends_before_the_ranks_start_ends_the_job() -> None:
    host = StubHost(MEMBERS, "trainer", HostState.WAIT_PEERS, lambda _: None)
    host.starter = MpiStarter(processes(2, ended={1: -9}))
    with pytest.raises(FailedError, match="HET-30 trainer: mpirun ended a process of this host"):
        roles._wait_for_peers(host, time.monotonic() + 60)  # type: ignore[arg-type]


def test_ranks_of_mpirun_meet_where_rank_0_is() -> None:
    members = tuple(Member(host=name, role=Role.TRAINER) for name in ("first", "second"))
    host = StubHost(members, "first", HostState.WAIT_PEERS, lambda _: None)
    host.starter = MpiStarter(processes(2))
    assert roles._meeting_points(host, {"first": 0, "second": 7}) == [("127.0.0.1", 7)]  # type: ignore[arg-type]
    with pytest.raises(FailedError, match="HET-02 first: mpirun put rank 0 on no trainer host"):
        roles._meeting_points(host, {"first": 0, "second": 0})  # type: ignore[arg-type]


def test_wait_for_ranks_whose_scripts_have_ended_says_for_what() -> None:
    ended = [RankReport(rank=rank, generation=0, finished=True) for rank in (2, 3)]
    assert roles._awaited_ends(ended[:1], 2) == ""
    assert roles._awaited_ends(ended, 2) == (
        "the end of rank 2, 3: the script has ended, but what it has started or its exit handlers still run"
    )
