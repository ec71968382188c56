"""Launchers meet over real gRPC, ranks reach their launcher, strangers reach nobody."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from hetero.cluster import Role
from hetero.config import Timings
from hetero.control import security
from hetero.control.directory import EndpointRecord
from hetero.control.hub import CONTROL_POLICIES, Hub, RankFacts
from hetero.control.membership import Member, Membership
from hetero.control.session import RankSession
from hetero.control.status import Cause, HostState, HostStatus, StopPoint
from hetero.errors import ClusterError, ExitCode, HeteroError, PortError
from hetero.metrics import StepTimer

TOKEN = security.Token.generate()
MEMBERS = (Member(host="trainer", role=Role.TRAINER), Member(host="data", role=Role.DATA))
FACTS = RankFacts(
    remote=True, data_timeout_s=1, prepare_timeout_s=2, emulate_step_s=None, purity_checks=0, warmup_steps=1
)


def make_hub(host: str, ports: dict[str, int], *, token: security.Token = TOKEN, port: int = 0) -> Hub:
    """Return the hub of one of two hosts; ``ports`` collects where they listen."""

    def resolve(name: str) -> str:
        if name not in ports:
            raise ClusterError("not known yet")
        return f"127.0.0.1:{ports[name]}"

    own = HostStatus(host=host, incarnation=f"{host}-1", version="1", script_digest="d")
    hub = Hub(
        Membership(MEMBERS, own, timings=Timings(), clock=time.monotonic),
        address="127.0.0.1",
        port=port,
        resolve=resolve,
        peers=tuple(member.host for member in MEMBERS if member.host != host),
        token=token,
        job_id="job-a",
        facts=FACTS,
        heartbeat_s=0.3,
    )
    ports[host] = hub.port
    return hub


def wait_for(hub: Hub, predicate: Callable[[Membership], bool], timeout_s: float = 20.0) -> None:
    """Wait until the membership fulfils ``predicate``."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with hub.membership() as membership:
            if predicate(membership):
                return
        hub.wait(0.1)
    pytest.fail("the awaited state did not come")


@pytest.fixture
def hubs() -> Iterator[tuple[Hub, Hub]]:
    ports: dict[str, int] = {}
    with make_hub("trainer", ports) as trainer, make_hub("data", ports) as data:
        yield trainer, data


def test_hub_change_on_one_host_reaches_the_other(hubs: tuple[Hub, Hub]) -> None:
    trainer, data = hubs
    data.update(state=HostState.SERVING)
    wait_for(trainer, lambda membership: not membership.missing(Role.DATA, at_least=HostState.SERVING))


def test_hub_failure_of_a_data_host_is_decided_by_the_trainer_for_both(hubs: tuple[Hub, Hub]) -> None:
    _, data = hubs
    wait_for(data, lambda membership: membership.arbiter == "trainer")
    data.fail(Cause(host="data", summary="no such module", exit_code=ExitCode.SCRIPT_FAILED))
    for hub in hubs:
        wait_for(hub, lambda membership: membership.own.decided is not None)
        with hub.membership() as membership:
            assert membership.own.decided is not None
            assert membership.own.decided.first_line == "HET-30 data: no such module"


def test_hub_last_word_is_known_to_be_delivered(hubs: tuple[Hub, Hub]) -> None:
    trainer, data = hubs
    wait_for(trainer, lambda membership: len(membership.statuses()) == 2)
    trainer.update(state=HostState.DONE)
    wait_for(trainer, lambda membership: membership.final_delivered)
    wait_for(data, lambda membership: membership.trainers_done)


def test_hub_wrong_token_fails_the_job_naming_the_host() -> None:
    ports: dict[str, int] = {}
    with make_hub("trainer", ports), make_hub("data", ports, token=security.Token.generate()) as data:
        wait_for(data, lambda membership: membership.own.decided is not None)
        with data.membership() as membership:
            assert membership.own.decided is not None
            assert membership.own.decided.exit_code is ExitCode.AUTHENTICATION
            assert "trainer" in membership.own.decided.summary


@pytest.mark.fault("F30")
def test_hub_port_in_use_names_the_port() -> None:
    ports: dict[str, int] = {}
    with make_hub("trainer", ports) as trainer, pytest.raises(PortError, match=f"127.0.0.1:{trainer.port}"):
        make_hub("data", {}, port=trainer.port)


@pytest.mark.attack("A10")
@pytest.mark.parametrize("method", sorted(CONTROL_POLICIES))
def test_hub_call_without_token_is_refused(hubs: tuple[Hub, Hub], method: str) -> None:
    trainer, _ = hubs
    channel = grpc.insecure_channel(f"127.0.0.1:{trainer.port}")
    with contextlib.closing(channel), pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(method)(b"", timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_session_sees_endpoints_and_reports(hubs: tuple[Hub, Hub]) -> None:
    trainer, data = hubs
    session = RankSession(f"127.0.0.1:{trainer.port}", TOKEN, job_id="job-a", rank=0, world_size=1)
    with contextlib.closing(session):
        assert session.remote
        assert session.options.prepare_timeout_s == 2
        record = EndpointRecord(endpoint_id="data/0", host="data", address="127.0.0.1:9", incarnation="i", num_slots=3)
        changed = threading.Event()
        session.directory.subscribe(changed.set)
        data.update(state=HostState.SERVING, endpoints=(record,))
        assert changed.wait(20.0)
        assert session.directory.records() == (record,)
        session.fail("boom", "trace", ExitCode.SCRIPT_FAILED)
        wait_for(data, lambda membership: membership.own.decided is not None)
    with trainer.membership() as membership:
        assert membership.own.decided is not None
        assert membership.own.decided.first_line == "HET-30 trainer: rank 0: boom"


@pytest.mark.attack("A11")
@pytest.mark.fault("F31")
def test_session_of_another_job_is_refused(hubs: tuple[Hub, Hub]) -> None:
    trainer, _ = hubs
    with pytest.raises(HeteroError, match="FAILED_PRECONDITION"):
        RankSession(f"127.0.0.1:{trainer.port}", TOKEN, job_id="job-b", rank=0, world_size=1)


def test_session_stop_request_ends_both_ranks_after_the_same_step(hubs: tuple[Hub, Hub]) -> None:
    trainer, _ = hubs
    target = f"127.0.0.1:{trainer.port}"
    sessions = [RankSession(target, TOKEN, job_id="job-a", rank=rank, world_size=2) for rank in range(2)]
    started = [4, 5]
    timers = [StepTimer("train") for _ in sessions]
    validation = StepTimer("train")  # a second loader of the same name, used by rank 0 alone
    for session, timer, count in zip(sessions, timers, started, strict=True):
        session.register_timer(timer)
        for _ in range(count):
            session.check_stop(timer)
    sessions[0].register_timer(validation)
    sessions[0].check_stop(validation)
    trainer.update(stop_requested=True)
    wait_for(trainer, lambda membership: membership.own.stop_at == StopPoint(loader="train", steps=5))
    sessions[0].check_stop(validation)  # it finishes that
    sessions[0].check_stop(timers[0])  # the step that rank 1 had begun already
    for session, timer in zip(sessions, timers, strict=True):
        with pytest.raises(SystemExit) as caught:
            session.check_stop(timer)
        assert caught.value.code == 143
        assert session.stopped
        session.close()
